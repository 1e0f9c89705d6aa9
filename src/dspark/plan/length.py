"""LengthPolicy: how many tokens a row may draft in this step, decided before drafting, and how many of them to verify.
It must never see a token of the draft it decides about; what it knows comes from earlier steps and from survivals that
were known before their token was drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dspark.plan.cost import Costs

PROBE_EVERY = 16
PROBE_SHARE = 0.005
"""Of the time of a row without drafts, what may go into trying it again: it must stay within a percent of plain."""
FIRST_HEURISTIC = 5
MOST_CERTAIN = 0.9


@dataclass(frozen=True, kw_only=True)
class Features:
    """What is known of a row before drafting. `num_rows`: rows that decode in this step. `step`: target passes this row
    has had. `room`: drafts that could be emitted."""

    seq_id: int
    num_rows: int
    step: int
    room: int


@dataclass(frozen=True, kw_only=True)
class Limit:
    """At most `max_tokens` drafts; an autoregressive drafter stops a row once its survival falls below `floor`. Of what
    is drafted at least `least` are verified: 1 is how a row is tried again of which nothing is expected. `thrifty`: the
    drafter may leave the row without a draft where that does not pay."""

    max_tokens: int
    floor: float = 0.0
    least: int = 0
    thrifty: bool = False


class LengthPolicy(Protocol):
    """The seam between planning and the loop. Give your own to LLM.add_policy."""

    def limit(self, features: Features) -> Limit:
        """Decided before drafting, from earlier steps only."""
        ...

    def keep(self, survival: Sequence[float]) -> int | None:
        """How many drafts to verify, given their survivals; None leaves that to the budget of all rows (plan/budget).
        Whether draft j is among them must depend on survival[0..j] alone (non-anticipation)."""
        ...

    def update(self, seq_id: int, *, num_verified: int, num_accepted: int) -> None:
        """The end of a step in which the row was allowed drafts, though none may have been verified."""
        ...

    def forget(self, seq_id: int) -> None:
        """The row has ended."""
        ...


class FixedLength:
    """Always the same number of tokens, all of them verified."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def limit(self, features: Features) -> Limit:
        return Limit(max_tokens=self.num_tokens)

    def keep(self, survival: Sequence[float]) -> int | None:
        return len(survival)

    def update(self, seq_id: int, *, num_verified: int, num_accepted: int) -> None:
        return None

    def forget(self, seq_id: int) -> None:
        return None


class Shadow(FixedLength):
    """Drafts and verifies none of it: at every position of the text stands what would have been drafted there, and the
    text tells how much of it would have held (plan/replay)."""

    def keep(self, survival: Sequence[float]) -> int | None:
        return 0


class ConfidenceLength(FixedLength):
    """Drafts until the chance that all of them are accepted falls below a threshold (DSpark, section 3.2, the static
    rule; the dynamic stop of transformers' assisted generation, there on each token's own probability)."""

    def __init__(self, num_tokens: int, *, threshold: float) -> None:
        super().__init__(num_tokens)
        self.threshold = threshold

    def limit(self, features: Features) -> Limit:
        return Limit(max_tokens=self.num_tokens, floor=self.threshold)

    def keep(self, survival: Sequence[float]) -> int | None:
        return next((j for j, alive in enumerate(survival) if alive < self.threshold), len(survival))


class HeuristicLength(FixedLength):
    """Two tokens more after a draft that was accepted whole, one fewer after any other (the "heuristic" schedule of
    transformers' assisted generation). A row starts at FIRST_HEURISTIC."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.by_row: dict[int, int] = {}

    def limit(self, features: Features) -> Limit:
        return Limit(max_tokens=min(self.num_tokens, self.by_row.get(features.seq_id, FIRST_HEURISTIC)))

    def update(self, seq_id: int, *, num_verified: int, num_accepted: int) -> None:
        if num_verified:
            length = self.by_row.get(seq_id, FIRST_HEURISTIC)
            length += 2 if num_accepted == num_verified else -1
            self.by_row[seq_id] = min(max(1, length), max(1, self.num_tokens))

    def forget(self, seq_id: int) -> None:
        self.by_row.pop(seq_id, None)


@dataclass(kw_only=True)
class AdaptiveLength:
    """The most expected tokens a second.

    `foresee(seq_id, k)` gives the survival of k drafts that are not there yet. A drafter that pays for each token
    (`draft_cost`: seconds of one of its passes by rows) drafts the k that maximises (1 + S_1 + ... + S_k) over
    C(rows (1 + k)) + k d(rows), Leviathan et al. 2023, equation 1, with S by position; it stops early where the next
    token is expected to bring less than its pass costs. A drafter without `draft_cost` may draft all it has: a lookup
    is free, and blocks are chosen in draft/portfolio. What is verified the budget decides. A row of which nothing is
    verified is tried with one draft after PROBE_EVERY steps, or as many more as make that PROBE_SHARE of their time.
    `idle`: steps since a draft of the row was last verified.
    """

    max_tokens: int
    target_cost: Costs
    foresee: Callable[[int, int], Sequence[float]]
    draft_cost: Costs | None = None
    idle: dict[int, int] = field(default_factory=dict)

    def limit(self, features: Features) -> Limit:
        rows, idle = features.num_rows, self.idle.get(features.seq_id, 0)
        draft = 0.0 if self.draft_cost is None else self.draft_cost.seconds(rows)
        least = int(idle >= PROBE_EVERY and self._probe_is_cheap(rows, idle, draft))
        if self.draft_cost is None:
            return Limit(max_tokens=self.max_tokens, least=least, thrifty=True)
        plain = self.target_cost.seconds(rows)
        best_rate, best = rows / plain, 0
        expected = 1.0
        for k, survival in enumerate(self.foresee(features.seq_id, min(self.max_tokens, features.room)), start=1):
            expected += survival
            rate = rows * expected / (self.target_cost.seconds(rows * (1 + k)) + k * draft)
            if rate > best_rate:
                best_rate, best = rate, k
        if best == 0:
            return Limit(max_tokens=least, least=least, thrifty=True)
        # One more draft pass costs `draft` seconds, worth best_rate tokens each; it can bring at most one token a row.
        # A row that is surer than usual may go two beyond its best length.
        floor = min(MOST_CERTAIN, best_rate * draft / rows)
        return Limit(max_tokens=min(self.max_tokens, best + 2), floor=floor, least=least, thrifty=True)

    def _probe_is_cheap(self, rows: int, idle: int, draft: float) -> bool:
        plain = self.target_cost.seconds(rows)
        probe = self.target_cost.seconds(rows + 1) - plain + draft
        return idle * plain * PROBE_SHARE >= probe

    def keep(self, survival: Sequence[float]) -> int | None:
        return None

    def update(self, seq_id: int, *, num_verified: int, num_accepted: int) -> None:
        self.idle[seq_id] = 0 if num_verified else self.idle.get(seq_id, 0) + 1

    def forget(self, seq_id: int) -> None:
        self.idle.pop(seq_id, None)


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """What policies are made from. `cost` None: nothing was measured, and there is no adaptive policy."""

    max_tokens: int
    threshold: float
    foresee: Callable[[int, int], Sequence[float]]
    cost: Costs | None = None
    draft_cost: Costs | None = None


def build_policies(inputs: PolicyInputs) -> dict[str, LengthPolicy]:
    """Every policy by its name in dspark.config.POLICIES; "adaptive" only where costs are known, or nothing is ever
    drafted, so that all are one."""
    policies: dict[str, LengthPolicy] = {
        "fixed": FixedLength(inputs.max_tokens),
        "confidence": ConfidenceLength(inputs.max_tokens, threshold=inputs.threshold),
        "heuristic": HeuristicLength(inputs.max_tokens),
        "shadow": Shadow(inputs.max_tokens),
    }
    if inputs.cost is not None:
        policies["adaptive"] = AdaptiveLength(
            max_tokens=inputs.max_tokens,
            target_cost=inputs.cost,
            foresee=inputs.foresee,
            draft_cost=inputs.draft_cost,
        )
    elif not inputs.max_tokens:
        policies["adaptive"] = policies["fixed"]
    return policies
