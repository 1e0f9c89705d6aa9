"""Race: candidates over the same prompts in turns, until it is clear who is behind.
It must never end a candidate for one bad moment, or measure two of them in different company.

After each prompt the differences of log tokens/s are looked at, of every candidate and the leader, on the prompts that
all have answered. Who lies below the leader by more than a one-sided t-interval reaches is out. The chance of ALPHA is
shared between all pairs, since who leads is seen in the same figures, and between all looks, the m-th of which has
6 / (pi m)^2 of it: together no more than ALPHA (Bonferroni), however long the race.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.bench.harness import Answer, Measurement, Result

LEAST_PROMPTS = 5
"""Before anybody is out."""
ALPHA = 0.05
"""Chance that anybody who is as quick as the leader is put out."""


@dataclass(kw_only=True)
class Race:
    """What was measured, as a benchmark's Result (the first name is plain decoding), and who ended early:
    `out` name -> (prompts that it answered, upper bound of its speed as a share of the leader's)."""

    result: Result
    out: dict[str, tuple[int, float]] = field(default_factory=dict)

    def speeds(self, name: str) -> dict[int, float]:
        """Tokens/s by prompt."""
        found = {}
        for measurement in self.result.measurements:
            if measurement.variant == name and (speed := measurement.answer.tokens_per_second) is not None:
                found[measurement.row] = speed
        return found

    @property
    def running(self) -> list[str]:
        """Candidates that are in."""
        return [name for name in self.result.names[1:] if name not in self.out]


def race(
    participants: Sequence[Any],
    prompts: Sequence[Sequence[int]],
    *,
    result: Result,
    stop_early: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> Race:
    """`participants` in the order of `result.names`, the first of them plain decoding, which is measured to the end.
    Each is told the `task` of what it is asked."""
    found = Race(result=result)
    for row, prompt in enumerate(prompts):
        active = [p for p in participants if p.name not in found.out]
        shift = row % len(active)
        params = result.settings.params(row)
        for participant in [*active[shift:], *active[:shift]]:
            participant.task = result.rows[row].task
            _keep(result, participant.answer(prompt, params), row=row, name=participant.name)
        progress(f"prompt {row + 1}/{len(prompts)} ({result.rows[row].task}/{result.rows[row].id})")
        if stop_early and row + 1 >= LEAST_PROMPTS:
            for name, bound in behind({n: found.speeds(n) for n in found.running}).items():
                found.out[name] = (row + 1, bound)
                progress(f"{name} is out after {row + 1} prompts: at most {bound:.2f} of the leader's speed")
    return found


def behind(speeds: Mapping[str, Mapping[int, float]], *, alpha: float = ALPHA) -> dict[str, float]:
    """Of candidates' tokens/s by prompt, those who are behind the leader for sure: name -> upper bound of their speed
    as a share of the leader's. The leader is who has the largest mean of log tokens/s on the prompts that all have."""
    if len(speeds) < 2:
        return {}
    shared = sorted(set.intersection(*(set(of_one) for of_one in speeds.values())))
    if len(shared) < LEAST_PROMPTS:
        return {}
    logs = {name: [math.log(of_one[row]) for row in shared] for name, of_one in speeds.items()}
    leader = max(logs, key=lambda name: statistics.fmean(logs[name]))
    found = {}
    for name, values in logs.items():
        if name == leader:
            continue
        differences = [value - best for value, best in zip(values, logs[leader])]
        upper = statistics.fmean(differences) + radius(differences, alpha / (len(speeds) * (len(speeds) - 1)))
        if upper < 0:
            found[name] = math.exp(upper)
    return found


def radius(values: Sequence[float], alpha: float) -> float:
    """How far the mean of `values` may lie below what it stands for, but with chance `alpha`, at the look that as many
    values allow."""
    from scipy import stats

    n, look = len(values), len(values) - LEAST_PROMPTS + 1
    share = alpha * 6 / (math.pi * look) ** 2
    return float(stats.t.ppf(1 - share, n - 1)) * statistics.stdev(values) / math.sqrt(n)


def _keep(result: Result, answer: Answer, *, row: int, name: str) -> None:
    if answer.error is not None:
        result.refused.setdefault(row, f"{name}: {answer.error}")
    else:
        result.measurements.append(Measurement(row=row, variant=name, repetition=0, answer=answer))
