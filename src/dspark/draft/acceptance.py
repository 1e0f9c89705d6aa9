"""AcceptanceTable: how often guesses of each kind came true, learned online.
It must never learn about a guess whose own past was wrong, or let old traffic outweigh the present for ever."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

POSITION_BUCKETS = (0, 1, 2, 3, 4, 4, 6, 6, 8, 8, 8, 8, 12, 12, 12, 12, 16)
"""Draft position -> its bucket; later positions share the last."""

MATCH_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 6, 8, 8, 8, 8, 12, 12, 12, 12, 16)
"""Match length -> its bucket; longer matches share the last."""


def bucket(value: int, buckets: Sequence[int]) -> int:
    """The bucket of a non-negative count."""
    return buckets[value] if value < len(buckets) else buckets[-1]


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A deterministic draft that waits for the truth.

    `start`: length of the sequence when it was made. `kinds[j]`: what was known about token j, the key of its counts.
    """

    start: int
    tokens: Sequence[int]
    kinds: Sequence[Hashable]


class AcceptanceTable:
    """Conditional acceptance P(token j right | tokens before it right) by kind of guess and draft position.

    An estimate shrinks from a prior to the rate of the kind at all positions, and from there to that of the kind at
    this position, as if the less specific rate had been seen `prior_weight` times. Counts are halved once a cell has
    seen `memory` guesses, so that the table follows the traffic. Two such counts a cell; as many cells as callers have
    kinds times the position buckets.
    """

    def __init__(self, *, prior_weight: float = 10.0, memory: float = 1000.0) -> None:
        self.prior_weight = prior_weight
        self.memory = memory
        self._counts: dict[Hashable, list[float]] = {}

    def estimate(self, kind: Hashable, position: int, prior: float) -> float:
        """Conditional acceptance of a guess of `kind` at draft position `position`; inside (0, 1) when `prior` is."""
        weight, value = self.prior_weight, prior
        for cell in (kind, (kind, bucket(position, POSITION_BUCKETS))):
            counts = self._counts.get(cell)
            if counts is not None:
                value = (weight * value + counts[0]) / (weight + counts[1])
        return value

    def survival(self, kinds: Sequence[Hashable], priors: Sequence[float]) -> list[float]:
        """Running products of the estimates: entry j is the chance that guesses 0..j all come true."""
        values, alive = [], 1.0
        for position, (kind, prior) in enumerate(zip(kinds, priors, strict=True)):
            alive *= self.estimate(kind, position, prior)
            values.append(alive)
        return values

    def settle(self, guess: Guess, tokens: Sequence[int]) -> int:
        """Count a guess against the sequence as it went on; returns how many guessed tokens came true.

        What the target wrote says whether a guess would have been accepted even where the guess was not verified: a
        deterministic draft token is accepted with the probability p that the target's own draw gives it. The first
        wrong token ends the lesson, as the rest was guessed for a text that never came.
        """
        num_known = min(len(guess.tokens), len(tokens) - guess.start)
        for position in range(num_known):
            right = guess.tokens[position] == tokens[guess.start + position]
            kind = guess.kinds[position]
            for cell in (kind, (kind, bucket(position, POSITION_BUCKETS))):
                self._count(cell, right)
            if not right:
                return position
        return max(0, num_known)

    def _count(self, cell: Hashable, right: bool) -> None:
        counts = self._counts.setdefault(cell, [0.0, 0.0])
        counts[0] += right
        counts[1] += 1.0
        if counts[1] >= self.memory:
            counts[0] *= 0.5
            counts[1] *= 0.5
