"""The report of a distillation: report.json for programs, report.md and the terminal for people.
It must never compute a figure of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.bench.report import aligned

FORMULAS = (
    "acceptance: accepted / checked drafts; accepted length: tokens emitted / passes of the target; drafts of a fixed "
    "length, all of them checked, by the engine, on prompts that were not trained on",
    "gain: acceptance after / before - 1, with a 95% bootstrap interval over prompts in pairs",
    "at 1, 2, ...: share of drafts at that place that held, where those before them held",
)


def table(report: Mapping[str, Any]) -> list[list[str]]:
    """A row a draft and temperature, the head first."""
    rows = [["temperature", "draft", "acceptance", "accepted length", "gain", "by place"]]
    for measured in report["measured"]:
        for name in ("before", "after"):
            found = measured[name]
            if found is None:
                continue
            gain = measured["gain"] if name == "after" else None
            told = "" if gain is None else f"{_share(gain['relative'])} [{_share(gain['low'])}, {_share(gain['high'])}]"
            places = " ".join(f"{share:.2f}" for share in found["by_position"])
            cells = [f"{measured['temperature']:g}", name, f"{found['acceptance_rate']:.3f}"]
            rows.append([*cells, f"{found['accepted_length']:.2f}", told, places])
    return rows


def report_text(report: Mapping[str, Any]) -> str:
    """For the terminal."""
    return "\n".join([aligned(table(report)), "", *advice(report)])


def advice(report: Mapping[str, Any]) -> list[str]:
    """What came of it, and how to use it."""
    draft = report["learned"]["draft"]
    lines = [
        f"{report['learned']['steps']} steps on {report['answers']} answers ({report['answer_tokens']} tokens); the "
        f"draft: {draft}"
    ]
    if report["chosen"] is not None:
        lines.append(
            f"Of the precisions {report['chosen']} is recommended (select/ has the report and a configuration)."
        )
    elif report.get("candidates"):
        lines.append("None of the precisions pays on these prompts and this machine (select/ has the report).")
    return [*lines, f"Use it: dspark generate ... --draft {draft}"]


def page(report: Mapping[str, Any]) -> str:
    """Markdown."""
    rows = table(report)
    recipe = report["recipe"]
    lines = [f"# A draft for {recipe['target']}, distilled from {recipe['draft']}", ""]
    lines += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(row) + " |" for row in rows[1:]]
    lines += ["", *advice(report), "", *(f"- {formula}" for formula in FORMULAS), ""]
    head = report["provenance"]
    lines += ["```", json.dumps({"provenance": head, "recipe": recipe, "learned": report["learned"]}, indent=1), "```"]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """report.json and report.md."""
    (folder / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(page(report), encoding="utf-8")


def _share(value: float | None) -> str:
    return "no bound" if value is None else f"{value:+.0%}"
