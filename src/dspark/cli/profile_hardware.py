"""`dspark profile-hardware`: the options of an engine around bench/hardware, which draws and prints.
It must never take costs from an earlier run: it measures, and what it measures is kept for the next start.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dspark.bench import hardware
from dspark.cli import options

DEFAULT_MODEL = "smollm2-135m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model and its drafter, and where the plot goes."""
    parser.add_argument("--plot", metavar="FILE", help="also a plot: milliseconds by rows")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables; seconds")
    options.add_engine_arguments(parser)
    options.add_speculation_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, keep for the next start, and print."""
    if args.plot is not None:
        hardware.check_plot(Path(args.plot))
    from dspark.cli.generate import load

    llm = load(args.model or DEFAULT_MODEL, config=options.read_config(args))
    costs = llm.measure_costs()
    if args.json:
        print(json.dumps({"info": llm.info(), "costs": costs}, default=str))
    else:
        print(hardware.report(llm.info(), costs))
    if args.plot is not None:
        hardware.plot(costs, Path(args.plot))
    return 0
