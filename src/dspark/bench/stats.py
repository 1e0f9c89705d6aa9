"""Statistics of a benchmark: ratios of medians with bootstrap intervals, and acceptance from counts.
It must never see an engine, a clock or a file: numbers in, numbers out, the same for the same seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dspark.types import SpeculationRecord

NUM_RESAMPLES = 2000
LEVEL = 0.95
Pair = tuple[float, float]
"""(baseline, other) tokens/s of one prompt, each the median over the repetitions."""
Interval = tuple[float, float]


def median(values: Sequence[float]) -> float | None:
    """The median, None of nothing."""
    return statistics.median(values) if values else None


def ratio_of_medians(pairs: Sequence[Pair]) -> float:
    """median of the second numbers / median of the first: the speedup over the same prompts."""
    assert pairs and all(base > 0 for base, _ in pairs), pairs
    return statistics.median(other for _, other in pairs) / statistics.median(base for base, _ in pairs)


def bootstrap_ratio(pairs: Sequence[Pair], *, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Interval | None:
    """95% percentile interval of `ratio_of_medians`, drawing pairs with replacement; None for fewer than two pairs.

    It holds the scatter between prompts (Efron & Tibshirani 1993, chapter 13), not what a busy machine does to all of
    them alike: interleaving cares for that.
    """
    if len(pairs) < 2:
        return None
    ratios = _resampled_ratios(np.asarray(pairs, dtype=float), np.random.default_rng(seed), num_resamples)
    return _percentiles(ratios)


def mean_of_tasks(pairs: Mapping[str, Sequence[Pair]]) -> float:
    """Arithmetic mean over the tasks of each task's `ratio_of_medians`: every task weighs the same."""
    assert pairs
    return statistics.fmean(ratio_of_medians(of_task) for of_task in pairs.values())


def bootstrap_mean_of_tasks(
    pairs: Mapping[str, Sequence[Pair]], *, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Interval | None:
    """95% percentile interval of `mean_of_tasks`, drawing pairs with replacement inside each task."""
    if not pairs or any(len(of_task) < 2 for of_task in pairs.values()):
        return None
    generator = np.random.default_rng(seed)
    by_task = [_resampled_ratios(np.asarray(rows, dtype=float), generator, num_resamples) for rows in pairs.values()]
    return _percentiles(np.mean(by_task, axis=0))


def _resampled_ratios(pairs: np.ndarray, generator: np.random.Generator, num_resamples: int) -> np.ndarray:
    """(num_resamples,) ratios of medians of resampled pairs; `pairs` is (rows, 2)."""
    picks = generator.integers(0, len(pairs), size=(num_resamples, len(pairs)))
    medians = np.median(pairs[picks], axis=1)
    return medians[:, 1] / medians[:, 0]


def _percentiles(values: np.ndarray) -> Interval:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def acceptance_by_position(record: SpeculationRecord) -> list[dict[str, float]]:
    """For draft positions 1..k: how often the target looked at a draft there, and kept it.

    `rate` = accepted_at / verified_at of the position: of the blocks that reached it, those whose drafts up to it were
    all kept. `survival` = accepted_at of the position / verified_at of position 1: of all blocks with a draft. The two
    are equal when every block has the same length.
    """
    if not record.verified_at:
        return []
    return [
        {
            "position": j + 1,
            "verified": verified,
            "accepted": accepted,
            "rate": accepted / verified if verified else 0.0,
            "survival": accepted / record.verified_at[0],
        }
        for j, (verified, accepted) in enumerate(zip(record.verified_at, record.accepted_at, strict=True))
    ]


def merged(records: Sequence[SpeculationRecord]) -> SpeculationRecord:
    """The sum of the counts, as a new record."""
    total = SpeculationRecord()
    for record in records:
        total.merge(record)
    return total


def medians_by(
    items: Sequence[Any], *, key: Callable[[Any], int], value: Callable[[Any], float | None]
) -> dict[int, float]:
    """Median of `value` over the items with the same `key`; items without a value are left out."""
    groups: dict[int, list[float]] = {}
    for item in items:
        number = value(item)
        if number is not None:
            groups.setdefault(key(item), []).append(number)
    return {name: statistics.median(numbers) for name, numbers in groups.items()}
