"""`dspark verify`: the options of an engine around bench/verify, which does the work.
It must never compare two engines that differ in more than speculation.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dspark.bench import verify
from dspark.cli import options
from dspark.config import SpeculationConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked and allowed, the model, and how it drafts."""
    verify.add_arguments(parser)
    options.add_engine_arguments(parser)
    options.add_speculation_arguments(parser, task=False)


def run(args: argparse.Namespace) -> int:
    """0 when the gate is passed, 1 when not."""
    config = options.read_config(args)
    speculation = config.speculation
    if args.url is None and speculation.method == "none":
        raise ValueError("there is nothing to verify without a drafter: give --draft ngram, suffix, dspark or a model")
    if args.url is not None and (args.draft is not None or args.speculative_config is not None):
        raise ValueError("--url asks a server, which has its own drafter: leave --draft and --speculative-config out")

    def open_sides(args: argparse.Namespace) -> Any:
        from dspark.bench.verify_sides import local_sides, remote_sides
        from dspark.cli.generate import load

        if args.url is not None:
            return remote_sides(args)
        return local_sides(args, load(args.model, config=config, speculation=SpeculationConfig()), speculation)

    return verify.run(args, open_sides=open_sides, argv=sys.argv)
