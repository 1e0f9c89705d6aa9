"""The report of a selection: tables, a page with plots, a configuration, and what other engines are told.
It must never compute a figure, or load anything from elsewhere.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark.bench.report import aligned
from dspark.bench.select import Choice, config_text

FORMULAS = (
    "measured: tokens of decoding / its seconds, over all prompts that the candidate and plain decoding answered in "
    "turns, against plain decoding",
    "mean of tasks: arithmetic mean of each task's median tokens/s against plain decoding's, with a 95% bootstrap "
    "interval",
    "foretold: by the costs of passes as the planner holds them and the acceptance that was seen; for 1 client of "
    "decoding alone, for more with prompts, by simulation of the planner",
    "accepted length: tokens emitted / passes of the target; acceptance: accepted / verified drafts",
    "draft ms, verify ms: of a step, for drafting, and for the target's pass over it",
    "out: prompts after which it was clear (95%, all looks together) that the candidate is behind the quickest",
)


def table(choice: Choice) -> list[list[str]]:
    """A row a candidate, the head first."""
    loads = sorted(choice.rows[0].foretold) if choice.rows else []
    header = ["candidate", "measured", "mean of tasks", *(f"foretold, {n}" for n in loads)]
    header += ["accepted length", "acceptance", "draft ms", "verify ms", "weights MiB", "out"]
    rows = [header]
    for row in choice.rows:
        mark = " *" if row.name == choice.best else ""
        mean = "-" if row.mean_of_tasks is None else f"{row.mean_of_tasks:.2f}"
        if row.interval:
            mean += f" [{row.interval[0]:.2f}, {row.interval[1]:.2f}]"
        cells = [row.name + mark, f"{row.speedup:.2f}", mean]
        cells += [f"{row.foretold[n]:.2f}" if n in row.foretold else "-" for n in loads]
        cells += [
            f"{row.accepted_length:.2f}",
            f"{row.acceptance_rate:.2f}",
            f"{row.draft_ms:.1f}",
            f"{row.verify_ms:.1f}",
        ]
        rows.append([*cells, f"{row.num_bytes / 2**20:.0f}", "" if row.out is None else str(row.out)])
    return rows


def tasks_table(choice: Choice) -> list[list[str]]:
    """Speedups by task."""
    summary = choice.summary
    names = [row.name for row in choice.rows]
    rows = [["task", *names]]
    for task in summary.tasks:
        cells = [summary.cells[task, name].speedup for name in names]
        rows.append([task, *("-" if cell is None else f"{cell:.2f}" for cell in cells)])
    return rows


def advice(choice: Choice) -> list[str]:
    """What to do."""
    if choice.best is None:
        return [*choice.target, "Nothing that was measured pays on these prompts: decode plainly (draft none)."]
    row = choice.row(choice.best)
    settings = row.settings
    precision = f" in {settings['quantization']}" if "quantization" in settings else ""
    named = settings.get("model", settings["method"])
    lines = [
        *choice.target,
        f"Use {named}{precision}: {row.speedup:.2f} times plain decoding for one stream, drafts of up to "
        f"{settings['num_speculative_tokens']} tokens, policy adaptive.",
    ]
    if choice.off_from is None:
        lines.append(f"It is foretold to pay at every load looked at (up to {max(row.foretold, default=1)} clients).")
    else:
        lines.append(
            f"From about {choice.off_from} clients at a time it is foretold not to pay: adaptive drafts less there, "
            "and in the end nothing."
        )
    lines.append(f"An engine with one draft length does best with {row.length}.")
    return lines


def elsewhere(choice: Choice, *, model: str) -> dict[str, str]:
    """The same choice for other engines; what they cannot do is said."""
    if choice.best is None:
        return {}
    row = choice.row(choice.best)
    settings, k = row.settings, max(1, row.length)
    method, draft = settings["method"], settings.get("model")
    quantised = (
        f" ({settings['quantization']} is dspark's own format: use the full one, or its own)"
        if settings.get("quantization")
        else ""
    )
    if method == "ngram":
        vllm: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 4}
        return {
            "vLLM": f"--speculative-config '{json.dumps(vllm)}'",
            "SGLang": f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {k}",
            "llama.cpp": "llama-lookup (its server has no lookup drafts by prompt alone)",
        }
    if method in ("suffix", "auto", "dspark"):
        vllm = {"method": "suffix", "num_speculative_tokens": k}
        note = "" if method == "suffix" else " (suffixes alone: dspark's head has to be exported first)"
        return {
            "vLLM": f"--speculative-config '{json.dumps(vllm)}'{note}",
            "SGLang": f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {k}{note}",
            "llama.cpp": "no suffix drafts",
        }
    vllm = {"model": draft, "num_speculative_tokens": k}
    return {
        "vLLM": f"--speculative-config '{json.dumps(vllm)}'{quantised}",
        "SGLang": (
            f"--speculative-algorithm STANDALONE --speculative-draft-model-path {draft} "
            f"--speculative-num-steps {k}{quantised}"
        ),
        "llama.cpp": f"-m {model}.gguf -md {draft}.gguf --draft-max {k}{quantised}",
    }


def text(choice: Choice) -> str:
    """For a terminal."""
    parts = [aligned(table(choice)), "", aligned(tasks_table(choice)), ""]
    parts += [f"cannot be used: {name}: {reason}" for name, reason in choice.refused.items()]
    parts += ["", *advice(choice), "", *FORMULAS]
    return "\n".join(parts)


def document(choice: Choice, *, head: Mapping[str, Any]) -> dict[str, Any]:
    """For JSON."""
    return {
        "head": dict(head),
        "best": choice.best,
        "off_from": choice.off_from,
        "plain_ms_per_token": choice.target_ms,
        "candidates": [asdict(row) for row in choice.rows],
        "refused": choice.refused,
        "tasks": [cell.as_dict() for cell in choice.summary.cells.values()],
    }


def write(stem: Path, choice: Choice, *, head: Mapping[str, Any], model: str) -> list[Path]:
    """JSON line, Markdown, page and configuration. Raises ValueError where they cannot be written."""
    config = config_text(choice, model=model, info=head["config"]["info"])
    flags = elsewhere(choice, model=model)
    files = {
        ".jsonl": json.dumps(document(choice, head=head), ensure_ascii=False, default=str) + "\n",
        ".md": markdown(choice, head=head, model=model, config=config, flags=flags),
        ".html": page(choice, head=head, model=model, config=config, flags=flags),
        ".toml": config,
    }
    written = []
    for ending, body in files.items():
        path = stem.with_name(stem.name + ending)
        try:
            path.write_text(body, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}; give another --out") from None
        written.append(path)
    return written


def markdown(choice: Choice, *, head: Mapping[str, Any], model: str, config: str, flags: Mapping[str, str]) -> str:
    """The report as Markdown."""
    parts = [f"## A draft for {model}", "", "```", str(head["command"]), "```", "", *advice(choice), ""]
    for rows in (table(choice), tasks_table(choice)):
        parts += ["| " + " | ".join(rows[0]) + " |", "| --- |" + " ---: |" * (len(rows[0]) - 1)]
        parts += ["| " + " | ".join(row) + " |" for row in rows[1:]]
        parts.append("")
    parts += [f"- cannot be used: {name}: {reason}" for name, reason in choice.refused.items()]
    parts += ["", "```toml", config.rstrip(), "```", ""]
    parts += [f"- {engine}: `{flag}`" for engine, flag in flags.items()]
    parts += ["", "How each number is made:", "", *(f"- {formula}" for formula in FORMULAS)]
    return "\n".join(parts) + "\n"


def page(choice: Choice, *, head: Mapping[str, Any], model: str, config: str, flags: Mapping[str, str]) -> str:
    """The report as a page with its plots inside."""
    from dspark.bench.profile_page import STYLE, _image, _table

    escape = html.escape
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>A draft for {escape(model)}</title>",
        f"<style>{STYLE}</style><h1>A draft for {escape(model)}</h1>",
        *(f"<p>{escape(line)}" for line in advice(choice)),
        "<h2>Speedup over plain decoding</h2>",
        _image(speedup_figure(choice)),
        _table(table(choice)),
        "<h2>By task</h2>",
        _table(tasks_table(choice)),
        "<h2>Acceptance by place in the draft</h2>",
        _image(acceptance_figure(choice)),
    ]
    if choice.refused:
        parts += ["<h2>What cannot be used</h2><ul>"]
        parts += [f"<li>{escape(name)}: {escape(reason)}" for name, reason in choice.refused.items()] + ["</ul>"]
    parts += [f"<h2>Configuration</h2><pre>{escape(config)}</pre>", "<h2>Other engines</h2><ul>"]
    parts += [f"<li>{escape(engine)}: <code>{escape(flag)}</code>" for engine, flag in flags.items()]
    parts += ["</ul><h2>How each number is made</h2><ul>", *(f"<li>{escape(formula)}" for formula in FORMULAS), "</ul>"]
    parts += [f"<p><code>{escape(str(head['command']))}</code></html>"]
    return "\n".join(parts)


def speedup_figure(choice: Choice) -> Any:
    """Measured, with the interval, beside foretold."""
    from matplotlib.figure import Figure

    from dspark.bench.plot import label

    rows = list(reversed(choice.rows))
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    means = [row.mean_of_tasks or row.speedup for row in rows]
    spans = [
        [max(0.0, mean - (row.interval or (mean, mean))[0]) for mean, row in zip(means, rows)],
        [max(0.0, (row.interval or (mean, mean))[1] - mean) for mean, row in zip(means, rows)],
    ]
    colours = ["tab:green" if row.name == choice.best else "tab:gray" if row.out else "tab:blue" for row in rows]
    axes.barh(list(places), means, xerr=spans, color=colours, height=0.6, label="measured, mean of tasks")
    axes.plot(
        [row.foretold.get(1, float("nan")) for row in rows],
        list(places),
        "kD",
        markersize=5,
        label="foretold, 1 client",
    )
    axes.set_yticks(list(places), [label(row.name) for row in rows])
    axes.axvline(1.0, color="0.5", linewidth=1)
    axes.set_xlabel("speedup over plain decoding (green: recommended; grey: ended early)")
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    return figure


def acceptance_figure(choice: Choice) -> Any:
    """A line a candidate."""
    from matplotlib.figure import Figure

    from dspark.bench.plot import label

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for row in choice.rows:
        if row.positions:
            axes.plot(range(1, len(row.positions) + 1), row.positions, marker="o", markersize=3, label=label(row.name))
    axes.set_xlabel("place in the draft")
    axes.set_ylabel("holds, where those before it held")
    axes.set_ylim(0, 1.02)
    figure.legend(fontsize=8, ncols=3, loc="outside lower center")
    return figure


def suggestions_text(model: str) -> str:
    """Published drafts for a target, from the table in the package. Raises ValueError where there are none for it."""
    from dspark.bench.suggestions import suggestions

    found = suggestions(model)
    rows = [["draft", "kind", "use", "source"]]
    rows += [[entry["draft"], entry["kind"], entry["use"], entry["source"]] for entry in found]
    return aligned(rows)
