"""The report of `dspark verify`: a table, JSON lines that grow with the run, a Markdown page and an HTML page.
It must never compute a figure, load anything from elsewhere, or put a text of a model unescaped into a page.
"""

from __future__ import annotations

import argparse
import datetime
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from dspark.bench.report import aligned, free_stem, machine, markdown_table
from dspark.bench.verify import Found, describe, model_name
from dspark.quality.checks import INCONCLUSIVE, Agreement, agreement, by_task
from dspark.quality.oracle import FAULT, IDENTICAL, TIE
from dspark.quality.pairs import UNJUDGED, Pair
from dspark.quality.sampled import Tested

MAX_DIFFERENCES = 20
FORMULAS = (
    "near-tie: the first difference, where both tokens are within the bound of the best one in the target's own logits "
    "there (docs/losslessness.md); fault: every other difference",
    "tie rate: near-ties / tokens compared (up to the first difference) x 1,000",
    "score difference: speculative - plain, with Tango's 95% score interval for paired proportions; McNemar exact",
    "sampled: chi-square against the law of the first tokens together, cells with an expectation below 5 pooled, Holm "
    "over prefixes and their sum; the power holds for any departure of that total variation distance on one prefix",
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; }
table { border-collapse: collapse; margin: 0.6rem 0 1.6rem; } td, th { padding: 0.3rem 0.7rem; text-align: left;
border-bottom: 1px solid #d5dae0; vertical-align: top; } th { background: #f3f5f7; } .pass { color: #116329; }
.fail { color: #a40e26; font-weight: 600; } .inconclusive { color: #7d4e00; } code { background: #f3f5f7; }
"""


class Journal:
    """The JSON lines of a run, written as they come; the pages at its end. Made before anything is asked, so that a
    folder which cannot be written is told at once. Raises ValueError then."""

    def __init__(self, args: argparse.Namespace, head: Mapping[str, Any]) -> None:
        folder = Path(args.out)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", args.name or f"{model_name(args)}-verify").strip("-") or "verify"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.stem = free_stem(folder, name, date=datetime.date.today())
            self.file: IO[str] = self.stem.with_name(f"{self.stem.name}.jsonl").open("w", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--out {folder}: {error.strerror}; give a folder that can be written") from None
        self.title = f"Speculative against plain decoding: {model_name(args)}"
        self._write({"kind": "head", **head})

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self.file.write(describe(record) + "\n")
        self.file.flush()

    def pair(self, pair: Pair) -> None:
        """Both answers."""
        self._write({"kind": "pair", **pair_row(pair), "answers": [_answer(pair.plain), _answer(pair.other)]})

    def tested(self, tested: Tested) -> None:
        """One prefix of the distribution test."""
        fits = {"fit": vars(tested.fit), "control": tested.control and vars(tested.control)}
        row = {"prefix": tested.prefix.name, "num_prefix": len(tested.prefix.tokens), "manner": tested.prefix.manner}
        self._write({"kind": "sampled", **row, **fits, "drafts": tested.record.as_dict()})

    def close(self, found: Found) -> None:
        """Checks, the gate, and the pages."""
        for check in found.checks:
            self._write({"kind": "check", **vars(check)})
        self._write({"kind": "gate", "passed": found.passed, "interrupted": found.interrupted})
        self.stem.with_name(f"{self.stem.name}.md").write_text(markdown(found, title=self.title), encoding="utf-8")
        self.stem.with_name(f"{self.stem.name}.html").write_text(page(found, title=self.title), encoding="utf-8")


def pair_row(pair: Pair) -> dict[str, Any]:
    """Where and how two answers part."""
    finding = pair.finding
    return {
        "task": pair.question.task,
        "id": pair.question.id,
        "verdict": finding.verdict,
        "position": finding.position,
        "tokens": [finding.plain, finding.other],
        "margin": None if finding.margin == float("inf") else finding.margin,
        "bound": finding.bound,
        "late": list(pair.late),
        "refused": pair.refused,
    }


def _answer(reply: Any) -> dict[str, Any]:
    return {
        "text": reply.text,
        "num_tokens": reply.num_tokens,
        "finish_reason": reply.finish_reason,
        "verified": reply.record.num_verified,
        "accepted": reply.record.num_accepted,
    }


Table = tuple[str, list[list[str]]]


def tables(found: Found) -> list[Table]:
    """(title, rows with the header first), those that have something to say."""
    made: list[Table] = [
        ("checks", [["check", "verdict", "why"], *([c.name, c.verdict, c.text] for c in found.checks)])
    ]
    lines = [agreement(pairs, task) for task, pairs in by_task(found.pairs).items()]
    if lines:
        lines.append(agreement(found.pairs, "all"))
        header = ["task", "pairs", "identical", "near-ties", "faults", "unjudged", "refused", "tokens", "ties/1,000"]
        made.append(("agreement", [header, *map(_agreement_row, lines)]))
    if found.scores:
        header = ["task", "n", "plain %", "speculative %", "difference [95%]", "plain only", "spec. only", "McNemar p"]
        header += ["n for the margin"]
        made.append(("scores", [header, *map(_score_row, found.scores)]))
    if found.sampled is not None and found.sampled.tested:
        header = ["prefix", "manner", "cells", "p", "control p", "verified", "kept"]
        made.append(("sampled answers", [header, *map(_tested_row, found.sampled.tested)]))
    apart = [pair for pair in found.pairs if pair.finding.verdict != IDENTICAL or pair.late or pair.refused]
    apart.sort(key=lambda pair: pair.finding.verdict != FAULT)
    if apart:
        rows = [["question", "finding"], *([f"{p.question.task}/{p.question.id}", _words(p)] for p in apart)]
        more = f" ({MAX_DIFFERENCES} of {len(apart)})" if len(apart) > MAX_DIFFERENCES else ""
        made.append((f"differences{more}", rows[: MAX_DIFFERENCES + 1]))
    return made


def _agreement_row(line: Agreement) -> list[str]:
    counts = [str(line.verdicts.get(name, 0)) for name in (IDENTICAL, TIE, FAULT, UNJUDGED)]
    return [line.task, str(line.num_pairs), *counts, str(line.refused), str(line.num_tokens), f"{line.rate:.2f}"]


def _score_row(score: Any) -> list[str]:
    counts, (low, high) = score.counts, score.interval
    shares = [f"{100 * counts.plain:.1f}", f"{100 * counts.other:.1f}"]
    difference = f"{100 * counts.difference:+.2f} [{100 * low:.2f}, {100 * high:.2f}]"
    apart = [str(counts.plain_only), str(counts.other_only)]
    return [score.task, str(counts.n), *shares, difference, *apart, f"{score.p_value:.3g}", str(score.needed)]


def _tested_row(tested: Tested) -> list[str]:
    control = "-" if tested.control is None else f"{tested.control.p_value:.2g}"
    counts = [str(tested.record.num_verified), str(tested.record.num_accepted)]
    return [
        tested.prefix.name,
        tested.prefix.manner,
        str(tested.fit.num_cells),
        f"{tested.fit.p_value:.2g}",
        control,
        *counts,
    ]


def _words(pair: Pair) -> str:
    if pair.refused:
        return f"refused: {pair.refused}"
    finding = pair.finding
    if finding.verdict == UNJUDGED and finding.margin is None:
        words = f"differs at {finding.position}; the server tells nothing to judge it by"
    else:
        words = finding.text
    return "; ".join([words, *pair.late])


def verdict_line(found: Found) -> str:
    """The gate in a line."""
    word = "PASSED" if found.passed else "NOT PASSED"
    if found.interrupted:
        word += f" (interrupted after {len(found.pairs)} of {found.num_questions} questions)"
    elif len(found.pairs) < found.num_questions:
        word += f" ({len(found.pairs)} of {found.num_questions} questions in the time given)"
    open_checks = sum(check.verdict == INCONCLUSIVE for check in found.checks)
    return f"gate: {word}" + (f", {open_checks} checks inconclusive" if open_checks else "")


def text_report(found: Found) -> str:
    """For a terminal."""
    checks = [f"{c.verdict:<13} {c.name}: {c.text}" for c in found.checks]
    blocks = [f"{title}\n{aligned(rows)}" for title, rows in tables(found)[1:]]
    return "\n\n".join(["\n".join(checks), *blocks, verdict_line(found)])


def as_json(found: Found) -> str:
    """One object."""
    lines = [agreement(pairs, task) for task, pairs in by_task(found.pairs).items()]
    document = {
        "head": found.head,
        "passed": found.passed,
        "interrupted": found.interrupted,
        "checks": [vars(check) for check in found.checks],
        "agreement": [{**vars(line), "tie_rate_per_1000": line.rate} for line in lines],
        "differences": [pair_row(p) for p in found.pairs if p.finding.verdict != IDENTICAL or p.late or p.refused],
    }
    return json.dumps(document, ensure_ascii=False, indent=2, default=str)


def markdown(found: Found, *, title: str) -> str:
    """A page fragment."""
    lines = [f"## {title}", "", "```", str(found.head["command"]), "```", "", f"**{verdict_line(found)}**", ""]
    for name, rows in tables(found):
        lines += [f"**{name}**", "", *markdown_table(rows), ""]
    return "\n".join([*lines, *(f"- {formula}" for formula in FORMULAS), "", machine(found.head), ""])


def page(found: Found, *, title: str) -> str:
    """Whole, with nothing from elsewhere."""
    body = [f"<h1>{html.escape(title)}</h1>", f"<p><code>{html.escape(str(found.head['command']))}</code></p>"]
    body.append(f"<p class='{'pass' if found.passed else 'fail'}'>{html.escape(verdict_line(found))}</p>")
    for name, rows in tables(found):
        body += [f"<h2>{html.escape(name)}</h2>", *_html_table(rows)]
    body += ["<ul>", *(f"<li>{html.escape(formula)}</li>" for formula in FORMULAS), "</ul>"]
    body.append(f"<p>{html.escape(machine(found.head))}</p>")
    head = f"<meta charset='utf-8'><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n" + "\n".join(body) + "\n</body></html>\n"


def _html_table(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["<table>", "<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0]) + "</tr>"]
    for row in rows[1:]:
        cells = (f"<td{_class(cell)}>{html.escape(cell)}</td>" for cell in row)
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return [*lines, "</table>"]


def _class(cell: str) -> str:
    return f" class='{cell}'" if cell in ("pass", "fail", "inconclusive") else ""
