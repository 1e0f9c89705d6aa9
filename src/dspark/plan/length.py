"""LengthPolicy: how many tokens a row may draft in this step, decided before drafting, and how many of them to verify.
It must never see a token of the draft it decides about; what it knows comes from earlier steps and from survivals that
were known before their token was drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dspark.plan.cost import Costs
from dspark.plan.joint import draft_lengths

PROBE_EVERY = 16
PROBE_SHARE = 0.005
"""Of the time of a row without drafts, what may go into trying it again: it must stay within a percent of plain."""
FIRST_WORTH = 0.5
"""Tokens that a step with drafts is taken to bring a request before anything is known, and by which a new one is
thought better than others lately were: it must be tried to be known."""
WORTH_RATE, TYPICAL_RATE = 0.1, 0.005
FREE_ASKING = 0.003
"""Of a plain step: drafters that cost no more are always asked. What then is verified the budget weighs."""
EMPTIER = 0.75
"""Of the rows among which a row began to rest: with as few or fewer it is tried anew."""
FIRST_HEURISTIC = 5
MOST_CERTAIN = 0.9


@dataclass(frozen=True, kw_only=True)
class Features:
    """What is known of a row before drafting. `num_rows`: rows that decode in this step. `step`: target passes this row
    has had. `room`: drafts that could be emitted. `weight`: what a token of the row is worth (plan/pace)."""

    seq_id: int
    num_rows: int
    step: int
    room: int
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Limit:
    """At most `max_tokens` drafts; an autoregressive drafter stops a row once its survival falls below `floor`. Of what
    is drafted at least `least` are verified: 1 is how a row is tried again of which nothing is expected. `thrifty`: the
    drafter may leave the row without a draft where that does not pay."""

    max_tokens: int
    floor: float = 0.0
    least: int = 0
    thrifty: bool = False


NO_DRAFTS = Limit(max_tokens=0)
"""A row that is not even asked: nothing is learned of it in this step."""


class LengthPolicy(Protocol):
    """The seam between planning and the loop. Give your own to LLM.add_policy."""

    def begin(self, rows: Sequence[Features]) -> None:
        """A step comes in which these rows may draft under this policy; `limit` is asked for each of them next."""
        ...

    def limit(self, features: Features) -> Limit:
        """Decided before drafting, from earlier steps only."""
        ...

    def keep(self, survival: Sequence[float]) -> int | None:
        """How many drafts to verify, given their survivals; None leaves that to the budget of all rows (plan/budget).
        Whether draft j is among them must depend on survival[0..j] alone (non-anticipation)."""
        ...

    def update(self, seq_id: int, *, num_verified: int, num_accepted: int) -> None:
        """The end of a step in which the row was asked for drafts, though none may have been verified."""
        ...

    def forget(self, seq_id: int) -> None:
        """The row has ended."""
        ...


class FixedLength:
    """Always the same number of tokens, all of them verified."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def begin(self, rows: Sequence[Features]) -> None:
        return None

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
    (`draft_cost`: seconds of one of its passes by rows) drafts what plan/joint finds best for all rows together, for
    one row the k that maximises (1 + S_1 + ... + S_k) over C(1 + k) + k d(1): Leviathan et al. 2023, equation 1, with S
    by position. It stops early where the next token is expected to bring less than its pass costs.

    A drafter without `draft_cost` may draft all it has: blocks are chosen in draft/portfolio, and a lookup costs no
    more than `asking` seconds a row. A row whose drafts lately brought less than that (accepted tokens less what
    verifying them cost) rests, and is asked again every PROBE_EVERY steps, unless asking is next to nothing beside a
    step (FREE_ASKING). What is verified the budget decides. A row of which nothing is verified is tried with one draft
    after PROBE_EVERY steps, or as many more as make that PROBE_SHARE of their time.

    `place`: seconds that one more draft adds to the target's pass.
    `idle`: steps since a draft of the row was last verified. `worth`: tokens that drafts brought the row a step.
    `rested_among`: rows of the step in which it was found to be too little.
    """

    max_tokens: int
    target_cost: Costs
    foresee: Callable[[int, int], Sequence[float]]
    draft_cost: Costs | None = None
    asking: Callable[[], float] = lambda: 0.0
    idle: dict[int, int] = field(default_factory=dict)
    worth: dict[int, float] = field(default_factory=dict)
    rests: dict[int, int] = field(default_factory=dict)
    rested_among: dict[int, int] = field(default_factory=dict)
    typical: float = 0.0
    num_rows: int = 1
    plain: float = 1.0
    probe: float = 0.0
    least_worth: float = 0.0
    lengths: dict[int, int] = field(default_factory=dict)
    rate: float = 0.0
    place: float = 0.0

    def __post_init__(self) -> None:
        self.usual = Limit(max_tokens=self.max_tokens, thrifty=True)
        self.tried_again = Limit(max_tokens=self.max_tokens, least=1, thrifty=True)

    def begin(self, rows: Sequence[Features]) -> None:
        """What is the same for all rows is computed here, once: seconds of a `plain` step and of a `probe`, and what
        drafts must bring a row to be asked for (`least_worth`)."""
        num_rows = self.num_rows = rows[0].num_rows
        self.plain = self.target_cost.seconds(num_rows)
        self.probe = self.target_cost.seconds(num_rows + 1) - self.plain
        self.least_worth = num_rows * self.asking() / self.plain
        if self.draft_cost is not None:
            self.probe += self.draft_cost.seconds(num_rows)
            foreseen = [self.foresee(row.seq_id, min(self.max_tokens, row.room)) for row in rows]
            others = num_rows - len(rows)  # under other policies
            weights = [row.weight for row in rows]
            plan = draft_lengths(foreseen, self.target_cost, self.draft_cost, other_rows=others, weights=weights)
            self.lengths = {row.seq_id: length for row, length in zip(rows, plan.lengths)}
            self.rate = plan.rate
            # Over a whole draft, as the curve has steps.
            self.place = (self.target_cost.seconds(num_rows + self.max_tokens) - self.plain) / max(1, self.max_tokens)

    def limit(self, features: Features) -> Limit:
        rows, seq_id, idle = self.num_rows, features.seq_id, self.idle.get(features.seq_id, 0)
        if self.draft_cost is None:
            if self._rests(seq_id, features.weight):
                return NO_DRAFTS
            return self.tried_again if self._is_due(idle) else self.usual
        draft, best = self.draft_cost.seconds(rows), self.lengths[seq_id]
        if best == 0:
            least = int(self._is_due(idle))
            return Limit(max_tokens=least, least=least, thrifty=True)
        # One more draft costs its share of a pass and its place in the target's, seconds worth `rate` tokens each, and
        # brings at most one token. A row that is surer than usual may go beyond its best length: by two among others,
        # as all wait for its passes, alone by as much again, not further, as little is known of such places yet.
        floor = min(MOST_CERTAIN, self.rate * (draft / rows + self.place) / features.weight)
        beyond = max(2, best) if rows == 1 else 2
        return Limit(max_tokens=min(self.max_tokens, best + beyond), floor=floor, thrifty=True)

    def _rests(self, seq_id: int, weight: float) -> bool:
        worth = self.worth.get(seq_id)
        if worth is None:
            worth = self.worth[seq_id] = max(0.0, self.typical) + FIRST_WORTH
        if self.num_rows <= EMPTIER * self.rested_among.get(seq_id, 0):
            # What was not worth its place among many may be among fewer.
            worth = self.worth[seq_id] = max(worth, FIRST_WORTH)
        num_rests = self.rests.get(seq_id, 0) + 1
        poor = self.least_worth > FREE_ASKING and worth * weight < self.least_worth
        rests = poor and num_rests < PROBE_EVERY
        self.rests[seq_id] = num_rests if rests else 0
        if poor:
            self.rested_among.setdefault(seq_id, self.num_rows)
        else:
            self.rested_among.pop(seq_id, None)
        return rests

    def _is_due(self, idle: int) -> bool:
        """Whether a row of which nothing was verified for so long is tried again."""
        return idle >= PROBE_EVERY and idle * self.plain * PROBE_SHARE >= self.probe

    def keep(self, survival: Sequence[float]) -> int | None:
        return None

    def update(self, seq_id: int, *, num_verified: int, num_accepted: int) -> None:
        self.idle[seq_id] = 0 if num_verified else self.idle.get(seq_id, 0) + 1
        if (worth := self.worth.get(seq_id)) is not None:
            rows, spent = self.num_rows, 0.0
            if num_verified:
                # Of a step with about a draft a row: a cliff of the curve is not one row's to pay.
                wide = max(rows, num_verified)
                spent = rows * (self.target_cost.seconds(rows + wide) / self.plain - 1) * num_verified / wide
            self.worth[seq_id] = worth + WORTH_RATE * (num_accepted - spent - worth)
            self.typical += TYPICAL_RATE * (num_accepted - spent - self.typical)

    def forget(self, seq_id: int) -> None:
        for kept in (self.idle, self.worth, self.rests, self.rested_among):
            kept.pop(seq_id, None)


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """What policies are made from. `cost` None: nothing was measured, and there is no adaptive policy."""

    max_tokens: int
    threshold: float
    foresee: Callable[[int, int], Sequence[float]]
    cost: Costs | None = None
    draft_cost: Costs | None = None
    asking: Callable[[], float] = lambda: 0.0


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
            asking=inputs.asking,
        )
    elif not inputs.max_tokens:
        policies["adaptive"] = policies["fixed"]
    return policies
