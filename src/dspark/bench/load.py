"""run_load: the same requests at several loads through several ways of decoding, as a server would meet them.
It must never start a clock of a request later than the load says it came.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dspark.bench.arrivals import Load
from dspark.bench.data import PromptRow, encode_rows
from dspark.bench.harness import WARM_UP, WARM_UP_TOKENS, BenchSettings
from dspark.bench.variants import Variant
from dspark.engine.llm import LLM
from dspark.params import SamplingParams
from dspark.types import SpeculationRecord, StepStats

OPEN_LOOP_SEQS = 64
"""Most requests that run together in an open loop; the others wait."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """One answered request. Times in seconds from the start of the load: when it `came`, and each delivery of tokens
    (time, count). `floor`: tokens/s that it asked for."""

    row: int
    came: float
    deliveries: Sequence[tuple[float, int]]
    num_prompt: int
    record: SpeculationRecord
    floor: float | None = None

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.deliveries)


@dataclass(frozen=True, kw_only=True)
class LoadRun:
    """One variant at one load, once. `seconds` from the first arrival to the last token; `steps` of the engine."""

    variant: str
    load: Load
    repetition: int
    served: Sequence[Served]
    seconds: float
    last_sent: float
    steps: Sequence[StepStats]


@dataclass(kw_only=True)
class LoadResult:
    """Everything measured; bench/load_summary makes figures of it. `names[0]` is plain decoding."""

    rows: list[PromptRow]
    names: list[str]
    loads: list[Load]
    settings: BenchSettings
    runs: list[LoadRun] = field(default_factory=list)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)


def run_load(
    llm: Any,
    variants: Sequence[Variant],
    rows: Sequence[PromptRow],
    *,
    loads: Sequence[Load],
    settings: BenchSettings,
    progress: Callable[[str], None] = lambda line: None,
) -> LoadResult:
    """Every variant at every load, `settings.repeat` times; the order of the variants moves on each time.

    Each run has an engine of its own over the same weights: no drafter or policy knows an answer from another run. All
    rows are asked once in each run. Raises ValueError where a row is refused, or where there are fewer rows than
    clients.
    """
    if not rows:
        raise ValueError("no prompts to measure: the selection is empty; relax --tasks or --per-task")
    most = max((load.concurrency or 1 for load in loads), default=1)
    if most > len(rows):
        raise ValueError(
            f"{most} clients for {len(rows)} prompts: raise --per-task, add --data, or lower --concurrency"
        )
    result = LoadResult(
        rows=list(rows), names=[variant.name for variant in variants], loads=list(loads), settings=settings
    )
    prompts = encode_rows(rows, llm.tokenizer)
    warm_up = llm.tokenizer.encode(WARM_UP)
    for repetition in range(settings.repeat):
        for place, load in enumerate(loads):
            shift = (repetition * len(loads) + place) % len(variants)
            for variant in [*variants[shift:], *variants[:shift]]:
                engine = _engine(llm, variant, load)
                engine.generate(warm_up, SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=settings.temperature))
                run = serve(engine, prompts, load, variant=variant.name, repetition=repetition, settings=settings)
                result.runs.append(run)
                result.configs[variant.name] = engine.info()
                tokens = sum(served.num_tokens for served in run.served)
                progress(
                    f"repetition {repetition + 1}/{settings.repeat}, load {load.name}, {variant.name}: "
                    f"{tokens / run.seconds:.1f} tokens/s"
                )
                del engine
                gc.collect()  # engines hold caches of gigabytes, in cycles
    return result


def _engine(llm: Any, variant: Variant, load: Load) -> LLM:
    overrides = {"prefix_reuse": False, "max_num_seqs": load.concurrency or OPEN_LOOP_SEQS} | dict(variant.engine)
    return llm.variant(speculation=variant.speculation, **overrides)


def serve(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    load: Load,
    *,
    variant: str,
    repetition: int,
    settings: BenchSettings,
) -> LoadRun:
    """All prompts through the engine under the load, on this thread."""
    waiting = deque(zip(range(len(prompts)), load.times(len(prompts), seed=repetition)))
    running: dict[int, _Open] = {}
    served: list[Served] = []
    steps: list[StepStats] = []
    llm.engine.sinks.append(steps.append)
    start = time.perf_counter()
    last_sent = 0.0
    try:
        while waiting or running:
            now = time.perf_counter() - start
            while waiting and _may_send(load, waiting[0][1], now, len(running)):
                row, due = waiting.popleft()
                last_sent = time.perf_counter() - start
                came = last_sent if load.rate is None else due
                params, floor = settings.params(row), None
                if sum(entry.floor is not None for entry in running.values()) < load.num_floors:
                    floor = load.floor
                    params = replace(params, min_tokens_per_second=floor)
                for seq in llm.requests.sequences(llm.requests.make(list(prompts[row]), params)):
                    running[seq.id] = _Open(row=row, came=came, floor=floor)
            if not running:
                time.sleep(max(0.0, waiting[0][1] - now))
                continue
            grown = llm.engine.step()
            now = time.perf_counter() - start
            for seq in grown:
                entry = running[seq.id]
                entry.deliveries.append((now, seq.num_output - entry.num_tokens))
                entry.num_tokens = seq.num_output
                if seq.finish_reason is not None:
                    served.append(running.pop(seq.id).close(seq))
    finally:
        llm.engine.sinks.remove(steps.append)
        for seq_id in running:
            llm.engine.abort(seq_id)
    return LoadRun(
        variant=variant,
        load=load,
        repetition=repetition,
        served=served,
        seconds=max(entry.deliveries[-1][0] for entry in served),
        last_sent=last_sent,
        steps=steps,
    )


def _may_send(load: Load, due: float, now: float, num_running: int) -> bool:
    return num_running < load.concurrency if load.concurrency is not None else due <= now


@dataclass(kw_only=True)
class _Open:
    """A request that runs."""

    row: int
    came: float
    floor: float | None
    num_tokens: int = 0
    deliveries: list[tuple[float, int]] = field(default_factory=list)

    def close(self, seq: Any) -> Served:
        return Served(
            row=self.row,
            came=self.came,
            deliveries=self.deliveries,
            num_prompt=seq.num_prompt,
            record=seq.record,
            floor=self.floor,
        )
