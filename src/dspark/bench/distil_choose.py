"""After a distillation: acceptance before and after on held-out prompts, and which precision of the result pays best.
It must never measure on a prompt that was trained on, nor give the new draft other prompts than the old one.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.bench.acceptance import Acceptance, measure_acceptance, relative_gain
from dspark.train.distil_recipe import HEAD

if TYPE_CHECKING:
    from dspark.bench.distil_run import DistilRun

HELD_OUT = "held-out.jsonl"


def measure_both(run: DistilRun, draft: str) -> list[dict[str, Any]]:
    """A row a temperature: `before` (None where there was no draft to begin with), `after`, and `gain`, relative, of
    the acceptance rate."""
    from dspark import LLM

    args, data = run.args, run.recipe.data
    prompts = [prompt.tokens for prompt in run.held_out(args.eval_prompts)]
    run.say(f"acceptance on {len(prompts)} held-out prompts")
    run.check_target()
    llm = LLM(
        args.model,
        draft="none",
        seed=run.recipe.learning.seed,
        max_num_seqs=min(8, data.batch),
        max_model_len=data.max_prompt_tokens + data.max_answer_tokens,
        **_engine(args),
    )
    start = run.recipe.start if args.draft == HEAD else args.draft
    rows = []
    for temperature in args.eval_temperatures:
        found: list[Acceptance | None] = []
        for name in (start, draft):
            if not name:
                found.append(None)
                continue
            found.append(
                measure_acceptance(
                    llm,
                    name,
                    prompts,
                    temperature=temperature,
                    max_tokens=data.max_answer_tokens,
                    num_drafts=args.draft_tokens,
                )
            )
            gc.collect()
        rows.append(_row(temperature, *found))
        run.say(_told(rows[-1]))
    return rows


def _row(temperature: float, before: Acceptance | None, after: Acceptance | None) -> dict[str, Any]:
    assert after is not None
    row: dict[str, Any] = {"temperature": temperature, "before": None, "after": after.as_dict(), "gain": None}
    if before is not None:
        gain, low, high = relative_gain(before, after)
        row |= {"before": before.as_dict(), "gain": {"relative": gain, "low": low, "high": high}}
    return row


def _told(row: dict[str, Any]) -> str:
    after, before = row["after"], row["before"]
    was = "" if before is None else f" (before: {before['acceptance_rate']:.3f}, {before['accepted_length']:.2f})"
    return (
        f"temperature {row['temperature']:g}: acceptance {after['acceptance_rate']:.3f}, accepted length "
        f"{after['accepted_length']:.2f}{was}"
    )


def choose(run: DistilRun, draft: str) -> dict[str, Any]:
    """The result in each precision, and what it began with, raced as by `dspark select` on held-out prompts: the
    recommended one, and the files of the report."""
    args = run.args
    if not args.select_prompts:
        return {"chosen": None, "files": []}
    from dspark.bench import select as selection
    from dspark.bench import select_report
    from dspark.bench.candidates import expand
    from dspark.bench.command import require_matplotlib
    from dspark.bench.data import load_rows
    from dspark.bench.harness import BenchSettings

    require_matplotlib()
    file = run.folder / HELD_OUT
    rows = [{"task": prompt.task, "prompt": prompt.text} for prompt in run.held_out(args.select_prompts)]
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    start = run.recipe.start if args.draft == HEAD else args.draft
    asked = _select_args(run, [draft, *([start] if start else [])], file)
    variants = expand([draft], precisions=("bf16", "int8", "int4"), is_head=selection.as_it_is)
    if start:
        variants += expand([start], precisions=("bf16",), is_head=selection.as_it_is)
    choice, head = selection.select(
        asked,
        variants,
        load_rows([file]),
        settings=BenchSettings(max_tokens=run.recipe.data.max_answer_tokens, repeat=1),
        loads=[1, 4, 16],
        progress=run.progress,
        argv=run.argv,
    )
    folder = run.folder / "select"
    folder.mkdir(exist_ok=True)
    files = select_report.write(folder / "select", choice, head=head, model=args.model)
    return {"chosen": choice.best, "files": [str(Path(path).name) for path in files], "candidates": _rows(choice)}


def _rows(choice: Any) -> list[dict[str, Any]]:
    names = ("name", "speedup", "accepted_length", "acceptance_rate", "num_bytes", "out")
    return [{name: getattr(row, name) for name in names} for row in choice.rows]


def _select_args(run: DistilRun, drafts: Sequence[str], file: Path) -> argparse.Namespace:
    """As `dspark select` would be given them."""
    from dspark.bench.select import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--model", run.args.model, "--drafts", *drafts, "--data", str(file)]
    words += ["--max-model-len", str(min(2048, run.target.max_context))]
    for name, value in _engine(run.args).items():
        words += [f"--{name}", str(value)]
    return parser.parse_args(words)


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of the engine that were given."""
    found = {"device": args.device, "threads": args.threads}
    return {name: value for name, value in found.items() if value is not None}
