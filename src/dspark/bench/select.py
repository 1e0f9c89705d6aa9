"""`dspark select`: which draft, in which precision, with which lengths, on these prompts and this machine.
It must never recommend what it has not measured, or leave out a candidate without the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.bench.contestant import Contestant
    from dspark.bench.race import Race
    from dspark.bench.summary import Summary
    from dspark.bench.variants import Variant

DEFAULT_DRAFTS = ("suffix", "ngram", "auto")
DEFAULT_LENGTH = 8
DEFAULT_LENGTHS = {"ngram": 6, "suffix": 8}
WORTH = 1.02
"""A speedup below which speculation does not pay for its memory."""
NEAR = 0.03
"""Candidates within this of the best are its equals: the smaller one is recommended."""
Progress = Callable[[str, int, int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare every option on `parser`."""
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="target: a packaged name, folder, GGUF file or hub id (%(default)s)")
    drafts = "candidates: models (of any family), heads' folders, ngram, suffix, dspark, auto; NAME@K drafts up to K"
    add("--drafts", nargs="+", default=list(DEFAULT_DRAFTS), metavar="DRAFT", help=drafts)
    precisions = "of draft models: each is measured in each (bf16 int8 int4)"
    add("--precisions", nargs="+", default=["bf16", "int8", "int4"], metavar="P", help=precisions)
    add("--suggest", action="store_true", help="list published drafts for the target, from a table, and stop")
    add("--data", nargs="+", default=["benchmarks/prompts"], metavar="PATH", help="your prompts, as JSON lines")
    add("--tasks", metavar="LIST", help="only these tasks, comma-separated")
    add("--per-task", type=int, metavar="N", help="the first N prompts of each task (all)")
    add("--max-tokens", type=int, default=96, metavar="N", help="longest answer (%(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    add("--concurrency", default="1,4,16", metavar="LIST", help="clients at a time to foretell for (%(default)s)")
    add("--no-early-stop", action="store_true", help="let clear losers answer all prompts too")
    add(
        "--out", default="dspark-select", metavar="DIR", help="folder of the report and the configuration (%(default)s)"
    )
    add("--name", help="the files are DIR/<date>-NAME.* (the model's name)")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    group = parser.add_argument_group("engine")
    for name in ("dtype", "device", "path"):
        group.add_argument(f"--{name}", default=None)
    group.add_argument("--quantization", choices=("int8", "int4"), default=None, help="of the target")
    group.add_argument("--threads", type=int, default=None, metavar="N")
    group.add_argument("--max-model-len", type=int, default=2048, metavar="N", help="(%(default)s)")


@dataclass(kw_only=True)
class Row:
    """One candidate. `speedup`: of tokens over seconds of all prompts that both answered, against plain decoding;
    `mean_of_tasks` with its interval as in `dspark bench`; `foretold` by load, by costs alone. `length`: the best
    single one for other engines. `out`: prompts after which it was clear that it is behind."""

    name: str
    speedup: float
    mean_of_tasks: float | None
    interval: tuple[float, float] | None
    foretold: dict[int, float]
    accepted_length: float
    acceptance_rate: float
    draft_ms: float
    verify_ms: float
    num_bytes: int
    length: int
    settings: dict[str, Any]
    positions: list[float] = field(default_factory=list)
    out: int | None = None


@dataclass(kw_only=True)
class Choice:
    """What a selection found. `best` None: nothing pays."""

    rows: list[Row]
    refused: dict[str, str]
    best: str | None
    race: Race
    summary: Summary
    target_ms: float
    off_from: int | None
    target: Sequence[str] = ()

    def row(self, name: str) -> Row:
        """Of a candidate."""
        return next(row for row in self.rows if row.name == name)


def run(args: argparse.Namespace, *, progress: Progress | None = None, argv: Sequence[str] | None = None) -> int:
    """Measure, choose, and write report and configuration. 0, also where nothing pays. Raises ValueError, one line."""
    from dspark.bench import select_report as report

    if args.suggest:
        print(report.suggestions_text(args.model))
        return 0
    from dspark.bench.candidates import expand
    from dspark.bench.command import require_matplotlib, result_stem
    from dspark.bench.data import interleave, load_rows
    from dspark.bench.harness import BenchSettings

    loads = _loads(args.concurrency)
    settings = BenchSettings(max_tokens=args.max_tokens, temperature=args.temperature, repeat=1)
    settings.params(0)
    variants = expand(args.drafts, precisions=args.precisions, is_head=as_it_is)
    require_matplotlib()
    tasks = [task.strip() for task in args.tasks.split(",") if task.strip()] if args.tasks else None
    rows = interleave(load_rows(args.data, per_task=args.per_task, tasks=tasks))
    choice, head = select(args, variants, rows, settings=settings, loads=loads, progress=progress, argv=argv)
    stem = result_stem(args)
    files = report.write(stem, choice, head=head, model=args.model)
    print(json.dumps(report.document(choice, head=head), ensure_ascii=False) if args.json else report.text(choice))
    for file in files:
        say(f"written {file}")
    return 0


def select(
    args: argparse.Namespace,
    variants: Sequence[Variant],
    rows: Sequence[Any],
    *,
    settings: Any,
    loads: Sequence[int],
    progress: Progress | None,
    argv: Sequence[str] | None,
) -> tuple[Choice, dict[str, Any]]:
    """The race and what follows from it, with its provenance."""
    from dspark import LLM
    from dspark.bench.candidates import within
    from dspark.bench.contestant import Contestant
    from dspark.bench.data import encode_rows
    from dspark.bench.harness import WARM_UP, Result, _warm_up
    from dspark.bench.race import race
    from dspark.bench.report import target_note
    from dspark.bench.summary import summarise
    from dspark.bench.variants import parse_variant
    from dspark.model.free_memory import free_memory
    from dspark.provenance import provenance

    engine = {
        n: v for n in ("dtype", "device", "path", "quantization", "threads") if (v := getattr(args, n)) is not None
    }
    llm = LLM(args.model, draft="none", progress=progress, max_model_len=args.max_model_len, max_num_seqs=1, **engine)
    sizes = _sizes(variants, llm, progress)
    kept, refused = within(variants, sizes, free_memory(llm.info()["device"]).num_bytes)
    plain = Contestant(llm, parse_variant("none"))
    contestants = [plain]
    for variant in kept:
        say(f"loading {variant.name}")
        try:
            contestants.append(Contestant(llm, variant))
        except (ValueError, OSError) as error:
            refused[variant.name] = str(error)
    if len(contestants) == 1:
        raise ValueError(f"no candidate can be measured: {'; '.join(f'{n}: {r}' for n, r in refused.items())}")
    result = Result(
        rows=list(rows), names=[c.name for c in contestants], num_variants=len(contestants), settings=settings
    )
    prompts = encode_rows(rows, llm.tokenizer)
    _warm_up(contestants, prompt=llm.tokenizer.encode(WARM_UP), settings=settings)
    for contestant in contestants:
        contestant.begin()
    found = race(contestants, prompts, result=result, stop_early=not args.no_early_stop, progress=say)
    if len(result.refused) == len(rows):
        raise ValueError(f"every prompt was refused, the first with: {next(iter(result.refused.values()))}")
    table = [row_of(c, plain, found, loads=loads, num_bytes=sizes.get(c.name, 0)) for c in contestants[1:]]
    summary = summarise(result)
    for row in table:
        cell = summary.cells[summary.tasks[-1], row.name]
        row.mean_of_tasks, row.interval = cell.speedup, cell.interval
    table.sort(key=lambda row: (row.out is not None, -row.speedup))
    best = recommend(table)
    choice = Choice(
        rows=table,
        refused=refused,
        best=best,
        race=found,
        summary=summary,
        target_ms=1e3 * plain.seconds_per_token(),
        off_from=None if best is None else off_from(next(r for r in table if r.name == best)),
        target=target_note(llm.info()),
    )
    config = {"select": {k: v for k, v in vars(args).items() if k not in ("out", "run")}, "info": llm.info()}
    head = provenance(
        sys.argv if argv is None else argv, config=config, threads=_threads(llm), device=str(llm.info()["device"])
    )
    return choice, head


def row_of(contestant: Contestant, plain: Contestant, found: Race, *, loads: Sequence[int], num_bytes: int) -> Row:
    """Everything about a candidate, but what the summary says of all."""
    from dspark.bench.foretell import best_length, conditional, prices_of

    speculator = contestant.inner.llm.engine.speculator
    seen = contestant.finish()
    base = plain.finish()
    longest = contestant.variant.speculation.num_speculative_tokens
    cost = speculator.cost
    # What a step takes beside the pass, as plain decoding took it on the same prompts.
    pass_seconds = 0.0 if cost is None else prices_of(speculator, overhead=0.0).step(1, context=base.context)
    overhead = max(0.0, plain.seconds_per_token() - pass_seconds) if pass_seconds else 0.0
    foretold: dict[int, float] = {}
    length = 0
    if cost is not None:
        prices = prices_of(speculator, overhead=overhead)
        foretold = foretell_all(seen, prices, loads, longest=longest)
        length = best_length(seen, prices, longest=longest)
    record = seen.record()
    steps = max(record.num_steps, 1)
    target = sum(contestant.phases.get(name, 0.0) for name in ("pack", "run", "verify"))
    return Row(
        name=contestant.name,
        speedup=measured(found, contestant.name),
        mean_of_tasks=None,
        interval=None,
        foretold=foretold,
        accepted_length=record.mean_accepted_length or 1.0,
        acceptance_rate=record.acceptance_rate,
        draft_ms=1e3 * contestant.phases.get("draft", 0.0) / steps,
        verify_ms=1e3 * target / steps,
        num_bytes=num_bytes,
        length=length,
        settings=_settings(contestant.variant),
        positions=conditional(record),
        out=found.out[contestant.name][0] if contestant.name in found.out else None,
    )


def foretell_all(seen: Any, prices: Any, loads: Sequence[int], *, longest: int) -> dict[int, float]:
    """Speedup by load; alone by what was seen, else by simulation."""
    from dspark.bench.foretell import alone, under_load

    many = [load for load in loads if load > 1]
    found = under_load(seen, prices, many, max_drafts=max(1, longest)) if many else {}
    return {load: alone(seen, prices) if load == 1 else found[load] for load in loads}


def measured(found: Race, name: str) -> float:
    """Tokens a second of decoding over all prompts that both answered, against plain decoding."""
    totals = {}
    answers = {(m.variant, m.row): m.answer for m in found.result.measurements}
    shared = [row for variant, row in answers if variant == name and (found.result.baseline, row) in answers]
    for variant in (found.result.baseline, name):
        chosen = [answers[variant, row] for row in shared]
        tokens = sum(len(answer.tokens) - answer.num_first for answer in chosen)
        totals[variant] = tokens / max(sum(answer.decode_seconds for answer in chosen), 1e-9)
    base = totals[found.result.baseline]
    return totals[name] / base if base > 0 else 1.0


def recommend(rows: Sequence[Row]) -> str | None:
    """The quickest by the mean of tasks of those that ran to the end; of those as good, the smallest. None where none
    pays."""
    running = [row for row in rows if row.out is None]
    quickest = max((_score(row) for row in running), default=0.0)
    equals = [row for row in running if _score(row) >= (1 - NEAR) * quickest]
    best = min(equals, key=lambda row: (row.num_bytes, -_score(row)), default=None)
    return best.name if best is not None and _score(best) >= WORTH else None


def _score(row: Row) -> float:
    return row.mean_of_tasks if row.mean_of_tasks is not None else row.speedup


def off_from(row: Row) -> int | None:
    """The first load that was looked at where it is not worth its while; None: at none of them."""
    return next((load for load, speedup in sorted(row.foretold.items()) if speedup < WORTH), None)


def say(line: str) -> None:
    """Progress, on stderr."""
    print(f"dspark select: {line}", file=sys.stderr, flush=True)


def _loads(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"--concurrency {text!r} is no list of loads: give numbers of at least 1, such as 1,4,16")
    return sorted(set(found) | {1})


def as_it_is(name: str | None) -> bool:
    """Whether a draft has the one precision that its folder has: heads, and quantised models."""
    from dspark.heads.checkpoint import is_head_folder
    from dspark.model.precision import is_quantised_folder

    return name is not None and Path(name).is_dir() and (is_head_folder(name) or is_quantised_folder(Path(name)))


def _sizes(variants: Sequence[Variant], llm: Any, progress: Progress | None) -> dict[str, int]:
    """Bytes of each candidate's weights, and of those in other precisions that it could be measured in."""
    from dspark.bench.variants import QUANTIZATIONS

    found = {}
    for variant in variants:
        own = variant.speculation.quantization
        found[variant.name] = _bytes(variant, own, llm, progress)
        for kind in QUANTIZATIONS if own is None else ():
            found.setdefault(f"{variant.name}:{kind}", _bytes(variant, kind, llm, progress))
    return found


def _bytes(variant: Variant, quantization: str | None, llm: Any, progress: Progress | None) -> int:
    """Of a candidate's weights; 0 for lookups, and for what is not there yet to be looked at."""
    from dspark.engine.fitting import path_of
    from dspark.model.load import resolve
    from dspark.model.memory import weights

    model = variant.speculation.model
    if model is None:
        return 0
    try:
        folder = resolve(model, progress=progress)
        config = llm.engine_config
        path = path_of(
            folder, "auto" if config.path == "native" else config.path, on_gpu="cuda" in llm.info()["device"]
        )
        found = weights(folder, path=path, quantization=quantization, dtype=config.dtype)
    except (ValueError, OSError):
        return 0  # loading it will say what is wrong
    return found.num_bytes if found is not None else _file_bytes(folder)


def _file_bytes(folder: Path) -> int:
    """Of what is no model of its own: a head."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _settings(variant: Variant) -> dict[str, Any]:
    speculation = variant.speculation
    values: dict[str, Any] = {"method": speculation.method}
    for name in ("model", "quantization"):
        if (value := getattr(speculation, name)) is not None:
            values[name] = value
    return values | {"num_speculative_tokens": speculation.num_speculative_tokens, "policy": speculation.policy}


def _threads(llm: Any) -> int:
    from dspark.bench.command import num_threads

    return num_threads(llm)


def config_text(choice: Choice, *, model: str, info: Mapping[str, Any]) -> str:
    """TOML for `--config`."""
    lines = [f"# The draft that `dspark select` chose for {model} (see the report beside this file)."]
    lines += [f"# dspark serve {model} --config THIS_FILE", "", "[engine]"]
    lines += [f"max_model_len = {info['max_context']}"]
    if info.get("quantization"):
        lines += [f"quantization = {json.dumps(info['quantization'])}"]
    lines += ["", "[speculation]"]
    if choice.best is None:
        lines += ["# nothing that was measured pays here", 'method = "none"']
    else:
        for name, value in choice.row(choice.best).settings.items():
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"
