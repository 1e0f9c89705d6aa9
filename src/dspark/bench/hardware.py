"""What passes cost on this machine: measured costs as a table and as a plot.
It must never print a figure that was not measured in this run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Points = Sequence[tuple[int, float]]


def curves(costs: Mapping[str, Any]) -> dict[str, Points]:
    """Every measured curve by name: [rows, seconds]."""
    found: dict[str, Points] = {}
    for name, cost in costs.items():
        if name == "head":
            found |= {f"head, {kind} rows": points for kind, points in cost.items()}
        else:
            found[name] = cost["points"]
    return found


def report(info: Mapping[str, Any], costs: Mapping[str, Any]) -> str:
    """Tables for a terminal."""
    threads = f"path {info['path']}, {info['dtype']}, {info['device']}"
    blocks = [f"{info['model']} ({threads}), draft {info['draft']}"]
    for name, points in curves(costs).items():
        first = points[0][1]
        lines = [f"{name}\n  rows       ms   ms/row   times one row"]
        lines += [f"  {n:4} {1e3 * s:8.2f} {1e3 * s / n:8.3f} {s / first:15.2f}" for n, s in points]
        if "per_context" in costs.get(name, {}):
            row, seq = (1e6 * costs[name][field] for field in ("per_context", "per_seq_context"))
            lines.append(f"  a cached token more: {row:.3f} microseconds a row and {seq:.3f} a sequence")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def plot(costs: Mapping[str, Any], path: Path) -> None:
    """Write a picture: a line a curve, both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves(costs).items():
        axes.plot([n for n, _ in points], [1e3 * s for _, s in points], marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("packed rows")
    axes.set_ylabel("milliseconds a pass")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def check_plot(path: Path) -> None:
    """Before minutes of measuring. Raises ValueError."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ValueError("the plot needs matplotlib: install it, or dspark with its extra: pip install 'dspark[bench]'")
    if path.suffix not in (".png", ".svg", ".pdf") or not path.parent.is_dir():
        raise ValueError(f"--plot {path}: give a .png, .svg or .pdf in a folder that is there")
