"""The plot of a benchmark: speedup by task and variant, with intervals.
It must never need a display, or be imported where matplotlib may be missing."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from dspark.bench.data import printable
from dspark.bench.summary import Summary


def label(name: str) -> str:
    """A name as matplotlib shows it, which reads what stands between dollars as a formula and leaves out what begins
    with an underscore."""
    text = printable(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def plot_speedups(summary: Summary, path: Path, *, title: str) -> None:
    """Write a PNG: one group of points a task, one colour a variant; the line at 1 is plain decoding."""
    baseline, *others = summary.variants
    tasks = [task for task in summary.tasks if any(summary.cells[task, name].speedup for name in others)]
    figure = Figure(figsize=(max(6.0, 1.2 * len(tasks) + 2), 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(1.0, color="0.5", linewidth=1, label=label(f"{baseline} (plain)"))
    colours = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    for number, name in enumerate(others):
        offset = (number - (len(others) - 1) / 2) * 0.8 / max(len(others), 1)
        for column, task in enumerate(tasks):
            cell = summary.cells[task, name]
            if cell.speedup is None:
                continue
            low, high = cell.interval or (cell.speedup, cell.speedup)
            # A ratio of medians of few prompts may lie outside its percentile interval; a bar has no negative length.
            error = [[max(cell.speedup - low, 0.0)], [max(high - cell.speedup, 0.0)]]
            shown = label(name) if column == 0 else None
            axes.errorbar(
                column + offset, cell.speedup, yerr=error, fmt="o", markersize=4, capsize=2,
                color=colours[number % len(colours)], label=shown,
            )  # fmt: skip
    axes.set_xticks(range(len(tasks)), [label(task) for task in tasks], rotation=25, ha="right")
    axes.set_ylabel("speedup against plain decoding")
    axes.set_ylim(bottom=0)
    axes.set_title(label(title), fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(fontsize=8, ncols=4, loc="outside lower center")
    figure.savefig(path, dpi=130)
