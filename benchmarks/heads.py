"""Heads at equal parameters and data: one training each, accepted length by task, acceptance by position, draft time.

    python benchmarks/heads.py recipes/compare-heads.toml --answers DIR --out DIR [--set training.blocks=N]

Each variant is the recipe with a few settings changed. Runs are resumed where an earlier call stopped; the result is
JSON lines (--out/heads.jsonl) and a table on stdout. Leave the machine alone meanwhile: draft times are measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.cli.train import Console, lazy_generate, overrides
from dspark.train.recipe import load_recipe

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "DSpark, vanilla": {"head.markov_type": "vanilla"},
    "DSpark, gated": {"head.markov_type": "gated"},
    "DSpark, recurrent": {"head.markov_type": "rnn"},
    # What the Markov head does not take goes into the layers, so that all have the same number of parameters.
    "DFlash": {"head.markov_rank": 0, "head.intermediate_size": 2728},
    "EAGLE-3": {"head.kind": "eagle3", "head.intermediate_size": 5696},
}
REPETITIONS = 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--answers", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--only", help="comma-separated names of variants")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(VARIANTS)
    rows = []
    for name in names:
        rows.append(measure(name, args))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    Path(args.out, "heads.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))
    return 0


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one variant (or read its finished run), validate it, and time its drafts."""
    from dspark.train.run import TrainingRun

    recipe = load_recipe(args.recipe, overrides=dict(VARIANTS[name]) | overrides(args.set))
    folder = Path(args.out) / "".join(c if c.isalnum() else "-" for c in name.lower())
    run = TrainingRun(
        recipe,
        folder,
        generate=lazy_generate(recipe.target, device="auto", threads=None, batch=recipe.data.batch),
        answers=Path(args.answers),
        sink=Console(as_json=False),
    )
    trainer = run.trainer(run.answers())
    trainer.run()
    found = run.export(trainer, run.origin(sys.argv))
    return {
        "name": name,
        "parameters": sum(p.numel() for p in trainer.parameters),
        "blocks": trainer.progress.blocks,
        "seconds": round(trainer.progress.seconds),
        **found.as_dict(),
        "draft_ms": draft_ms(recipe.target, folder / "head"),
    }


def draft_ms(target: str, head: Path) -> float:
    """Median milliseconds of one greedy draft of a whole block behind 200 tokens, on the fastest path there is."""
    from dspark import LLM, SamplingParams
    from dspark.config import SpeculationConfig

    llm = LLM(target, speculative_config=SpeculationConfig(method="model", model=str(head), policy="fixed"))
    seconds: list[float] = []
    drafter = llm.engine.speculator.drafter
    propose = drafter.propose

    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        drafts = propose(*arguments, **options)
        seconds.append(time.perf_counter() - start)
        return drafts

    drafter.propose = timed  # type: ignore[method-assign]
    llm.generate([[5] * 200], SamplingParams(temperature=0, max_tokens=8 * REPETITIONS, ignore_eos=True))
    return round(1e3 * statistics.median(seconds), 2)


def table(rows: list[dict[str, Any]]) -> str:
    tasks = sorted({task for row in rows for task in row["by_task"]})
    lines = ["| head | parameters | all | " + " | ".join(tasks) + " | acceptance by position | draft ms |"]
    lines.append("|---" * (len(tasks) + 5) + "|")
    for row in rows:
        cells = [row["name"], f"{row['parameters'] / 1e6:.1f} M", f"{row['accepted_length']:.2f}"]
        cells += [f"{row['by_task'].get(task, float('nan')):.2f}" for task in tasks]
        cells += [" ".join(f"{share:.2f}" for share in row["conditional"]), f"{row['draft_ms']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
