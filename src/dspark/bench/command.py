"""`dspark bench`: its arguments, and the run from a model's name to tables and result files.
It must never import torch, or anything that does, before the run starts."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.config import OBJECTIVES

if TYPE_CHECKING:
    from dspark.bench.arrivals import Load
    from dspark.bench.data import PromptRow
    from dspark.bench.harness import BenchSettings, Peer, Result
    from dspark.bench.load import LoadResult
    from dspark.bench.load_summary import Slo
    from dspark.bench.summary import Summary
    from dspark.bench.variants import Variant

DESCRIPTION = (
    "Compare ways of drafting with plain decoding on the same prompts in one run: tokens/s, speedup with a 95% "
    "interval, accepted length, acceptance by position, time by phase, and whether the text is the same."
)
DEFAULT_MODEL = "smollm2-135m"
DEFAULT_DATA = "benchmarks/prompts"
DEFAULT_DRAFTS = "none,ngram,suffix"
RESULTS = "benchmarks/results"
ENGINE_OPTIONS = ("dtype", "device", "path", "quantization", "threads", "max_model_len", "objective")
PEERS = ("hf", "hf-plain")

Progress = Callable[[str, int, int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare every option on `parser`."""
    _add_subject(parser.add_argument)
    _add_measure(parser.add_argument)
    _add_load(parser.add_argument_group("load").add_argument)
    _add_results(parser.add_argument)
    _add_remote(parser.add_argument_group("a server instead of an engine of our own").add_argument)
    _add_engine_arguments(parser.add_argument_group("engine"))


def _add_subject(add: Callable[..., Any]) -> None:
    paths = "JSON lines: files, folders, or - for stdin (%(default)s)"
    drafts = (
        "comma-separated: none, ngram, suffix, dspark, auto, loop (all of the loop, drafts of no tokens), draft models "
        "or heads, each with :int8 :int4 :fixed :adaptive :exact and @k after it, such as suffix@6 or NAME:int4@4 "
        "(%(default)s)"
    )
    history = (
        "what was learned of acceptance from other prompts (LLM.save_history, dspark profile --history): the variants "
        "of policy adaptive start with it"
    )
    peer = (
        "also measure transformers: generate, prompt lookup, and assisted generation with the first draft model; "
        "hf-plain: generate alone"
    )
    add("--model", default=DEFAULT_MODEL, help="target: a registered name, folder, GGUF file or hub id (%(default)s)")
    add("--data", nargs="+", default=[DEFAULT_DATA], metavar="PATH", help=paths)
    add("--drafts", default=DEFAULT_DRAFTS, metavar="LIST", help=drafts)
    add("--history", metavar="FILE", help=history)
    add("--peer", action="append", choices=PEERS, default=[], help=peer)
    add("--tasks", metavar="LIST", help="only these tasks, comma-separated")
    add("--per-task", type=int, metavar="N", help="the first N prompts of each task (all)")
    add("--interleave", action="store_true", help="prompts of the tasks in turns, as mixed traffic comes")


def _add_measure(add: Callable[..., Any]) -> None:
    add("--max-tokens", type=int, default=128, metavar="N", help="longest answer (%(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy; above it, a fixed seed a prompt (0)")
    add("--repeat", type=int, default=3, metavar="N", help="repetitions (%(default)s)")


def _add_load(add: Callable[..., Any]) -> None:
    closed = "closed loops of N clients each, such as 1,2,4,8 (neither: one stream, prompt by prompt)"
    opened = "open loops of R requests/s each, such as 0.5,2,inf"
    burst = "gaps of an open loop are Gamma(B) distributed: 1 is Poisson, less is burstier (%(default)s)"
    floor = "each load also with N of the requests that run at a time asking for T tokens/s each, such as 2@40"
    add("--concurrency", metavar="LIST", help=closed)
    add("--rate", metavar="LIST", help=opened)
    add("--burstiness", type=float, default=1.0, metavar="B", help=burst)
    add("--floor", metavar="N@T", help=floor)
    add("--slo", metavar="LIMITS", help="for goodput: ttft=SECONDS,tpot=SECONDS, either or both")


def _add_results(add: Callable[..., Any]) -> None:
    check = "exit 1 when an answer differs from plain decoding's: at all with --exact, beyond a near-tie without"
    add("--exact-check", action="store_true", help=check)
    add("--out", default=RESULTS, metavar="DIR", help="folder of the result files (%(default)s)")
    add("--name", help="the result files are DIR/<date>-NAME.jsonl, .md and .png (the model's name)")
    add("--json", action="store_true", help="print the figures as one JSON object instead of tables")


def _add_remote(add: Callable[..., Any]) -> None:
    from dspark.bench.tune import add_server_arguments

    url = "measure the server there, any with OpenAI's API, under --data, --concurrency, --max-tokens and --repeat"
    add("--url", help=url)
    add_server_arguments(add)


def _add_engine_arguments(group: Any) -> None:
    group.add_argument("--exact", action="store_true", help="bitwise the same tokens with and without speculation")
    group.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default=None)
    group.add_argument("--device", default=None)
    group.add_argument("--path", choices=("auto", "native", "torch", "general"), default=None)
    group.add_argument("--quantization", choices=("int8", "int4"), default=None, help="of the target")
    group.add_argument("--threads", type=int, default=None, metavar="N")
    group.add_argument("--max-model-len", type=int, default=None, metavar="N")
    group.add_argument("--objective", choices=OBJECTIVES, default=None, help="what the engine plans for")


def run(args: argparse.Namespace, *, progress: Progress | None = None, argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 1 when --exact-check found a fault, else 0.

    `progress` is handed to the model's loader. `argv` is the command for the record (sys.argv).
    Raises ValueError, one line, for bad input.
    """
    from dspark.bench.arrivals import parse_loads
    from dspark.bench.data import interleave, load_rows
    from dspark.bench.harness import BenchSettings
    from dspark.bench.variants import parse_variants

    if args.url is not None:
        return _run_remote(args)
    variants = with_history(parse_variants(args.drafts), args.history)  # cheap checks before a model is loaded
    settings = BenchSettings(max_tokens=args.max_tokens, temperature=args.temperature, repeat=args.repeat)
    settings.params(0)
    loads = parse_loads(args.concurrency, args.rate, burstiness=args.burstiness, floor=args.floor)
    slo = parse_slo(args.slo)
    if args.exact_check and args.temperature > 0:
        raise ValueError("--exact-check compares greedy answers: use it with --temperature 0")
    if loads and (args.peer or args.exact_check):
        raise ValueError(
            "--peer and --exact-check answer one prompt at a time: use them without --concurrency and --rate"
        )
    if not loads and (args.slo is not None or args.floor is not None):
        raise ValueError("--slo and --floor are for a load: give --concurrency or --rate as well")
    require_matplotlib()
    tasks = [task.strip() for task in args.tasks.split(",") if task.strip()] if args.tasks else None
    rows = load_rows(args.data, per_task=args.per_task, tasks=tasks)
    if args.interleave:
        rows = interleave(rows)
    llm = load_llm(args, progress=progress)
    argv = sys.argv if argv is None else argv
    if loads:
        return _run_loads(args, llm, variants, rows, loads, settings=settings, slo=slo, argv=argv)
    return _run_stream(args, llm, variants, rows, settings=settings, argv=argv, progress=progress)


def _run_remote(args: argparse.Namespace) -> int:
    """A server that runs already."""
    from dspark.bench.data import interleave, load_rows
    from dspark.bench.remote_run import run as run_remote

    if args.rate or args.peer or args.exact_check or args.history:
        raise ValueError("--url measures a server as it is: leave --rate, --peer, --exact-check and --history out")
    tasks = [task.strip() for task in args.tasks.split(",") if task.strip()] if args.tasks else None
    rows = load_rows(args.data, per_task=args.per_task, tasks=tasks)
    return run_remote(args, interleave(rows) if args.interleave else rows)


def with_history(variants: Sequence[Variant], path: str | None) -> list[Variant]:
    """The same, those of policy adaptive with a history. Raises ValueError where the file is none."""
    if path is None:
        return list(variants)
    from dspark.plan.history import History

    History.load(path)
    return [
        replace(variant, speculation=replace(variant.speculation, history=path))
        if variant.speculation.policy == "adaptive" and not variant.plain
        else variant
        for variant in variants
    ]


def parse_slo(text: str | None) -> Slo:
    """`ttft=0.5,tpot=0.05`, seconds, either or both. Raises ValueError with the spelling."""
    from dspark.bench.load_summary import Slo

    limits: dict[str, float] = {}
    for part in (text or "").split(","):
        if part.strip():
            name, _, value = (word.strip() for word in part.partition("="))
            try:
                limits[name] = float(value)
            except ValueError:
                limits[name] = 0.0
            if name not in ("ttft", "tpot") or not limits[name] > 0:
                raise ValueError(f"--slo {part.strip()!r} is no limit: write ttft=SECONDS,tpot=SECONDS, either or both")
    return Slo(**limits)


def _run_loads(
    args: argparse.Namespace,
    llm: Any,
    variants: Sequence[Variant],
    rows: Sequence[PromptRow],
    loads: Sequence[Load],
    *,
    settings: BenchSettings,
    slo: Slo,
    argv: Sequence[str],
) -> int:
    """Requests as a server meets them."""
    from dspark.bench.load import run_load
    from dspark.bench.load_report import load_lines, load_page, load_text, plot_load
    from dspark.bench.load_summary import summarise_load

    result = run_load(llm, variants, rows, loads=loads, settings=settings, progress=_say)
    figures = summarise_load(result, slo)
    head = _head(args, llm, result, argv=argv)
    stem, title = result_stem(args), f"{_model_name(args)} under load: {', '.join(result.names)}"
    plot = stem.with_name(f"{stem.name}.png")
    plot_load(result, figures, plot, title=title)
    page = load_page(result, figures, slo, title=title, head=head, plot=plot.name)
    _write(stem, load_lines(result, figures, head=head), page)
    if args.json:
        document = {"head": head, "figures": [cell.as_dict() for cell in figures.values()]}
        print(json.dumps(document, ensure_ascii=False, indent=2))
    else:
        print(load_text(result, figures, slo))
    return 0


def _run_stream(
    args: argparse.Namespace,
    llm: Any,
    variants: Sequence[Variant],
    rows: Sequence[PromptRow],
    *,
    settings: BenchSettings,
    argv: Sequence[str],
    progress: Progress | None,
) -> int:
    """One stream, prompt by prompt."""
    from dspark.bench.harness import run_bench
    from dspark.bench.report import text_report
    from dspark.bench.summary import summarise

    result = run_bench(
        llm,
        variants,
        rows,
        settings=settings,
        peers=load_peers(args, llm, variants, progress=progress),
        judge=make_judge(llm),
        progress=_say,
    )
    summary = summarise(result)
    head = _head(args, llm, result, argv=argv)
    _write_stream(args, result, summary, head=head)
    print(_as_json(result, summary, head=head) if args.json else text_report(result, summary))
    return _verdict(result, check=args.exact_check)


def load_llm(args: argparse.Namespace, *, progress: Progress | None) -> Any:
    """The plain LLM whose weights all variants share."""
    from dspark import LLM

    engine = {name: getattr(args, name) for name in ENGINE_OPTIONS if getattr(args, name) is not None}
    return LLM(args.model, draft="none", progress=progress, exact=args.exact, **engine)


def load_peers(
    args: argparse.Namespace, llm: Any, variants: Sequence[Variant], *, progress: Progress | None
) -> Sequence[Peer]:
    """The peers that --peer names, over the same weights, dtype and threads."""
    if not args.peer:
        return []
    from dspark.bench.peers import PeerSettings, hf_peers
    from dspark.model.load import resolve
    from dspark.model.precision import is_ours

    info = llm.info()
    draft = next((v.speculation.model for v in variants if v.speculation.model is not None), None)
    settings = PeerSettings(
        model=resolve(args.model, progress=progress),
        draft=None if draft is None else resolve(draft, progress=progress),
        dtype=str(info["dtype"]).removeprefix("torch."),
        device=str(info.get("device", "cpu")),
        threads=num_threads(llm),
    )
    if any(is_ours(folder) for folder in (settings.model, settings.draft) if folder is not None):
        raise ValueError(
            "--peer runs transformers, which cannot read a folder of dspark quantize: compare with the dense model "
            "and --quantization, or leave --peer out"
        )
    return hf_peers(settings, plain_only="hf" not in args.peer)


def num_threads(llm: Any) -> int:
    """Threads of the target's passes: as set, else torch's own choice (which the engine may have made)."""
    import torch

    return llm.engine_config.threads or torch.get_num_threads()


def make_judge(llm: Any) -> Any:
    """The near-tie oracle over the plain LLM, with the bound of its dtype; exact engines are excused nothing."""
    from dspark.quality.oracle import LogitMargin, classify, tie_bound

    config, info = llm.engine_config, llm.info()
    dtype = str(info["dtype"])
    margin = LogitMargin(llm)

    def judge(prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], exact: bool) -> Any:
        bound = tie_bound(dtype, quantization=info.get("quantization"), exact=exact or config.exact)
        return classify(prompt, plain, other, margin=margin, bound=bound)

    return judge


def require_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ValueError("the plot needs matplotlib: install it, or dspark with its extra: pip install 'dspark[bench]'")


def _say(line: str) -> None:
    print(f"dspark bench: {line}", file=sys.stderr, flush=True)


def _head(args: argparse.Namespace, llm: Any, result: Result | LoadResult, *, argv: Sequence[str]) -> dict[str, Any]:
    from dataclasses import asdict

    from dspark.provenance import provenance

    config = {
        "engine": asdict(llm.engine_config),
        "bench": {**asdict(result.settings), "data": args.data, "tasks": args.tasks, "per_task": args.per_task},
        "info": llm.info(),
        "variants": result.configs,
        "peers": getattr(result, "peer_names", []),
    }
    device = str(llm.info().get("device", "cpu"))
    return provenance(argv, config=config, threads=num_threads(llm), device=device)


def _model_name(args: argparse.Namespace) -> str:
    path = Path(str(args.model))
    return path.stem if path.suffix == ".gguf" else path.name


def result_stem(args: argparse.Namespace) -> Path:
    """Where the result files of this run go, without their ending. Raises ValueError where nothing can be written."""
    from dspark.bench.report import free_stem

    folder = Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {folder}: {error.strerror}; give a folder that can be written") from None
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", args.name or _model_name(args)).strip("-") or "bench"
    return free_stem(folder, name, date=datetime.date.today())


def _write_stream(args: argparse.Namespace, result: Result, summary: Summary, *, head: dict[str, Any]) -> None:
    from dspark.bench.plot import plot_speedups
    from dspark.bench.report import json_lines, markdown_report

    stem, plot = result_stem(args), None
    title = f"{_model_name(args)}: {', '.join(result.names)}"
    if len(result.names) > 1:
        plot = stem.with_name(f"{stem.name}.png")
        plot_speedups(summary, plot, title=title)
    page = markdown_report(result, summary, title=title, head=head, plot=plot.name if plot else None)
    _write(stem, json_lines(result, summary, head=head), page)


def _write(stem: Path, lines: Sequence[str], page: str) -> None:
    stem.with_name(f"{stem.name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    stem.with_name(f"{stem.name}.md").write_text(page, encoding="utf-8")
    _say(f"written {stem}.jsonl and .md, and a plot where there is something to plot")


def _as_json(result: Result, summary: Summary, *, head: dict[str, Any]) -> str:
    from dspark.bench.report import difference_rows, notes

    figures = [cell.as_dict() for cell in summary.cells.values()]
    document = {"head": head, "figures": figures, "differences": difference_rows(result), "notes": notes(result)}
    return json.dumps(document, ensure_ascii=False, indent=2)


def _verdict(result: Result, *, check: bool) -> int:
    """Peers compute in another order and are excused; so only dspark's own variants count."""
    own = [d for d in result.differences if d.variant not in result.peer_names]
    faults = [d for d in own if d.finding.verdict == "fault"]
    if faults:
        _say(f"{len(faults)} of {len(own)} compared answers differ from plain decoding by more than rounding explains")
    elif check:
        _say(f"{len(own)} answers compared with plain decoding, no fault")
    if check and not own:
        raise ValueError("--exact-check compared nothing: name a draft beside none, or raise --repeat")
    return 1 if check and faults else 0
