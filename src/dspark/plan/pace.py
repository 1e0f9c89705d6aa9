"""Pace: what a token of each running request is worth now, by its floor, its priority and the engine's objective.
It must never see a token or a draft, only how many were emitted and when.

A floor is kept by a debt: it grows with the time that passes and falls with what is emitted, and the more is owed, the
more a token of the request is worth to the plan (a virtual queue for each promise, as in drift plus penalty; Neely,
Stochastic Network Optimization, 2010, sections 4.3 and 7.2: the plan maximises weighted tokens a second). What is left
over goes where it brings most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dspark.config import OBJECTIVES

MARGIN = 1.1
"""Of a floor, that is aimed at: what drafts bring scatters, and no second makes good for another."""
AHEAD = 0.05
"""Seconds of a floor that a request should be ahead of it: from there on its tokens are worth more."""
PATIENCE = 0.05
"""Seconds of a floor, behind that, for each of which tokens are worth e times as much: a request that cannot draft can
only be helped by shorter steps, to the others' loss, and that must be reached within a fraction of a second."""
MOST_CREDIT, MOST_DEBT = 0.1, 2.0
"""Seconds of a floor, ahead or owed: an earlier rush excuses no later stall, and a floor that cannot be kept must not
claim the machine for good."""
CLASS_WEIGHT = 4.0
"""What a token is worth against one of the next class of priority."""
LARGEST_WEIGHT = 64.0
SLOW_WEIGHT = 4.0
"""How much more or less than usual a token is worth under `latency` at most."""
RECENT_RATE = 0.1
FIRST_TOKENS, FIRST_PACKED = 1.0, 1.0


@dataclass(kw_only=True)
class _Row:
    """`debt` in tokens, negative: ahead; as of time `told` (None before the first token). `tokens`, `packed`: emitted
    and packed of a step, lately."""

    floor: float | None
    priority: int
    debt: float = 0.0
    told: float | None = None
    tokens: float = FIRST_TOKENS
    packed: float = FIRST_PACKED

    def owed(self, now: float) -> float:
        if self.floor is None or self.told is None:
            return 0.0
        aim = self.floor * MARGIN
        return min(self.floor * MOST_DEBT, max(-self.floor * MOST_CREDIT, self.debt + aim * (now - self.told)))


@dataclass(kw_only=True)
class Pace:
    """Of all requests in the engine. `objective` "throughput": a token of one is worth as much as of another;
    "latency": the mean over requests of the seconds a token should be small, so that a token of a request that gets e a
    step is worth 1 / e^2 (the slope of 1 / e). Times in seconds, of any one clock."""

    objective: str = "throughput"
    rows: dict[int, _Row] = field(default_factory=dict)
    num_floors: int = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective={self.objective!r} is not known: choose one of {', '.join(OBJECTIVES)}")

    def begin(self, seq_id: int, *, floor: float | None = None, priority: int = 0) -> None:
        """A request comes in. `floor`: tokens a second from its first token on. A smaller `priority` is more urgent."""
        self.rows[seq_id] = _Row(floor=floor, priority=priority)
        self.num_floors += floor is not None

    def emitted(self, seq_id: int, count: int, *, packed: int, now: float) -> None:
        """A step gave it `count` tokens for `packed` rows of the pass."""
        row = self.rows[seq_id]
        row.tokens += RECENT_RATE * (count - row.tokens)
        row.packed += RECENT_RATE * (packed - row.packed)
        if row.floor is not None:
            # The first token starts the clock and pays for nothing.
            owed = 0.0 if row.told is None else row.owed(now) - count
            row.debt, row.told = max(owed, -row.floor * MOST_CREDIT), now

    def forget(self, seq_id: int) -> None:
        """The request has ended."""
        if (row := self.rows.pop(seq_id, None)) is not None:
            self.num_floors -= row.floor is not None

    def has_claims(self, seq_ids: Sequence[int]) -> bool:
        """Whether there are floors, or some of these are more urgent than others."""
        return self.num_floors > 0 or len({self.rows[seq_id].priority for seq_id in seq_ids}) > 1

    def weights(self, seq_ids: Sequence[int], now: float) -> list[float] | None:
        """What a token of each is worth; None where all are worth the same."""
        if self.objective == "throughput" and not self.has_claims(seq_ids):
            return None
        rows = [self.rows[seq_id] for seq_id in seq_ids]
        first = min((row.priority for row in rows), default=0)
        weights = [CLASS_WEIGHT ** max(-3, first - row.priority) for row in rows]
        for i, row in enumerate(rows):
            if row.floor is not None:
                behind = max(0.0, row.owed(now) / row.floor + AHEAD)
                weights[i] *= math.exp(min(behind / PATIENCE, math.log(LARGEST_WEIGHT)))
        if self.objective == "latency" and rows:
            usual = sum(row.tokens for row in rows) / len(rows)
            for i, row in enumerate(rows):
                weights[i] *= min(SLOW_WEIGHT, max(1 / SLOW_WEIGHT, (usual / row.tokens) ** 2))
        return [min(weight, LARGEST_WEIGHT) for weight in weights]

    def usual(self, seq_id: int) -> tuple[float, float]:
        """(tokens, packed rows) of one of its steps, lately."""
        row = self.rows[seq_id]
        return row.tokens, row.packed

    def seconds_left(self, seq_ids: Sequence[int], now: float) -> float:
        """What a step with these requests may take before one of them falls behind its floor; inf without floors."""
        left = float("inf")
        if self.num_floors:
            for seq_id in seq_ids:
                row = self.rows[seq_id]
                if row.floor is not None and row.told is not None:
                    left = min(left, max(0.0, row.tokens - row.owed(now)) / (row.floor * MARGIN))
        return left
