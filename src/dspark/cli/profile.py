"""`dspark profile`: the options of an engine around bench/profile, which does the work.
It must never record with a policy that the user did not choose without saying so: the default is "shadow"."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from dspark.bench import profile
from dspark.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is recorded, how it is answered, and where the report goes."""
    profile.add_arguments(parser)
    options.add_engine_arguments(parser)
    options.add_speculation_arguments(parser)
    options.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Record and report. Drafts are verified only under a --policy of the user's own."""
    params = options.read_params(args)
    config = options.read_config(args)
    speculation = config.speculation
    if args.policy is None and args.speculative_config is None:
        speculation = dataclasses.replace(speculation, policy="shadow")

    def load() -> Any:
        from dspark.cli.generate import load as load_llm

        return load_llm(args.model, config=config, speculation=speculation)

    return profile.run(args, load=load, params=params)
