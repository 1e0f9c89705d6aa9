"""EngineMetrics: counts of what an engine does, for Prometheus, Weights & Biases and the live page.
It must never keep a request's text, nor grow with the number of requests, classes or clients.

Every number has its formula beside its name (docs/monitoring.md lists them). A sink: give `on_step` to LLM.add_sink and
the object itself to LLM.add_row_sink.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dspark.types import RowStep, StepStats
from dspark.types import Sequence as Seq

MAX_LABELS = 64
"""Values of a label that callers may choose; what comes after counts as OTHER."""
OTHER = "other"
REASONS = ("stop", "length", "abort", "error")
"""Why answers end. Counted from 0 on: a rate does not see the first count of a series that was not there before."""
WINDOW = 5.0
"""Seconds over which speeds are taken."""
LONGEST_HISTORY = 4096
SILENT_AFTER = 200
"""Steps of requests that may draft, without any draft or without any that held, after which something is wrong."""

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
LENGTHS = tuple(range(17))
ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class Histogram:
    """Counts of values by upper bound, as Prometheus wants them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, number of values up to it), the last bound +Inf."""
        sums, count = [], 0
        for bound, here in zip((*self.bounds, float("inf")), list(self.counts)):
            count += here
            sums.append(("+Inf" if bound == float("inf") else f"{float(bound)}", count))
        return sums


@dataclass(kw_only=True)
class Acceptance:
    """What drafts brought to steps of one kind: `steps` of a row, `emitted` tokens of them, `verified` and `accepted`
    drafts. Mean accepted length = emitted / steps, the target's own token included; acceptance rate = accepted /
    verified."""

    steps: int = 0
    emitted: int = 0
    verified: int = 0
    accepted: int = 0

    def add(self, step: RowStep) -> None:
        """Count one row's step."""
        self.steps += 1
        self.emitted += step.emitted
        self.verified += step.verified
        self.accepted += step.accepted


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """What is the case now. `cache_usage`: pages in use, 0 to 1."""

    num_running: int = 0
    num_waiting: int = 0
    cache_usage: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Running:
    """One answer that is being made. `seconds` since the request came."""

    id: str
    prompt_class: str
    seconds: float
    num_prompt: int
    num_tokens: int
    tokens_per_second: float
    mean_accepted_length: float


@dataclass(kw_only=True)
class Speed:
    """Over the last WINDOW seconds. `plain_tokens_per_second`: what plain decoding would have made in the seconds that
    the engine worked, by the measured costs; None where nothing is measured or nothing ran."""

    tokens_per_second: float = 0.0
    plain_tokens_per_second: float | None = None
    speedup: float | None = None


@dataclass(kw_only=True)
class Counts:
    """Sums since the start."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preempted: int = 0
    num_drafts: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    measured_seconds: float = 0.0
    predicted_seconds: float = 0.0
    decode_seconds: float = 0.0
    plain_seconds: float = 0.0
    silent_steps: int = 0
    verified_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    seconds_by_phase: dict[str, float] = field(default_factory=dict)


class HttpCounts:
    """Responses by route and status. Routes come from the server's own table, so they are bounded."""

    def __init__(self) -> None:
        self.responses: dict[tuple[str, int], int] = {}

    def count(self, route: str, status: int) -> None:
        """One response."""
        self.responses[route, status] = self.responses.get((route, status), 0) + 1


class EngineMetrics:
    """Everything that is counted, by name. Written on the engine's thread, read on any."""

    def __init__(self, gauges: Callable[[], Gauges] = Gauges, *, clock: Callable[[], float] = time.perf_counter):
        self.gauges = gauges
        self.clock = clock
        self.lock = threading.Lock()
        self.counts = Counts()
        self.by_class: dict[str, Acceptance] = {}
        self.by_drafter: dict[str, Acceptance] = {}
        self.by_grammar: dict[str, Acceptance] = {}
        self.histograms = {
            "iteration_tokens_total": Histogram(COUNTS),
            "time_to_first_token_seconds": Histogram(SECONDS),
            "inter_token_latency_seconds": Histogram(SECONDS),
            "request_time_per_output_token_seconds": Histogram(SECONDS),
            "e2e_request_latency_seconds": Histogram(SECONDS),
            "request_queue_time_seconds": Histogram(SECONDS),
            "request_prefill_time_seconds": Histogram(SECONDS),
            "request_decode_time_seconds": Histogram(SECONDS),
            "request_inference_time_seconds": Histogram(SECONDS),
            "request_prompt_tokens": Histogram(COUNTS),
            "request_generation_tokens": Histogram(COUNTS),
            "request_params_max_tokens": Histogram(COUNTS),
            "request_params_n": Histogram((1, 2, 5, 10, 20, 50, 128)),
            "step_seconds": Histogram(STEP_SECONDS),
            "step_prediction_error_ratio": Histogram(ERRORS),
            "spec_decode_verified_length": Histogram(LENGTHS),
            "spec_decode_accepted_length": Histogram(LENGTHS),
        }
        self.open: dict[int, tuple[Seq, float]] = {}
        self.ended: set[int] = set()  # by the step that runs: if it fails now, the engine tells of their end again
        self.recent: deque[tuple[float, int, float, float | None]] = deque(maxlen=LONGEST_HISTORY)

    # -- sinks

    def on_step(self, stats: StepStats) -> None:
        """Of the whole batch."""
        counts, total = self.counts, sum(stats.seconds.values())
        with self.lock:
            counts.num_steps += 1
            counts.num_prompt_tokens += stats.num_prefill_tokens
            counts.num_generation_tokens += stats.num_emitted
            counts.num_preempted += stats.num_preempted
            for name, seconds in stats.seconds.items():
                counts.seconds_by_phase[name] = counts.seconds_by_phase.get(name, 0.0) + seconds
            self.histograms["iteration_tokens_total"].observe(stats.num_prefill_tokens + stats.num_emitted)
            self.histograms["step_seconds"].observe(total)
            if stats.predicted_seconds:
                counts.predicted_seconds += stats.predicted_seconds
                counts.measured_seconds += stats.target_seconds
                error = abs(stats.target_seconds / stats.predicted_seconds - 1)
                self.histograms["step_prediction_error_ratio"].observe(error)
            if stats.plain_seconds is not None:
                counts.plain_seconds += stats.plain_seconds
                counts.decode_seconds += total
            self.recent.append((self.clock(), stats.num_emitted, total, stats.plain_seconds))
            self.ended.clear()

    def __call__(self, step: RowStep) -> None:
        """Of one row."""
        seq, now = step.seq, self.clock()
        with self.lock:
            if (known := self.open.get(seq.id)) is None:
                self.counts.prefix_queries += seq.num_prompt
                self.counts.prefix_hits += seq.num_prefix_hits
                self.histograms["time_to_first_token_seconds"].observe(now - seq.request.arrival)
            else:
                self.histograms["inter_token_latency_seconds"].observe(now - known[1])
            self.open[seq.id] = (seq, now)
            self._count(step)
            if seq.finish_reason is not None:
                self.ended.add(seq.id)
                self._finish(seq)

    def aborted(self, seq: Seq) -> None:
        """The engine ended a sequence between steps, or after a step that failed when it had ended already."""
        with self.lock:
            if seq.id in self.ended:
                self.ended.discard(seq.id)
            else:
                self._finish(seq)

    def _count(self, step: RowStep) -> None:
        counts = self.counts
        if step.allowed:
            counts.silent_steps = 0 if step.accepted else counts.silent_steps + 1
        counts.num_drafted += len(step.tokens)
        if step.verified:
            counts.num_drafts += 1
            counts.num_verified += step.verified
            counts.num_accepted += step.accepted
            for places, number in ((counts.verified_at, step.verified), (counts.accepted_at, step.accepted)):
                places.extend([0] * (step.verified - len(places)))
                for place in range(number):
                    places[place] += 1
        self.histograms["spec_decode_verified_length"].observe(step.verified)
        self.histograms["spec_decode_accepted_length"].observe(step.accepted)
        structure = step.seq.params.structure
        _of(self.by_class, step.seq.prompt_class or "none").add(step)
        _of(self.by_drafter, step.source if step.verified else "none").add(step)
        _of(self.by_grammar, structure.kind if structure is not None else "none").add(step)

    def _finish(self, seq: Seq) -> None:
        self.open.pop(seq.id, None)
        reason = seq.finish_reason or "abort"
        self.counts.finished[reason] = self.counts.finished.get(reason, 0) + 1
        see = {name: histogram.observe for name, histogram in self.histograms.items()}
        see["request_prompt_tokens"](seq.num_prompt)
        see["request_generation_tokens"](seq.num_output)
        see["request_params_n"](seq.params.n)
        if seq.params.max_tokens is not None:
            see["request_params_max_tokens"](seq.params.max_tokens)
        arrival, start, first = seq.request.arrival, seq.start_time, seq.first_token_time
        end = self.clock() if seq.finish_time is None else seq.finish_time
        see["e2e_request_latency_seconds"](end - arrival)
        if start is not None:
            see["request_queue_time_seconds"](start - arrival)
            see["request_inference_time_seconds"](end - start)
        if start is not None and first is not None:
            see["request_prefill_time_seconds"](first - start)
            see["request_decode_time_seconds"](end - first)
            if seq.num_output > 1:
                see["request_time_per_output_token_seconds"]((end - first) / (seq.num_output - 1))

    # -- readings

    @property
    def silent(self) -> bool:
        """Whether drafts are allowed and, for SILENT_AFTER steps of rows, none has held."""
        return self.counts.silent_steps >= SILENT_AFTER

    def speed(self) -> Speed:
        """Over the last WINDOW seconds, or since the start where that is less."""
        now = self.clock()
        steps = [step for step in list(self.recent) if now - step[0] <= WINDOW]
        emitted = sum(step[1] for step in steps)
        if not emitted:
            return Speed()
        first_began = steps[0][0] - steps[0][2]
        speed = Speed(tokens_per_second=emitted / max(now - first_began, 1e-9))
        known = [(step[2], step[3]) for step in steps if step[3] is not None]
        plain, spent = sum(step[1] for step in known), sum(step[0] for step in known)
        if len(known) == len(steps) and plain > 0 and spent > 0:
            speed.speedup = plain / spent
            speed.plain_tokens_per_second = speed.tokens_per_second / speed.speedup
        return speed

    def running(self) -> list[Running]:
        """Answers that have begun, oldest first."""
        now, found = self.clock(), []
        for seq, _ in list(self.open.values()):
            decoding = 0.0 if seq.first_token_time is None else now - seq.first_token_time
            found.append(
                Running(
                    id=seq.request.id,
                    prompt_class=seq.prompt_class or "none",
                    seconds=now - seq.request.arrival,
                    num_prompt=seq.num_prompt,
                    num_tokens=seq.num_output,
                    tokens_per_second=(seq.num_output - 1) / decoding if decoding > 0 else 0.0,
                    mean_accepted_length=seq.record.mean_accepted_length,
                )
            )
        return found


def _of(known: dict[str, Acceptance], name: str) -> Acceptance:
    """The count of a name, or of all others once there are MAX_LABELS."""
    name = name.encode("utf-8", "replace").decode()  # half a surrogate pair, which JSON can spell, cannot be exposed
    if name not in known:
        name = name if len(known) < MAX_LABELS else OTHER
        known.setdefault(name, Acceptance())
    return known[name]
