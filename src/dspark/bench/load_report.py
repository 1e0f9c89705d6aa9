"""Report of a load: tables, a Markdown page, JSON lines and plots of what bench/load_summary computed.
It must never compute a figure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dspark.bench.load import LoadResult
from dspark.bench.load_summary import FORMULAS, LoadFigures, Slo
from dspark.bench.report import Section, aligned, machine, markdown_table

Figures = Mapping[tuple[str, str], LoadFigures]


def load_sections(result: LoadResult, figures: Figures) -> list[Section]:
    """Throughput and its ratio first, then what users feel, then why."""
    plain = result.names[0]

    def table(title: str, text: Callable[[LoadFigures], str], names: Sequence[str] = result.names) -> Section:
        rows = [[load.name, *(text(figures[load.name, name]) for name in names)] for load in result.loads]
        return Section(title=title, header=["load", *names], rows=rows)

    def ratio(cell: LoadFigures) -> str:
        return f"{cell.throughput / figures[cell.load, plain].throughput:.2f}"

    def seconds(name: str, *, scale: float = 1.0) -> Callable[[LoadFigures], str]:
        return lambda cell: " / ".join(f"{scale * value:.3g}" for value in cell.latencies[name].values()) or "-"

    tables = [
        table("throughput, tokens/s", _throughput),
        table(f"throughput against {plain}", ratio, result.names[1:]),
        table("steady throughput, tokens/s", lambda cell: _number(cell.steady_throughput, ".1f")),
        table("goodput, requests/s", lambda cell: f"{cell.goodput:.2f}"),
        table("floor held", lambda cell: _number(cell.floor_held, ".1%")),
        table("TTFT s, p50 / p90 / p99", seconds("ttft")),
        table("TPOT ms, p50 / p90 / p99", seconds("tpot", scale=1000)),
        table("ITL ms, p50 / p90 / p99", seconds("itl", scale=1000)),
        table("per-user speed, tokens/s", lambda cell: _number(cell.per_user, ".1f")),
        table("accepted length", lambda cell: f"{cell.accepted_length:.2f}"),
        table("drafts verified a request", lambda cell: f"{cell.verified_per_request:.1f}"),
        table("rows a pass", lambda cell: _number(cell.rows_per_pass, ".1f")),
        table("step time error", lambda cell: _number(cell.step_time_error, ".1%")),
    ]
    if not any(load.num_floors for load in result.loads):
        tables = [section for section in tables if section.title != "floor held"]
    return [section for section in tables if len(section.header) > 1]


def _throughput(cell: LoadFigures) -> str:
    low, high = cell.throughput_range
    return f"{cell.throughput:.1f}" + (f" [{low:.1f}, {high:.1f}]" if low < high else "")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def load_notes(result: LoadResult, slo: Slo) -> list[str]:
    """What a reader must know to believe the figures."""
    settings = result.settings
    open_loops = [load for load in result.loads if load.rate is not None]
    lines = [
        f"{len(result.rows)} prompts, each asked once in a run, up to {settings.max_tokens} tokens, temperature "
        f"{settings.temperature:g}, {settings.repeat} repetitions; variants take turns at each load.",
        "Loads of a plain number are closed loops of that many clients, each asking again as soon as it is answered."
        + (
            f" Loads with /s are open loops, gaps Gamma({open_loops[0].burstiness:g}) distributed (1: Poisson)."
            if open_loops
            else ""
        ),
        "One process, the same target weights; every run has its own cache, drafter and policy; prefix reuse is off.",
    ]
    if slo != Slo():
        lines.append(f"A good request: TTFT at most {slo.ttft} s, TPOT at most {slo.tpot} s (None: no limit).")
    return lines


def load_text(result: LoadResult, figures: Figures, slo: Slo) -> str:
    """For a terminal."""
    blocks = [f"{table.title}\n{aligned([table.header, *table.rows])}" for table in load_sections(result, figures)]
    formulas = "\n".join(f"  {name}: {formula}" for name, formula in FORMULAS)
    return "\n\n".join([*blocks, "\n".join(load_notes(result, slo)), f"formulas\n{formulas}"])


def load_page(
    result: LoadResult, figures: Figures, slo: Slo, *, title: str, head: Mapping[str, Any], plot: str | None
) -> str:
    """A page: the command, the plots, the tables, how it was measured and on what."""
    lines = [f"## {title}", "", "```", str(head["command"]), "```", ""]
    if plot:
        lines += [f"![throughput against per-user speed; budget against concurrency]({plot})", ""]
    for table in load_sections(result, figures):
        lines += [f"**{table.title}**", "", *markdown_table([table.header, *table.rows]), ""]
    lines += [*(f"- {note}" for note in load_notes(result, slo)), "", "How each number is made:", ""]
    lines += [*(f"- {name}: {formula}" for name, formula in FORMULAS), "", machine(head), ""]
    return "\n".join(lines)


def load_lines(result: LoadResult, figures: Figures, *, head: Mapping[str, Any]) -> list[str]:
    """The head with provenance first; then figures, then every request."""
    run = f"{head['date']} {head['command']}"
    records: list[dict[str, Any]] = [{"kind": "head", **head, "formulas": dict(FORMULAS)}]
    records += [{"kind": "figures", **cell.as_dict()} for cell in figures.values()]
    for measured in result.runs:
        place = {"variant": measured.variant, "load": measured.load.name, "repetition": measured.repetition}
        records += [
            {
                "kind": "request",
                **place,
                "task": result.rows[served.row].task,
                "id": result.rows[served.row].id,
                "came": round(served.came, 4),
                "first": round(served.deliveries[0][0], 4),
                "last": round(served.deliveries[-1][0], 4),
                "num_prompt": served.num_prompt,
                "num_tokens": served.num_tokens,
                "num_verified": served.record.num_verified,
                "num_accepted": served.record.num_accepted,
            }
            for served in measured.served
        ]
    return [json.dumps({"run": run, **record}, ensure_ascii=False) for record in records]


def plot_load(result: LoadResult, figures: Figures, path: Path, *, title: str) -> None:
    """Write a PNG, after the DSpark paper's figures 7 and 8: throughput against per-user speed, and drafts verified for
    each row and pass against the load."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    pareto, budget = figure.subplots(1, 2)
    for name in result.names:
        cells = [figures[load.name, name] for load in result.loads]
        points = [(cell.per_user, cell.throughput) for cell in cells if cell.per_user]
        pareto.plot(*zip(*points), marker="o", markersize=4, label=name)
        each = [cell.verified_per_request * cell.num_requests / max(1, _row_passes(cell)) for cell in cells]
        budget.plot(range(len(cells)), each, marker="o", markersize=4)
    pareto.set_xlabel("tokens/s of one user (1 / median TPOT)")
    pareto.set_ylabel("throughput, tokens/s")
    budget.set_xticks(range(len(result.loads)), [load.name for load in result.loads])
    budget.set_xlabel("load")
    budget.set_ylabel("drafts verified a row and pass")
    for axes in (pareto, budget):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    figure.legend(fontsize=8, ncols=5, loc="outside lower center")
    figure.savefig(path, dpi=130)


def _row_passes(cell: LoadFigures) -> float:
    return cell.num_tokens / cell.accepted_length if cell.accepted_length else 0.0
