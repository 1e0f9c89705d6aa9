"""LengthPolicy: how many tokens a row may draft in this step, decided before anything is drafted.
It must never see a token of the draft it decides about; what it knows comes from earlier steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dspark.plan.cost import CostTable

DECAY = 0.92
PRIOR_WEIGHT = 4.0
FIRST_GUESS = 0.7
PROBE_EVERY = 16


@dataclass(frozen=True, kw_only=True)
class Features:
    """What is known of a row before drafting. `num_rows`: rows that decode in this step. `step`: target passes this row
    has had."""

    seq_id: int
    num_rows: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Limit:
    """At most `max_tokens` drafts; an autoregressive drafter stops a row once its survival falls below `floor`."""

    max_tokens: int
    floor: float = 0.0


class LengthPolicy(Protocol):
    """The seam between planning and the loop."""

    def limit(self, features: Features) -> Limit:
        """Decided before drafting, from earlier steps only."""
        ...

    def update(self, seq_id: int, *, num_verified: int, num_accepted: int) -> None:
        """One verdict of one row."""
        ...

    def forget(self, seq_id: int) -> None:
        """The row has ended."""
        ...


class FixedLength:
    """Always the same number of tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def limit(self, features: Features) -> Limit:
        return Limit(max_tokens=self.num_tokens)

    def update(self, seq_id: int, *, num_verified: int, num_accepted: int) -> None:
        return None

    def forget(self, seq_id: int) -> None:
        return None


class AdaptiveLength:
    """The length with the best expected tokens a second, for drafters that pay for each token they draft.

    With conditional acceptance a (decayed counts of the row, shrunk towards those of all rows), k drafts bring
    1 + a + ... + a^k tokens (Leviathan et al. 2023, equation 1) and cost C(rows (1 + k)) + k d(rows). A row whose best
    k is 0 probes with one token every PROBE_EVERY steps, so that it can come back.
    """

    def __init__(self, max_tokens: int, *, target_cost: CostTable, draft_cost: CostTable) -> None:
        self.max_tokens = max_tokens
        self.target_cost = target_cost
        self.draft_cost = draft_cost
        self.overall = [FIRST_GUESS * PRIOR_WEIGHT, PRIOR_WEIGHT]
        self.by_row: dict[int, list[float]] = {}

    def limit(self, features: Features) -> Limit:
        acceptance = self.acceptance(features.seq_id)
        rows = features.num_rows
        draft = self.draft_cost.seconds(rows)
        best_rate, best = rows / self.target_cost.seconds(rows), 0
        expected = survival = 1.0
        for k in range(1, self.max_tokens + 1):
            survival *= acceptance
            expected += survival
            rate = rows * expected / (self.target_cost.seconds(rows * (1 + k)) + k * draft)
            if rate > best_rate:
                best_rate, best = rate, k
        if best == 0:
            return Limit(max_tokens=1 if features.step % PROBE_EVERY == PROBE_EVERY - 1 else 0)
        # One more draft pass costs `draft` seconds, worth best_rate tokens each; it can bring at most one token a row.
        # A row that is surer than usual may go two beyond its best length.
        return Limit(max_tokens=min(self.max_tokens, best + 2), floor=min(0.9, best_rate * draft / rows))

    def acceptance(self, seq_id: int) -> float:
        """Estimated conditional acceptance of a row's next draft."""
        overall = self.overall[0] / self.overall[1]
        accepted, seen = self.by_row.get(seq_id, (0.0, 0.0))
        return min(0.98, (accepted + PRIOR_WEIGHT * overall) / (seen + PRIOR_WEIGHT))

    def update(self, seq_id: int, *, num_verified: int, num_accepted: int) -> None:
        looked_at = min(num_verified, num_accepted + 1)
        if not looked_at:
            return
        for counts in (self.overall, self.by_row.setdefault(seq_id, [0.0, 0.0])):
            decay = DECAY if counts is not self.overall else 0.995
            counts[0] = counts[0] * decay + num_accepted
            counts[1] = counts[1] * decay + looked_at

    def forget(self, seq_id: int) -> None:
        self.by_row.pop(seq_id, None)
