"""`dspark train`: make a draft head for a model from a recipe.
It must never start anew what the output folder already holds, nor lose a step to an interruption."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.cli.progress import ProgressBar

if TYPE_CHECKING:
    from dspark.train.run import TrainingRun

REPORT_SECONDS = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare every option on `parser`."""
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a TOML file (see recipes/)")
    add(
        "--out", required=True, metavar="DIR", help="answers, checkpoints and the finished head; continued if it exists"
    )
    add("--set", action="append", default=[], metavar="A.B=C", help="one setting, such as training.blocks=1000")
    add("--max-minutes", type=float, metavar="N", help="stop training after N minutes, to be continued later")
    add("--answers", metavar="DIR", help="the target's answers, to be shared between runs (default: answers in --out)")
    add("--answers-only", action="store_true", help="let the target answer the prompts, and stop")
    add("--export-only", action="store_true", help="write head/ from the last checkpoint without training further")
    add("--save-as", choices=("bfloat16", "float32", "int8"), default="bfloat16", help="of the head (%(default)s)")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--threads", type=int, metavar="N", help="CPU threads")
    add("--json", action="store_true", help="rows of training and validation as JSON lines on stdout")
    add("--wandb", metavar="PROJECT", help="log them to this project of Weights & Biases too")


def run(args: argparse.Namespace) -> int:
    """Train, or go on training; exit code 0 when the head is finished, 1 when there is more to do."""
    from dspark.train.recipe import load_recipe

    recipe = load_recipe(args.recipe, overrides=overrides(args.set))
    console, progress = Console(as_json=args.json), ProgressBar()
    with ExitStack() as stack:
        sinks: list[Callable[[Mapping[str, Any]], None]] = [console]
        if args.wandb is not None:
            from dspark.observe.wandb_sink import training_sink

            logged = training_sink(project=args.wandb, config=dataclasses.asdict(recipe))
            stack.callback(logged.close)
            sinks.append(logged)
        return _run(args, recipe, console, progress, sinks)


def _run(
    args: argparse.Namespace,
    recipe: Any,
    console: Console,
    progress: ProgressBar,
    sinks: Sequence[Callable[[Mapping[str, Any]], None]],
) -> int:
    from dspark.train.run import TrainingRun

    def tell(row: Mapping[str, Any]) -> None:
        for sink in sinks:
            sink(row)

    training = TrainingRun(
        recipe,
        Path(args.out),
        answers=None if args.answers is None else Path(args.answers),
        generate=lazy_generate(
            recipe.target, device=args.device, threads=args.threads, batch=recipe.data.batch, progress=progress
        ),
        device=args.device,
        threads=args.threads,
        progress=progress,
        sink=tell,
    )
    examples = training.answers()
    if args.answers_only:
        return 0
    return _train(training, examples, args, console)


def _train(training: TrainingRun, examples: Sequence[Any], args: argparse.Namespace, console: Console) -> int:
    trainer = training.trainer(examples)
    if args.export_only and not trainer.progress.step:
        raise ValueError(f"{args.out} has no checkpoint to export from: train first, or check --out")
    stopped = []
    previous = signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
    try:
        seconds = None if args.max_minutes is None else 60 * args.max_minutes
        done = args.export_only or trainer.run(max_seconds=seconds, stop=lambda: bool(stopped))
    finally:
        signal.signal(signal.SIGINT, previous)
    if not done:
        console.say(f"stopped at step {trainer.progress.step} of {trainer.num_steps}; the same command goes on")
        return 1
    found = training.export(trainer, training.origin(sys.argv), dtype=args.save_as)
    console.say(f"accepted length {found.accepted_length:.3f} on held-out answers; the head is in {args.out}/head")
    return 0


def overrides(words: Sequence[str]) -> dict[str, Any]:
    """--set A.B=C with a TOML value; a bare word is a string."""
    from dspark.train.recipe import tomllib

    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--set {word!r} is not of the form table.key=value, such as training.blocks=1000")
        try:
            found[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[key.strip()] = value.strip()
    return found


def lazy_generate(
    target: str,
    *,
    device: str,
    threads: int | None,
    batch: int,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Callable[..., list[list[int]]]:
    """train.answers.Generate by our own engine, which is loaded when first asked for."""
    engines: list[Any] = []

    def generate(prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float, seed: int) -> list[list[int]]:
        from dspark import LLM, SamplingParams

        if not engines:
            settings: dict[str, Any] = {"threads": threads} if threads else {}
            engines.append(
                LLM(target, draft="none", device=device, max_num_seqs=batch, max_num_batched_tokens=1024, **settings)
            )
        params = [
            SamplingParams(
                max_tokens=max_tokens, temperature=temperature, seed=None if temperature == 0 else seed + index
            )
            for index in range(len(prompts))
        ]
        engine = engines[0].engine

        def tell(stats: Any) -> None:
            progress("prompts answered of this part", len(prompts) - len(engine.rows), len(prompts))

        engine.sinks.append(tell)
        try:
            outputs = engines[0].generate([list(prompt) for prompt in prompts], params)
        finally:
            engine.sinks.remove(tell)
        if refused := [output.error for output in outputs if output.error]:
            raise ValueError(f"{len(refused)} prompts were refused by the target: {refused[0]}")
        return [output.outputs[0].token_ids for output in outputs]

    return generate


class Console:
    """Training rows for a person on stderr: every REPORT_SECONDS, and each validation; or all as JSON on stdout."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.last = 0.0
        self.began: tuple[float, int] | None = None

    def __call__(self, row: Mapping[str, Any]) -> None:
        if self.as_json:
            print(json.dumps(row), flush=True)
            return
        if "validation" in row:
            found = row["validation"]
            tasks = " ".join(f"{task} {length:.2f}" for task, length in found["by_task"].items())
            self.say(
                f"step {row['step']}: accepted length {found['accepted_length']:.3f} ({tasks}), {row['blocks']} blocks"
            )
        elif "loss" in row:
            self._step(row)
        else:
            self.say(", ".join(f"{name} {value}" for name, value in row.items()))

    def _step(self, row: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if self.began is None:
            self.began = (now, row["step"])
        if now - self.last < REPORT_SECONDS:
            return
        self.last = now
        steps = row["step"] - self.began[1]
        left = (row["num_steps"] - row["step"]) * (now - self.began[0]) / steps if steps else 0.0
        self.say(
            f"step {row['step']}/{row['num_steps']}: loss {row['loss']:.3f}, first draft accepted "
            f"{row['accept_first']:.3f}, {left / 60:.0f} min left"
        )

    @staticmethod
    def say(text: str) -> None:
        print(f"dspark: {text}", file=sys.stderr, flush=True)
