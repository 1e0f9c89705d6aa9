"""Paired outcomes: two ways of answering the same questions, right or wrong, and what their difference is known to be.
It must never see an answer: counts in, figures out.

Of n questions `both` were right under both, `plain_only` under plain decoding alone, `other_only` under the other
alone. The difference is other - plain, as a share: (other_only - plain_only) / n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Counts of paired outcomes."""

    n: int
    both: int
    plain_only: int
    other_only: int

    def __post_init__(self) -> None:
        assert min(self.both, self.plain_only, self.other_only) >= 0
        assert self.both + self.plain_only + self.other_only <= self.n

    @classmethod
    def of(cls, pairs: Sequence[tuple[bool, bool]]) -> Paired:
        """From (plain, other) of each question."""
        return cls(
            n=len(pairs),
            both=sum(a and b for a, b in pairs),
            plain_only=sum(a and not b for a, b in pairs),
            other_only=sum(b and not a for a, b in pairs),
        )

    @property
    def plain(self) -> float:
        """Share right under plain decoding."""
        return (self.both + self.plain_only) / self.n

    @property
    def other(self) -> float:
        """Share right under the other."""
        return (self.both + self.other_only) / self.n

    @property
    def difference(self) -> float:
        """other - plain."""
        return (self.other_only - self.plain_only) / self.n


def mcnemar(counts: Paired) -> float:
    """Two-sided p-value of McNemar's exact test: under equality a discordant pair favours either side with 1/2."""
    b, c = counts.plain_only, counts.other_only
    if b + c == 0:
        return 1.0
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1)) / 2 ** (b + c)
    return min(1.0, 2 * tail)


def interval(counts: Paired, *, level: float = LEVEL) -> tuple[float, float]:
    """Score interval of the difference of paired proportions (Tango 1998, Statistics in Medicine 17:891).

    It is honest where nothing differs: with no discordant pair among n it is +-z^2 / (n + z^2), not 0.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = counts.difference
    return _root(counts, z, inside=centre, outside=-1.0), _root(counts, z, inside=centre, outside=1.0)


def _root(counts: Paired, z: float, *, inside: float, outside: float) -> float:
    for _ in range(100):
        middle = (inside + outside) / 2
        if _score(counts, middle) <= z:
            inside = middle
        else:
            outside = middle
    return inside


def _score(counts: Paired, difference: float) -> float:
    """|b - c - n d| / its standard error under difference d of shares (other - plain)."""
    n, b, c = counts.n, counts.other_only, counts.plain_only
    d = difference
    a2, b1, c0 = 2 * n, -b - c + (2 * n - b + c) * d, -c * d * (1 - d)
    q = (math.sqrt(max(0.0, b1 * b1 - 4 * a2 * c0)) - b1) / (2 * a2)  # of the plain_only pairs, constrained to d
    distance, variance = abs(b - c - n * d), n * (2 * max(q, 0.0) + d * (1 - d))
    if variance <= 0:
        return 0.0 if distance == 0 else math.inf
    return distance / math.sqrt(variance)


def questions_needed(counts: Paired, *, margin: float, level: float = LEVEL) -> int:
    """So many questions, of which as large a share differs as here, that an observed difference of 0 has an interval
    within +-margin (a share). Without a discordant pair: z^2 (1 - margin) / margin."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = (counts.plain_only + counts.other_only) / counts.n if counts.n else 0.0
    low, high = 1, 2
    while not _within(high, share, margin=margin, z=z):
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _within(middle, share, margin=margin, z=z) else (middle + 1, high)
    return low


def _within(n: int, share: float, *, margin: float, z: float) -> bool:
    """By the score at the margin, with half the discordant pairs on either side (these may be no whole number)."""
    half, d = n * share / 2, margin
    a2, b1, c0 = 2 * n, -2 * half + 2 * n * d, -half * d * (1 - d)
    q = (math.sqrt(max(0.0, b1 * b1 - 4 * a2 * c0)) - b1) / (2 * a2)
    return n * d / math.sqrt(n * (2 * max(q, 0.0) + d * (1 - d))) >= z


def sign_test(plain_wins: int, other_wins: int) -> float:
    """Two-sided exact p-value; ties are left out."""
    n = plain_wins + other_wins
    return mcnemar(Paired(n=max(n, 1), both=0, plain_only=plain_wins, other_only=other_wins))
