"""`dspark profile`: the options of an engine around bench/profile, which does the work.
It must never record with a policy that the user did not choose without saying so: the default is "shadow"."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from dspark.bench import profile
from dspark.cli import options

REPLAY_OPTIONS = {"--replay", "--report", "--history"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is recorded, how it is answered, and where the report goes."""
    profile.add_arguments(parser)
    options.add_engine_arguments(parser)
    options.add_speculation_arguments(parser)
    options.add_sampling_arguments(parser)


def _given(args: argparse.Namespace) -> set[str]:
    """Options whose value is not the default."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    return {a.option_strings[-1] for a in parser._actions if getattr(args, a.dest) != a.default}


def run(args: argparse.Namespace) -> int:
    """Record and report. Drafts are verified only under a --policy of the user's own."""
    if args.replay is not None and args.data is None and (others := _given(args) - REPLAY_OPTIONS):
        given = ", ".join(sorted(others))
        raise ValueError(f"--replay {args.replay} reports on what was recorded and runs no model: leave {given} out")
    if args.task is not None:
        raise ValueError(f"--task {args.task}: each row of the data is recorded under its own task; leave it out")
    params = options.read_params(args)
    config = options.read_config(args)
    speculation = config.speculation
    if args.policy is None and args.speculative_config is None:
        speculation = dataclasses.replace(speculation, policy="shadow")
    if not speculation.num_speculative_tokens:
        raise ValueError("num_speculative_tokens=0 drafts nothing, so there is nothing to record: give at least 1")

    def load() -> Any:
        from dspark.cli.generate import load as load_llm

        return load_llm(args.model, config=config, speculation=speculation)

    return profile.run(args, load=load, params=params)
