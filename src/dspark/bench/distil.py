"""`dspark distil`: a draft for one target and your prompts, from the prompts alone, in one command.
It must never train on a prompt that it measures with, nor begin anew what the output folder already holds.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Progress = Callable[[str, int, int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare every option on `parser`."""
    add = parser.add_argument
    add("--model", required=True, help="target: a packaged name, folder, GGUF file or hub id")
    add("--data", nargs="+", required=True, metavar="PATH", help="your prompts, as JSON lines; no answers are needed")
    add(
        "--out", required=True, metavar="DIR", help="answers, checkpoints, report and the draft; continued if it exists"
    )
    add("--draft", default="head", help="head, or a language model (any tokenizer) to begin with (%(default)s)")
    start = "a head's folder to go on from, or none (the one that comes with dspark for the target, if there is one)"
    add("--start", metavar="PATH", help=start)
    _add_data(parser.add_argument_group("answers of the target").add_argument)
    _add_learning(parser.add_argument_group("learning").add_argument)
    _add_measure(parser.add_argument_group("measuring").add_argument)
    add("--minutes", type=float, metavar="N", help="budget: 0.4 of it for answers and 0.4 for learning, at most")
    add("--json", action="store_true", help="print the report as one JSON object instead of tables")
    group = parser.add_argument_group("engine")
    group.add_argument("--device", default="auto", help="auto, cpu or cuda")
    group.add_argument("--threads", type=int, default=None, metavar="N")


def _add_data(add: Callable[..., Any]) -> None:
    temperatures = "one answer a prompt at each; 0 is greedy (0)"
    add("--temperatures", nargs="+", type=float, default=[0.0], metavar="T", help=temperatures)
    add("--max-tokens", type=int, default=160, metavar="N", help="longest answer (%(default)s)")
    add("--max-prompts", type=int, default=0, metavar="N", help="at most so many prompts, drawn by hash; 0: all")
    add("--max-prompt-tokens", type=int, default=512, metavar="N", help="longer prompts are left out (%(default)s)")
    add(
        "--held-out",
        type=float,
        default=0.1,
        metavar="S",
        help="share of prompts, by hash, never trained on (%(default)s)",
    )
    add("--batch", type=int, default=32, metavar="N", help="answers at a time (%(default)s)")


def _add_learning(add: Callable[..., Any]) -> None:
    loss = (
        "tv or kl against the target's law at every place, ce against the answers' tokens alone (tv; ce for heads and "
        "drafts with another tokenizer)"
    )
    share = "share of the texts learned from that the draft writes itself, for the target's laws to correct"
    add("--loss", choices=("tv", "kl", "ce"), default=None, help=loss)
    add("--epochs", type=float, default=3.0, metavar="N", help="times that each answer is seen (%(default)s)")
    add("--lr", type=float, default=None, help="learning rate (2e-4; heads 6e-4)")
    add("--sequences", type=int, default=8, metavar="N", help="answers a step (%(default)s)")
    add(
        "--train-layers",
        type=int,
        default=0,
        metavar="N",
        help="only the last N layers of a model; 0: all (%(default)s)",
    )
    add("--on-policy-share", type=float, default=0.0, metavar="S", help=share)
    add("--on-policy-rounds", type=int, default=2, metavar="N", help="times that it writes anew (%(default)s)")
    add("--seed", type=int, default=1, metavar="N", help="of everything drawn (%(default)s)")


def _add_measure(add: Callable[..., Any]) -> None:
    temperatures = "acceptance is measured at each (0 1)"
    add(
        "--eval-prompts",
        type=int,
        default=24,
        metavar="N",
        help="held-out prompts at most, of acceptance (%(default)s)",
    )
    add("--eval-temperatures", nargs="+", type=float, default=[0.0, 1.0], metavar="T", help=temperatures)
    add("--draft-tokens", type=int, default=5, metavar="K", help="drafts a step while measuring (%(default)s)")
    select = "held-out prompts on which precisions are timed, as by dspark select; 0: none are (%(default)s)"
    add("--select-prompts", type=int, default=8, metavar="N", help=select)


def run(args: argparse.Namespace, *, progress: Progress | None = None, argv: Sequence[str] | None = None) -> int:
    """0 when the draft is finished, 1 when there is more to do (the same command goes on). Raises ValueError."""
    from dspark.bench.distil_report import report_text, write_report
    from dspark.bench.distil_run import DistilRun

    stopped: list[bool] = []
    previous = signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
    try:
        distillation = DistilRun(args, argv=sys.argv if argv is None else argv, progress=progress, say=say)
        found = distillation.run(stop=lambda: bool(stopped))
    finally:
        signal.signal(signal.SIGINT, previous)
    if found is None:
        say("stopped; the same command goes on")
        return 1
    write_report(Path(args.out), found)
    print(json.dumps(found, ensure_ascii=False) if args.json else report_text(found))
    return 0


def say(line: str) -> None:
    """Progress, on stderr."""
    print(f"dspark distil: {line}", file=sys.stderr, flush=True)
