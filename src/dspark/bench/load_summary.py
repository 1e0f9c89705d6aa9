"""Figures of a load: latencies, throughput and goodput of each variant at each load, with the formula of each.
It must never mix requests of different variants, loads or repetitions in one median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dspark.bench.load import LoadResult, LoadRun, Served
from dspark.bench.stats import merged

FORMULAS = (
    ("TTFT", "time of a request's first token - time at which it came (waiting included)"),
    ("TPOT", "(time of the last token - time of the first) / (tokens - 1), for answers of at least two tokens"),
    ("ITL", "time between two deliveries of a request, each of one token or more"),
    ("per-user speed", "1 / median TPOT: tokens/s that one user sees"),
    ("throughput", "output tokens of all requests / seconds from the start to the last token"),
    (
        "steady throughput",
        "output tokens delivered between the first answer's end and the last request's sending / the seconds between; "
        "no filling and no draining in it",
    ),
    ("goodput", "requests/s that kept both limits of --slo"),
    (
        "floor held",
        "of the whole seconds of requests with a floor, counted from their first token, those with at least so many "
        "tokens; where no request has one, of all requests against the floor of --floor",
    ),
    ("accepted length", "tokens emitted / (request, target pass) pairs that emitted tokens, the target's own included"),
    ("verified a request", "drafts verified / requests"),
    ("rows a pass", "packed tokens of a target pass, mean over the passes without prompt chunks"),
    (
        "step time error",
        "median over the passes without prompt chunks of |predicted - measured| / measured seconds, the first "
        "quarter of the passes left out",
    ),
    ("each figure", "median over the repetitions; [least, most] of them where there are several"),
)
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Limits of a good request, in seconds; None is no limit."""

    ttft: float | None = None
    tpot: float | None = None

    def holds(self, served: Served) -> bool:
        tpot = time_per_token(served)
        good_first = self.ttft is None or time_to_first(served) <= self.ttft
        return good_first and (self.tpot is None or tpot is None or tpot <= self.tpot)


@dataclass(frozen=True, kw_only=True)
class LoadFigures:
    """One variant at one load. Pairs (name -> percentile -> seconds) for latencies; the rest as FORMULAS has it."""

    variant: str
    load: str
    num_requests: int
    num_tokens: int
    throughput: float
    throughput_range: tuple[float, float]
    steady_throughput: float | None
    goodput: float
    floor_held: float | None
    latencies: Mapping[str, Mapping[str, float]]
    per_user: float | None
    accepted_length: float
    verified_per_request: float
    rows_per_pass: float | None
    step_time_error: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def time_to_first(served: Served) -> float:
    """Seconds."""
    return served.deliveries[0][0] - served.came


def time_per_token(served: Served) -> float | None:
    """Seconds; None for an answer of one delivery."""
    (first, num_first), (last, _) = served.deliveries[0], served.deliveries[-1]
    later = served.num_tokens - num_first
    return (last - first) / later if later else None


def gaps(served: Served) -> list[float]:
    """Seconds between deliveries."""
    times = [time for time, _ in served.deliveries]
    return [after - before for before, after in zip(times, times[1:])]


def seconds_held(served: Served, floor: float) -> list[bool]:
    """For each whole second between the first token and the last: whether at least `floor` tokens came in it."""
    begin, end = served.deliveries[0][0], served.deliveries[-1][0]
    counts = [0] * int(end - begin)
    for time, count in served.deliveries:
        if (second := int(time - begin)) < len(counts):
            counts[second] += count
    return [count >= floor for count in counts]


def steady_throughput(run: LoadRun) -> float | None:
    """Tokens/s between the first end and the last sending; None where these do not come in that order."""
    begin, end = min(served.deliveries[-1][0] for served in run.served), run.last_sent
    if end <= begin:
        return None
    tokens = sum(count for served in run.served for time, count in served.deliveries if begin < time <= end)
    return tokens / (end - begin)


def step_time_error(run: LoadRun) -> float | None:
    """Median relative error of the foreseen seconds of a pass; None where nothing was foreseen."""
    errors = [
        abs(step.predicted_seconds - step.target_seconds) / step.target_seconds
        for step in run.steps[len(run.steps) // 4 :]
        if step.predicted_seconds is not None and not step.num_prefill_tokens
    ]
    return statistics.median(errors) if errors else None


def floor_held(served: Sequence[Served], floor: float) -> float | None:
    """Share of the seconds of those with a floor, or of all where none has one; None without any."""
    asked = [entry for entry in served if entry.floor is not None] or served
    seconds = [held for entry in asked for held in seconds_held(entry, floor)]
    return statistics.fmean(seconds) if seconds and floor else None


def summarise_load(result: LoadResult, slo: Slo) -> dict[tuple[str, str], LoadFigures]:
    """(load, variant) -> figures."""
    floor = max((load.floor for load in result.loads), default=0.0)
    return {
        (load.name, name): _figures(
            [run for run in result.runs if run.variant == name and run.load.name == load.name], slo, floor
        )
        for load in result.loads
        for name in result.names
    }


def _figures(runs: Sequence[LoadRun], slo: Slo, floor: float) -> LoadFigures:
    served = [entry for run in runs for entry in run.served]
    record = merged([entry.record for entry in served])
    throughputs = [sum(entry.num_tokens for entry in run.served) / run.seconds for run in runs]
    decoding = [s.num_packed_tokens for run in runs for s in run.steps if not s.num_prefill_tokens and s.num_rows]
    tpots = [tpot for entry in served if (tpot := time_per_token(entry)) is not None]
    return LoadFigures(
        variant=runs[0].variant,
        load=runs[0].load.name,
        num_requests=len(served),
        num_tokens=sum(entry.num_tokens for entry in served),
        throughput=statistics.median(throughputs),
        throughput_range=(min(throughputs), max(throughputs)),
        steady_throughput=_median_of(runs, steady_throughput),
        goodput=statistics.median(sum(map(slo.holds, run.served)) / run.seconds for run in runs),
        floor_held=floor_held(served, floor),
        latencies={
            "ttft": _percentiles([time_to_first(entry) for entry in served]),
            "tpot": _percentiles(tpots),
            "itl": _percentiles([gap for entry in served for gap in gaps(entry)]),
        },
        per_user=1 / statistics.median(tpots) if tpots else None,
        accepted_length=record.mean_accepted_length,
        verified_per_request=record.num_verified / len(served),
        rows_per_pass=statistics.fmean(decoding) if decoding else None,
        step_time_error=_median_of(runs, step_time_error),
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES} if values else {}


def _median_of(runs: Sequence[LoadRun], figure: Callable[[LoadRun], float | None]) -> float | None:
    known = [value for run in runs if (value := figure(run)) is not None]
    return statistics.median(known) if known else None
