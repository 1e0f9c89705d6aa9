"""Scripted steps for what listens to an engine: sequences, rows and batches without an engine, and a clock to set.
They must never decide what the listener should count: tests say that themselves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from dspark.observe.metrics import EngineMetrics, Gauges, HttpCounts
from dspark.params import SamplingParams
from dspark.types import Request, RowStep, StepStats
from dspark.types import Sequence as Seq

PHASES = ("admit", "limit", "draft", "plan", "pack", "run", "verify", "commit")


class FakeClock:
    """Says what it was set to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def sequence(seq_id: int, *, prompt_class: str = "", num_prompt: int = 4, arrival: float = 0.0, **params: Any) -> Seq:
    """One that has not begun."""
    prompt = list(range(num_prompt))
    request = Request(
        id=f"r{seq_id}",
        prompt_token_ids=prompt,
        params=SamplingParams(**{"max_tokens": 100, **params}),
        arrival=arrival,
    )
    return Seq(id=seq_id, request=request, index=0, tokens=prompt, num_prompt=num_prompt, prompt_class=prompt_class)


def row_step(
    seq: Seq,
    *,
    drafted: int = 0,
    verified: int | None = None,
    accepted: int = 0,
    source: str = "suffix",
    allowed: bool = True,
    at: float = 0.0,
    end: str | None = None,
) -> RowStep:
    """The next step of a sequence, at the time `at`, that ends it with the reason `end`. `verified` None: all."""
    verified = drafted if verified is None else verified
    emitted, position = accepted + 1, seq.num_output
    seq.tokens = [*seq.tokens, *[7] * emitted]
    seq.record.add(drafted=drafted, verified=verified, accepted=accepted, emitted=emitted)
    seq.start_time = at if seq.start_time is None else seq.start_time
    seq.first_token_time = at if seq.first_token_time is None else seq.first_token_time
    if end is not None:
        seq.finish_reason, seq.finish_time = end, at
    return RowStep(
        seq=seq,
        policy="adaptive",
        allowed=allowed,
        position=position,
        text_kind="prose",
        source=source,
        limit=drafted,
        tokens=[7] * drafted,
        claims=[0.5] * drafted,
        survival=[0.5] * drafted,
        verified=verified,
        accepted=accepted,
        emitted=emitted,
        packed=1 + verified,
    )


def stats_of(
    rows: Sequence[RowStep],
    *,
    prompt_tokens: int = 0,
    preempted: int = 0,
    seconds: Mapping[str, float] | float = 0.08,
    predicted: float | None = None,
    plain: float | None = None,
) -> StepStats:
    """The batch of these rows; `seconds` of all phases together, or by phase."""
    by_phase = dict.fromkeys(PHASES, seconds / len(PHASES)) if isinstance(seconds, float) else dict(seconds)
    return StepStats(
        step=0,
        num_rows=len(rows),
        num_prefill_tokens=prompt_tokens,
        num_drafted=sum(len(row.tokens) for row in rows),
        num_verified=sum(row.verified for row in rows),
        num_accepted=sum(row.accepted for row in rows),
        num_emitted=sum(row.emitted for row in rows),
        num_preempted=preempted,
        seconds=by_phase,
        predicted_seconds=predicted,
        plain_seconds=plain,
    )


def feed(metrics: EngineMetrics, rows: Sequence[RowStep], **batch: Any) -> None:
    """One step, as the engine tells it: its rows, then the batch."""
    for row in rows:
        metrics(row)
    metrics.on_step(stats_of(rows, **batch))


def busy_metrics(*, num_steps: int = 6) -> tuple[EngineMetrics, HttpCounts]:
    """Metrics in which every family has a sample and every label a value."""
    clock = FakeClock(10.0)
    gauges = Gauges(num_running=2, num_waiting=1, cache_usage=0.25)
    metrics, http = EngineMetrics(lambda: gauges, clock=clock), HttpCounts()
    seqs = [sequence(0, prompt_class="chat"), sequence(1, structured_outputs={"regex": "a+"}), sequence(2)]
    sources = itertools.cycle(("suffix", "dspark", "grammar"))
    for number in range(num_steps):
        clock.now += 0.1
        rows = [
            row_step(
                seq,
                drafted=3,
                verified=number % 4,
                accepted=min(number % 4, 2),
                source=next(sources),
                at=clock.now,
                end="stop" if number == num_steps - 1 and seq.id else None,
            )
            for seq in seqs
        ]
        feed(metrics, rows, prompt_tokens=5, preempted=number % 2, predicted=0.04, plain=0.2)
    metrics.aborted(seqs[0])
    for route, status in (("/v1/chat/completions", 200), ("/v1/completions", 500), ("/health", 200)):
        http.count(route, status)
    return metrics, http
