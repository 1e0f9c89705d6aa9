"""Figures of a training run as PNG files: the reliability diagram and the curve of accepted length.
They must never be needed: a run without matplotlib loses its pictures and nothing else."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.train.calibrate import Reliability, overall_ece


def can_draw() -> bool:
    """Whether matplotlib is installed (pip install dspark[bench])."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_reliability(before: Sequence[Reliability], after: Sequence[Reliability], path: Path) -> None:
    """One panel a position: predicted against observed survival, before and after temperature scaling."""
    plt = _pyplot()
    columns = min(4, len(before))
    rows = -(-len(before) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.2 * columns, 3.4 * rows), squeeze=False)
    for j, axis in enumerate(axes.flat):
        if j >= len(before):
            axis.axis("off")
            continue
        axis.plot([0, 1], [0, 1], "--", color="0.7", linewidth=1)
        for found, colour, label in ((before[j], "C1", "before"), (after[j], "C0", "after")):
            axis.plot([b[0] for b in found.bins], [b[1] for b in found.bins], "o-", color=colour, label=label)
        total = max(1, after[j].num_rows)
        axis.bar([b[0] for b in after[j].bins], [b[2] / total for b in after[j].bins], 0.05, color="C0", alpha=0.2)
        axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted", ylabel="observed")
        axis.set_title(
            f"drafts 1..{j + 1}: ECE {before[j].ece:.3f} to {after[j].ece:.3f}\n"
            f"Brier {before[j].brier:.3f} to {after[j].brier:.3f}, AUC {after[j].auc:.3f}",
            fontsize=8,
        )
    axes.flat[0].legend(fontsize=8)
    figure.suptitle(f"Survival of drafts; ECE over all {overall_ece(before):.3f} to {overall_ece(after):.3f}")
    _save(figure, path)


def draw_curve(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Accepted length by task on held-out answers against blocks trained; rows of Trainer.progress.history."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.5))
    blocks = [row["blocks"] for row in history]
    for task in sorted({task for row in history for task in row["validation"]["by_task"]}):
        axis.plot(blocks, [row["validation"]["by_task"].get(task) for row in history], ".-", label=task)
    overall = [row["validation"]["accepted_length"] for row in history]
    axis.plot(blocks, overall, "k.-", linewidth=2, label="all")
    axis.set(xlabel="blocks trained", ylabel="accepted length, bonus included", title="Held-out answers, greedy")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
