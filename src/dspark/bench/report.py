"""Report: a benchmark's figures as tables, a Markdown page, JSON lines and a plot.
It must never compute a figure: it prints those of dspark.bench.summary, with their formulas beside them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.bench.harness import Result
from dspark.bench.stats import acceptance_by_position
from dspark.bench.summary import ALL, FORMULAS, Figures, Summary, measurement_row

MAX_DIFFERENCES = 20


@dataclass(frozen=True, kw_only=True)
class Section:
    """A titled table; the first column names the row."""

    title: str
    header: list[str]
    rows: list[list[str]]


def sections(result: Result, summary: Summary) -> list[Section]:
    """Every table of the report, those that have something to say."""
    others = summary.variants[1:]
    speaking = [name for name in summary.variants if (r := summary.cells[ALL, name].record) and r.num_verified]
    tables = [
        _by_task("tokens/s", summary, summary.variants, lambda cell: _number(cell.tokens_per_second, ".1f")),
        _by_task(f"speedup against {result.baseline} [95% interval]", summary, others, _speedup),
        _by_task("accepted length", summary, speaking, lambda cell: _number(cell.accepted_length, ".2f")),
        _variants_section(summary),
        _positions_section(summary, speaking),
        _phases_section(summary),
        _differences_section(result),
    ]
    return [table for table in tables if table.rows and len(table.header) > 1]


def _by_task(title: str, summary: Summary, names: Sequence[str], text: Any) -> Section:
    rows = [[task, *(text(summary.cells[task, name]) for name in names)] for task in summary.tasks]
    rows = [row for row in rows if any(cell != "-" for cell in row[1:])]
    return Section(title=title, header=["task", *names], rows=rows)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _speedup(cell: Figures) -> str:
    if cell.speedup is None:
        return "-"
    interval = f" [{cell.interval[0]:.2f}, {cell.interval[1]:.2f}]" if cell.interval else ""
    return f"{cell.speedup:.2f}{interval}"


def _variants_section(summary: Summary) -> Section:
    counted = ["drafted", "verified", "accepted"]
    header = ["variant", "accepted length", "acceptance", *counted, "first token s", "same text"]
    rows = []
    for name in summary.variants:
        cell = summary.cells[ALL, name]
        record = cell.record
        counts = [str(getattr(record, f"num_{name}")) if record else "-" for name in counted]
        rate = _number(record.acceptance_rate if record and record.num_verified else None, ".2f")
        length = _number(cell.accepted_length, ".2f")
        rows.append([name, length, rate, *counts, _number(cell.first_seconds, ".3f"), _same_text(cell.verdicts)])
    return Section(title=f"by variant, {ALL}", header=header, rows=rows)


def _same_text(verdicts: Mapping[str, int]) -> str:
    if not verdicts:
        return "-"
    parts = [f"{verdicts.get('identical', 0)}/{sum(verdicts.values())}"]
    parts += [f"{verdicts[name]} {name}s" for name in ("tie", "fault") if verdicts.get(name)]
    return ", ".join(parts)


def _positions_section(summary: Summary, names: Sequence[str]) -> Section:
    by_name = {name: acceptance_by_position(record) for name in names if (record := summary.cells[ALL, name].record)}
    depth = max((len(positions) for positions in by_name.values()), default=0)
    rows = []
    for name, positions in by_name.items():
        cells = [f"{position['rate']:.2f} ({position['verified']})" for position in positions]
        rows.append([name, *cells, *["-"] * (depth - len(cells))])
    header = ["variant", *(str(j + 1) for j in range(depth))]
    return Section(title=f"acceptance by draft position (blocks that reached it), {ALL}", header=header, rows=rows)


def _phases_section(summary: Summary) -> Section:
    cells = [summary.cells[ALL, name] for name in summary.variants]
    phases = list(dict.fromkeys(phase for cell in cells for phase in cell.phases))
    rows = [
        [cell.variant, *(_number(1000 * cell.phases.get(phase, 0.0) / cell.num_tokens, ".2f") for phase in phases)]
        for cell in cells
        if cell.phases and cell.num_tokens
    ]
    return Section(title=f"ms/token by phase, {ALL}", header=["variant", *phases], rows=rows)


def _differences_section(result: Result) -> Section:
    rows = []
    for difference in result.differences:
        if difference.finding.verdict != "identical":
            row = result.rows[difference.row]
            entry = [f"{row.task}/{row.id}", difference.variant, difference.reference, difference.finding.text]
            if entry not in rows:
                rows.append(entry)
    rows.sort(key=lambda entry: not entry[-1].startswith("fault"))
    title = "first differences" + (f" ({MAX_DIFFERENCES} of {len(rows)})" if len(rows) > MAX_DIFFERENCES else "")
    return Section(title=title, header=["prompt", "variant", "against", "finding"], rows=rows[:MAX_DIFFERENCES])


def notes(result: Result) -> list[str]:
    """What a reader must know to believe the figures."""
    settings = result.settings
    streams = "one stream; participants take turns prompt by prompt"
    lines = [
        f"{len(result.rows) - len(result.refused)} prompts, {settings.repeat} repetitions, "
        f"up to {settings.max_tokens} tokens, temperature {settings.temperature:g}, {streams}, "
        "the order moves on each time.",
        "One process, the same target weights; each variant has its own cache and prefix reuse is off.",
        "Each repetition starts with fresh drafters and policies: no variant can copy its own earlier answer to the "
        "same prompt. Within a repetition, answers to the earlier, other prompts are in the store of `suffix`.",
        *target_note(result.configs.get(result.baseline, {})),
    ]
    lines += [
        f"Left out for every participant: {result.rows[row].task}/{result.rows[row].id}: refused by {reason}"
        for row, reason in sorted(result.refused.items())
    ]
    return lines


def target_note(info: Mapping[str, Any]) -> list[str]:
    """What a quantised target means for "the same text"; nothing of one that is not. `info`: of the LLM."""
    if not info.get("quantization"):
        return []
    return [
        f"Target: {info['quantization']} ({info['weights']}); answers are compared with this quantised target's own."
    ]


def text_report(result: Result, summary: Summary) -> str:
    """For a terminal."""
    blocks = [f"{table.title}\n{aligned([table.header, *table.rows])}" for table in sections(result, summary)]
    formulas = "\n".join(f"  {name}: {formula}" for name, formula in FORMULAS)
    return "\n\n".join([*blocks, "\n".join(notes(result)), f"formulas\n{formulas}"])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns for a terminal, the first row ruled off."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def markdown_report(result: Result, summary: Summary, *, title: str, head: Mapping[str, Any], plot: str | None) -> str:
    """A page fragment: the command, the tables, how it was measured and on what."""
    lines = [f"## {title}", "", "```", str(head["command"]), "```", ""]
    if plot:
        lines += [f"![speedup by task]({plot})", ""]
    for table in sections(result, summary):
        lines += [f"**{table.title}**", "", *markdown_table([table.header, *table.rows]), ""]
    lines += [*(f"- {note}" for note in notes(result)), "", "How each number is made:", ""]
    lines += [*(f"- {name}: {formula}" for name, formula in FORMULAS), "", machine(head), ""]
    return "\n".join(lines)


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; the first row is its header, the first column names the rows."""
    ruled = [rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:]]
    return ["| " + " | ".join(_escaped(row)) + " |" for row in ruled]


def _escaped(row: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in row]


def machine(head: Mapping[str, Any]) -> str:
    """On what a result was measured, from its provenance."""
    git = head.get("git")
    code = f"commit {git['commit'][:12]}{' with changes' if git['dirty'] else ''}" if git else "no git"
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    machine = f"{head['cpu']} ({head['num_cpus']} CPUs, {head['threads']} threads, device {head['device']})"
    return f"Measured {head['date']} on {machine}; {code}; {versions}."


def json_lines(result: Result, summary: Summary, *, head: Mapping[str, Any]) -> list[str]:
    """The head with provenance first; then figures, comparisons that found a difference, and every measurement."""
    run = f"{head['date']} {head['command']}"
    records: list[dict[str, Any]] = [{"kind": "head", **head, "notes": notes(result), "formulas": dict(FORMULAS)}]
    records += [{"kind": "figures", **cell.as_dict()} for cell in summary.cells.values()]
    records += difference_rows(result)
    records += [{"kind": "answer", **measurement_row(result, m)} for m in result.measurements]
    return [json.dumps({"run": run, **record}, ensure_ascii=False) for record in records]


def difference_rows(result: Result) -> list[dict[str, Any]]:
    """The comparisons that were not identical, for JSON."""
    return [
        {
            "kind": "difference",
            "task": result.rows[d.row].task,
            "id": result.rows[d.row].id,
            "variant": d.variant,
            "reference": d.reference,
            "repetition": d.repetition,
            "verdict": d.finding.verdict,
            "text": d.finding.text,
        }
        for d in result.differences
        if d.finding.verdict != "identical"
    ]


def free_stem(folder: Path, name: str, *, date: datetime.date) -> Path:
    """`folder/<date>-<name>`, with -2, -3, ... when a result of that name is there: results are never overwritten."""
    stem = folder / f"{date.isoformat()}-{name}"
    number = 2
    while stem.with_name(f"{stem.name}.jsonl").exists():
        stem = folder / f"{date.isoformat()}-{name}-{number}"
        number += 1
    return stem
