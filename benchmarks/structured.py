"""Answers under JSON schemas with and without drafts: are they valid, are they the same, what does it cost and bring.

    python benchmarks/structured.py smollm2-135m --data FOLDER/jsonschema.jsonl --drafts auto,suffix --per-source 3

Participants take turns prompt by prompt: plain and drafted, free and constrained, and drafted without telling the
drafter of the grammar (its guesses are then cut at the first illegal token). Greedy; no prefix reuse.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from dspark import LLM, SamplingParams
from dspark.bench.data import encode_rows, load_rows
from dspark.bench.variants import parse_variants
from dspark.draft.draw import cut_illegal
from dspark.types import RequestOutput, SpeculationRecord
from dspark.verify.grammar import GrammarCompiler, Matcher

PLAIN = "none"


class Clocks:
    """Seconds spent in a grammar, by kind of question."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start
                self.calls[name] += 1

        return timed

    def watch(self) -> None:
        """All matchers and compilers from now on."""
        for name in ("advance", "legal", "allowed", "forced", "over"):
            setattr(Matcher, name, self.around(name, getattr(Matcher, name)))
        GrammarCompiler._compile = self.around("compile", GrammarCompiler._compile)  # type: ignore[method-assign]

    def take(self) -> dict[str, float]:
        """Since the last call."""
        found = dict(self.seconds)
        self.seconds.clear()
        return found


class Untold:
    """A drafter that does not know of grammars; greedy rows only."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, rows: Sequence[Any], limits: Sequence[int], **rest: Any) -> Any:
        drafts = self.inner.propose([dataclasses.replace(row, sampler=None) for row in rows], limits, **rest)
        return [cut_illegal(row, draft) for row, draft in zip(rows, drafts)]


@dataclasses.dataclass(kw_only=True)
class Run:
    """One answer."""

    output: RequestOutput
    steps: float
    grammar: dict[str, float]

    @property
    def rate(self) -> float | None:
        """Decode tokens a second, as in `dspark bench`."""
        tokens, times = len(self.output.outputs[0].token_ids), self.output.timings
        seconds = times["finished"] - times["first_token"]
        return (tokens - 1) / seconds if tokens > 1 and seconds > 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True, metavar="FILE", help="JSON lines with schema, source and id")
    parser.add_argument("--drafts", default="auto")
    parser.add_argument("--per-source", type=int, default=3, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=160, metavar="N")
    parser.add_argument("--max-model-len", type=int, default=4096, metavar="N")
    parser.add_argument("--untold", action="store_true", help="also each draft that does not know of the grammar")
    parser.add_argument(
        "--batch", type=int, default=8, metavar="N", help="also so many at a time; 1: not (%(default)s)"
    )
    parser.add_argument("--out", default=None, metavar="DIR")
    parser.add_argument("--name", default=None)
    args = parser.parse_args()

    clocks = Clocks()
    clocks.watch()
    raw = {row["id"]: row for row in map(json.loads, Path(args.data).read_text().splitlines())}
    counts: Counter[str] = Counter()
    rows = []
    for row in load_rows([args.data]):
        source = raw[row.id]["source"]
        if counts[source] < args.per_source:
            counts[source] += 1
            rows.append(dataclasses.replace(row, task=source))
    llm = LLM(args.model, draft="none", max_model_len=args.max_model_len, max_num_seqs=1, prefix_reuse=False)
    engines: dict[str, LLM] = {}
    for variant in parse_variants(args.drafts):
        engines[variant.name] = llm.variant(speculation=variant.speculation, **variant.engine)
        if args.untold and not variant.plain:
            engines[f"{variant.name} untold"] = other = llm.variant(speculation=variant.speculation)
            other.engine.speculator.drafter = Untold(other.engine.speculator.drafter)
    names = [f"bound {name}" for name in engines] + [f"free {name}" for name in engines if "untold" not in name]
    for engine in engines.values():
        engine.generate("Say hello.", SamplingParams(temperature=0, max_tokens=8))
    prompts = encode_rows(rows, llm.tokenizer, max_tokens=args.max_model_len - args.max_tokens - 1)
    runs: dict[tuple[str, str], Run] = {}
    refused: dict[str, str] = {}
    compiled: dict[str, float] = {}
    for number, (row, prompt) in enumerate(zip(rows, prompts)):
        schema = raw[row.id]["schema"]
        clocks.take()
        try:
            llm.requests.prepare(SamplingParams(structured_outputs={"json": schema}))
        except ValueError as error:
            refused[row.id] = str(error)
            continue
        compiled[row.id] = clocks.take()["compile"]
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            kind, _, which = name.partition(" ")
            structure = {"json": schema} if kind == "bound" else None
            params = SamplingParams(temperature=0, max_tokens=args.max_tokens, structured_outputs=structure)
            engines[which].reset_stats()
            clocks.take()
            [output] = engines[which].generate([prompt], [params])
            seconds = sum(engines[which].stats.seconds.values())
            runs[row.id, name] = Run(output=output, steps=seconds, grammar=clocks.take())
        print(f"{number + 1}/{len(rows)} {row.task} {row.id}", flush=True)
    kept = [row for row in rows if row.id in compiled]
    text = report(args, kept, refused, compiled, runs, names, raw, llm)
    if args.batch > 1:
        text += "\n" + crowded(args, clocks, llm, kept, dict(zip((row.id for row in rows), prompts)), raw)
    print(text)
    if args.out:
        stem = f"{datetime.date.today()}-{args.name or Path(args.model).name}-structured"
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{stem}.md").write_text(text)
        lines = [
            json.dumps(
                {
                    "id": row_id,
                    "run": name,
                    "text": run.output.outputs[0].text,
                    "finish_reason": run.output.outputs[0].finish_reason,
                    "num_tokens": len(run.output.outputs[0].token_ids),
                    "tokens_per_second": run.rate,
                    "speculation": run.output.outputs[0].speculation.as_dict(),
                    "grammar_seconds": run.grammar,
                    "step_seconds": run.steps,
                }
            )
            for (row_id, name), run in runs.items()
        ]
        (folder / f"{stem}.jsonl").write_text("\n".join(lines) + "\n")


def crowded(
    args: argparse.Namespace,
    clocks: Clocks,
    llm: LLM,
    rows: Sequence[Any],
    prompts: Mapping[str, Sequence[int]],
    raw: Mapping[str, Any],
) -> str:
    """Each variant with many answers at a time: tokens/s, and what of the steps goes into grammars."""
    lines = [
        f"{args.batch} at a time:",
        "",
        "| run | tokens/s, prompts included | grammar's share of the steps |",
        "|---|---|---|",
    ]
    for variant in parse_variants(args.drafts):
        engine = llm.variant(speculation=variant.speculation, max_num_seqs=args.batch, **variant.engine)
        params = [
            SamplingParams(
                temperature=0, max_tokens=args.max_tokens, structured_outputs={"json": raw[row.id]["schema"]}
            )
            for row in rows
        ]
        clocks.take()
        start = time.perf_counter()
        outputs = engine.generate([list(prompts[row.id]) for row in rows], params)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        share = sum(clocks.take().values()) / sum(engine.stats.seconds.values())
        lines.append(f"| bound {variant.name} | {tokens / seconds:.1f} | {share:.1%} |")
    return "\n".join(lines) + "\n"


def report(
    args: argparse.Namespace,
    rows: Sequence[Any],
    refused: Mapping[str, str],
    compiled: Mapping[str, float],
    runs: Mapping[tuple[str, str], Run],
    names: Sequence[str],
    raw: Mapping[str, Any],
    llm: LLM,
) -> str:
    base = f"bound {PLAIN}"
    sources = list(dict.fromkeys(row.task for row in rows))
    drafted = [name for name in names if not name.endswith(f" {PLAIN}")]

    def rate(of: Sequence[Any], name: str) -> float:
        found = [rate for row in of if (rate := runs[row.id, name].rate) is not None]
        return statistics.median(found) if found else 0.0

    def length(of: Sequence[Any], name: str) -> float:
        record = SpeculationRecord()
        for row in of:
            record.merge(runs[row.id, name].output.outputs[0].speculation)
        return record.mean_accepted_length

    def micro(of: Sequence[Any], name: str) -> float:
        """Grammar microseconds a token."""
        tokens = sum(len(runs[row.id, name].output.outputs[0].token_ids) for row in of)
        return 1e6 * sum(sum(runs[row.id, name].grammar.values()) for row in of) / max(1, tokens)

    def share(of: Sequence[Any], name: str) -> float:
        return sum(sum(runs[row.id, name].grammar.values()) for row in of) / sum(runs[row.id, name].steps for row in of)

    header = ["source", "prompts", "compile ms, median / most"]
    header += [f"tokens/s {base}", *(f"{name}: speedup, accepted length, grammar us a token" for name in drafted)]
    table = []
    for label, of in [*((source, [r for r in rows if r.task == source]) for source in sources), ("all", list(rows))]:
        times = [1000 * compiled[row.id] for row in of]
        cells = [label, str(len(of)), f"{statistics.median(times):.1f} / {max(times):.0f}", f"{rate(of, base):.1f}"]
        for name in drafted:
            cells.append(f"{rate(of, name) / rate(of, base):.2f}, {length(of, name):.2f}, {micro(of, name):.0f}")
        table.append(cells)
    bound = [name for name in names if name.startswith("bound")]
    same = {name: sum(_tokens(runs[row.id, name]) == _tokens(runs[row.id, base]) for row in rows) for name in bound}
    verdicts = {name: Counter(_verdict(runs[row.id, name], raw[row.id]["schema"]) for row in rows) for name in names}
    lines = [
        f"## {args.model}: answers under JSON schemas",
        "",
        f"{datetime.date.today()}, {len(rows)} prompts, up to {args.max_tokens} tokens, greedy, one stream; "
        f"{llm.info()['path']} path, {llm.info()['dtype']}.",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(cells) + " |" for cells in table),
        "",
        "| run | tokens/s, median | answers | the same tokens as " + base + " | grammar's share of a step |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        equal = f"{same[name]}/{len(rows)}" if name in same else "-"
        part = f"{share(rows, name):.1%}" if name in same else "-"
        counts = ", ".join(f"{count} {word}" for word, count in sorted(verdicts[name].items()))
        lines.append(f"| {name} | {rate(rows, name):.1f} | {counts} | {equal} | {part} |")
    lines += ["", f"Refused by the compiler: {len(refused)}", ""]
    lines += [f"- {row_id}: {why[:160]}" for row_id, why in refused.items()]
    return "\n".join(lines) + "\n"


def _tokens(run: Run) -> list[int]:
    return list(run.output.outputs[0].token_ids)


def _verdict(run: Run, schema: Any) -> str:
    answer = run.output.outputs[0]
    if answer.finish_reason != "stop":
        return "not finished"
    try:
        value = json.loads(answer.text)
    except ValueError:
        return "no JSON"
    try:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        return "valid" if kind(schema).is_valid(value) else "invalid"
    except Exception:  # a schema that the library itself cannot read, such as one with a remote reference
        return "not judged"


if __name__ == "__main__":
    main()
