"""Goodness of fit: whether counted samples have a given law, or two sets of samples the same one, and with what power.
It must never call samples good without saying which departure it would have found.

`law`: probabilities of cells, summing to 1. Cells with an expectation below MIN_EXPECTED are pooled. With n samples of
a law with probabilities p + d the chi-square statistic is about noncentral, with noncentrality n * sum(d^2 / p), and
sum(d^2 / p) >= (sum |d|)^2 = 4 TV^2 for total variation distance TV (Cauchy-Schwarz). So *every* departure of at least
`detectable` = sqrt(noncentrality needed / n) / 2 is found with the stated power, whatever its shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIN_EXPECTED = 5.0
POWER = 0.8


@dataclass(frozen=True, kw_only=True)
class Fit:
    """`p_value` of the chi-square test on `num_cells` cells after pooling; 0 where something impossible was drawn.

    `noncentrality` that rounding alone may add (see `fit`)."""

    statistic: float
    num_cells: int
    num_samples: int
    p_value: float
    noncentrality: float = 0.0

    def detectable(self, alpha: float) -> float:
        """The total variation distance from which on every departure is found with POWER at level `alpha`."""
        if self.num_cells < 2:
            return 1.0
        needed = noncentrality_needed(self.num_cells - 1, alpha=alpha, allowed=self.noncentrality)
        return min(1.0, (needed / self.num_samples) ** 0.5 / 2)


def require_scipy() -> Any:
    """scipy.stats. Raises ValueError where it is not installed."""
    try:
        from scipy import stats
    except ImportError:
        raise ValueError(
            "the distribution test needs scipy: install it, or dspark with its extra: pip install 'dspark[bench]'"
        ) from None
    return stats


def fit(counts: Mapping[Any, int], law: Mapping[Any, float], *, allowance: float = 0.0) -> Fit:
    """Pearson's test of the counts against the law.

    `allowance`: sum((p' - p)^2 / p) between two correct computations of the law, in another order of summation. So much
    is no departure: the null is the noncentral law with n times that.
    """
    stats, n = require_scipy(), sum(counts.values())
    assert n > 0 and abs(sum(law.values()) - 1) < 1e-3, (n, sum(law.values()))
    cells = _pooled([(counts.get(cell, 0), n * p) for cell, p in law.items() if p > 0])
    strange = any(count and law.get(cell, 0.0) <= 0 for cell, count in counts.items())
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    nc, freedom = n * allowance, len(cells) - 1
    if strange:
        p_value = 0.0
    elif freedom < 1:
        p_value = 1.0
    else:
        p_value = float(stats.ncx2.sf(statistic, freedom, nc) if nc > 0 else stats.chi2.sf(statistic, freedom))
    return Fit(statistic=statistic, num_cells=len(cells), num_samples=n, p_value=p_value, noncentrality=nc)


def together(fits: Sequence[Fit]) -> Fit:
    """All of them as one: the sum of independent chi-square statistics. It finds what is small but everywhere."""
    stats = require_scipy()
    statistic, nc = sum(f.statistic for f in fits), sum(f.noncentrality for f in fits)
    freedom, n = sum(max(0, f.num_cells - 1) for f in fits), sum(f.num_samples for f in fits)
    if any(f.p_value == 0.0 for f in fits):
        p_value = 0.0
    elif freedom < 1:
        p_value = 1.0
    else:
        p_value = float(stats.ncx2.sf(statistic, freedom, nc) if nc > 0 else stats.chi2.sf(statistic, freedom))
    return Fit(statistic=statistic, num_cells=freedom + 1, num_samples=n, p_value=p_value, noncentrality=nc)


def two_samples(first: Mapping[Any, int], second: Mapping[Any, int]) -> Fit:
    """The chi-square test of homogeneity, where the law itself is not known: half the power, in samples, of `fit`."""
    stats = require_scipy()
    n, m = sum(first.values()), sum(second.values())
    assert n > 0 and m > 0
    rows = [(first.get(cell, 0), second.get(cell, 0)) for cell in sorted({*first, *second}, key=repr)]
    # Pooled by the expectation in the smaller sample, which depends on the two together only: the test stays valid.
    share = min(n, m) / (n + m)
    groups = _pooled([((a, b), (a + b) * share) for a, b in rows])
    cells = [counts for counts, _ in groups]
    statistic = 0.0
    for a, b in cells:
        for observed, size in ((a, n), (b, m)):
            expected = (a + b) * size / (n + m)
            statistic += (observed - expected) ** 2 / expected
    freedom = len(cells) - 1
    p_value = float(stats.chi2.sf(statistic, freedom)) if freedom > 0 else 1.0
    size = n * m // (n + m)  # what a sample against a known law would have to be, to see as much
    return Fit(statistic=statistic, num_cells=len(cells), num_samples=max(1, size), p_value=p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979), in the order given: below alpha with probability at most alpha altogether."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, worst = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, p_values[i] * (len(p_values) - rank)))
        adjusted[i] = worst
    return adjusted


def noncentrality_needed(freedom: int, *, alpha: float, power: float = POWER, allowed: float = 0.0) -> float:
    """The noncentrality at which a chi-square test with so many degrees of freedom rejects with probability `power`."""
    stats = require_scipy()
    critical = stats.ncx2.isf(alpha, freedom, allowed) if allowed > 0 else stats.chi2.isf(alpha, freedom)
    low, high = allowed, max(1.0, 2 * allowed)
    while stats.ncx2.sf(critical, freedom, high) < power:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if stats.ncx2.sf(critical, freedom, middle) >= power else (middle, high)
    return float(high)


def samples_needed(law: Mapping[Any, float], other: Mapping[Any, float], *, alpha: float, power: float = POWER) -> int:
    """Samples of `other` after which the test against `law` has found it out with probability `power`."""
    departure = sum((other.get(cell, 0.0) - p) ** 2 / p for cell, p in law.items() if p > 0)
    assert departure > 0, "the two laws are the same"
    freedom = sum(p > 0 for p in law.values()) - 1
    return int(noncentrality_needed(freedom, alpha=alpha, power=power) / departure) + 1


def _pooled(cells: list[tuple[Any, float]]) -> list[tuple[Any, float]]:
    """(counts, expected) with the least expected put together until each has MIN_EXPECTED; counts are numbers or
    tuples of them."""
    pooled: list[tuple[Any, float]] = []
    counts: Any = None
    expected = 0.0
    for count, e in sorted(cells, key=lambda cell: cell[1]):
        counts, expected = _sum(counts, count), expected + e
        if expected >= MIN_EXPECTED:
            pooled.append((counts, expected))
            counts, expected = None, 0.0
    if counts is not None:
        if pooled:
            last, e = pooled.pop()
            pooled.append((_sum(last, counts), e + expected))
        else:
            pooled.append((counts, expected))
    return pooled


def _sum(a: Any, b: Any) -> Any:
    if a is None:
        return b
    return tuple(x + y for x, y in zip(a, b, strict=True)) if isinstance(a, tuple) else a + b
