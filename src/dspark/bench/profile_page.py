"""The page of a profile: HTML with its plots inside, for people who did not record it.
It must never load anything from elsewhere."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from dspark.bench.data import printable
from dspark.bench.plot import label
from dspark.bench.profile import Profile, best_fixed, group_of, text_report
from dspark.plan.replay import Outcome

Outcomes = Mapping[str, Mapping[str, Outcome]]
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}pre{overflow-x:auto}"
)


def write_page(path: Path, profile: Profile, outcomes: Outcomes) -> None:
    """Raises ValueError where the file cannot be written."""
    info = profile.info
    what = printable(f"{info.get('model', '?')} with {info.get('draft', '?')}, policy {info.get('policy', '?')}")
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>dspark profile</title>",
        f"<style>{STYLE}</style><h1>Where speculation pays</h1><p>{html.escape(what)}: {len(profile.answers)} answers.",
        "Speedups are replayed from the record with the pass times measured when it was made.</p>",
        f"<pre>{html.escape(text_report(profile, outcomes))}</pre>",
        "<h2>What a length would have brought</h2>",
        _image(lengths_figure(outcomes)),
        "<h2>Acceptance by position</h2>",
        _image(acceptance_figure(profile)),
        "<h2>Time won and lost</h2>",
        _table(time_rows(outcomes)),
        "<h2>Slowest answers as recorded</h2>",
        _table(answer_rows(profile)),
        "</html>",
    ]
    try:
        path.write_text("\n".join(parts), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write the page {path}: {error.strerror}; give a file in a folder") from None


def lengths_figure(outcomes: Outcomes) -> Figure:
    """Speedup by fixed length, a line a group; the adaptive policy as a dashed line of the same colour."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    lengths = [name for name in outcomes if name.startswith("fixed@")]
    for group in [group for group in outcomes["adaptive"] if group] or [""]:
        values = [outcomes[name][group].speedup for name in lengths]
        (line,) = axes.plot(
            [int(name[6:]) for name in lengths], values, marker="o", markersize=3, label=label(group or "all")
        )
        axes.axhline(outcomes["adaptive"][group].speedup, color=line.get_color(), linestyle="--", linewidth=1)
    axes.axhline(1.0, color="0.5", linewidth=1)
    axes.set_xlabel("fixed draft length (dashed: adaptive)")
    axes.set_ylabel("speedup over plain decoding")
    figure.legend(fontsize=8, ncols=4, loc="outside lower center")
    return figure


def acceptance_figure(profile: Profile) -> Figure:
    """Share of recorded drafts whose tokens 0..j hold, by group."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for group in dict.fromkeys(group_of(answer) for answer in profile.answers):
        drafts = [c for answer in profile.answers if group_of(answer) == group for c in answer.drafts.values()]
        shares = []
        for j in range(max((len(chance.claims) for chance in drafts), default=0)):
            long = [chance for chance in drafts if len(chance.claims) > j]
            shares.append(sum(chance.holds > j for chance in long) / len(long))
        axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=3, label=label(group or "all"))
    axes.set_xlabel("position in the draft (among drafts that long)")
    axes.set_ylabel("accepted up to here")
    axes.set_ylim(0, 1)
    figure.legend(fontsize=8, ncols=4, loc="outside lower center")
    return figure


def time_rows(outcomes: Outcomes) -> list[list[str]]:
    """By group: seconds of plain decoding, under adaptive, and under the best fixed length."""
    rows = [["group", "tokens", "plain, s", "adaptive, s", "won, s", "best fixed", "best fixed, s"]]
    for group, outcome in outcomes["adaptive"].items():
        best = best_fixed(outcomes, group)
        seconds = outcome.plain_seconds if best == "none" else outcomes[best][group].seconds
        won = outcome.plain_seconds - outcome.seconds
        figures = [f"{value:.2f}" for value in (outcome.plain_seconds, outcome.seconds, won)]
        rows.append([printable(group or "all"), str(outcome.tokens), *figures, best, f"{seconds:.2f}"])
    return rows


def answer_rows(profile: Profile, *, limit: int = 20) -> list[list[str]]:
    """Answers with the most measured seconds a token as they were recorded."""
    rows = [["answer", "group", "tokens", "ms a token", "drafted", "verified", "accepted"]]
    timed = [
        (answer.seconds / (answer.num_tokens - 1), answer)
        for answer in profile.answers
        if answer.seconds and answer.num_tokens > 1
    ]
    for each, answer in sorted(timed, key=lambda pair: -pair[0])[:limit]:
        drafted = sum(len(chance.claims) for chance in answer.drafts.values())
        names = [printable(name) for name in (answer.id, group_of(answer))]
        counts = [str(count) for count in (drafted, answer.verified, answer.accepted)]
        rows.append([*names, str(answer.num_tokens), f"{1000 * each:.1f}", *counts])
    return rows


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [[html.escape(cell) for cell in row] for row in rows]
    lines = ["<table><tr><th>" + "<th>".join(head)]
    lines += ["<tr><td>" + "<td>".join(row) for row in body]
    return "\n".join([*lines, "</table>"])


def _image(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
