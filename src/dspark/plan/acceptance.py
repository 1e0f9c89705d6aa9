"""AcceptanceModel: how likely each draft is to be accepted, learned while serving.
It must never see a token, learn from a draft that was not verified, or let a later claim change an earlier answer.

Per drafter a logistic regression, twice: *sighted* knows the drafter's own claim of a position, *blind* is asked before
anything is drafted. Both add offsets for the position, for the kind of text the answer is at, for the class of the
prompt and for the request, each learned on what the coarser ones leave over and drawn back to 0, so that a new request
starts as its class and a new class as all traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import Any

from dspark.plan import recent
from dspark.plan import values as read

NUM_BUCKETS = 4
"""Positions 0, 1, 2 and all further ones have offsets of their own."""
LAST = NUM_BUCKETS - 1
LEAST, MOST = 0.002, 0.998
TINY = 1e-9
LARGEST = 500.0
RATE = 0.1
"""Step of AdaGrad (Duchi et al. 2011) for what all requests share."""
CLASS_RATE = 0.25
FIRST_SQUARES = 0.25
"""Sum of squared gradients before the first one: what is known at the start is not thrown over by one verdict."""
CLASS_PULL = 0.05
SIGHTED_ROW_RATE, BLIND_ROW_RATE = 0.1, 0.25
ROW_PULL = 0.05
IDLE_PULL = 0.1
"""Of a request's own offsets for each step in which nothing of it was verified: they grow old."""
LARGEST_OFFSET = 1e6
"""Of a weight or an offset, far beyond what is ever learned."""


def logit(probability: float) -> float:
    """log(p / (1 - p)), p kept away from 0 and 1."""
    clipped = LEAST if probability < LEAST else MOST if probability > MOST else probability
    return log(clipped / (1 - clipped))


def logistic(score: float) -> float:
    """1 / (1 + exp(-score)); 0 where exp would overflow."""
    return 1 / (1 + exp(-score)) if score > -LARGEST else 0.0


@dataclass
class _Offsets:
    """One number for each bucket of positions, with the squared gradients that it has seen."""

    values: list[float] = field(default_factory=lambda: [0.0] * NUM_BUCKETS)
    squares: list[float] = field(default_factory=lambda: [FIRST_SQUARES] * NUM_BUCKETS)

    def move(self, bucket: int, gradient: float, *, rate: float, pull: float = 0.0) -> None:
        """By AdaGrad; `pull`: of its own size towards 0 (a ridge penalty)."""
        squares = self.squares[bucket] = self.squares[bucket] + gradient * gradient
        self.values[bucket] += rate / sqrt(squares) * (gradient - pull * self.values[bucket])


@dataclass
class _Regression:
    """What all requests share of one drafter: the weights of claim and surprise, offsets by position, by kind of text,
    and by class."""

    weights: list[float]
    squares: list[float] = field(default_factory=lambda: [FIRST_SQUARES, FIRST_SQUARES])
    positions: _Offsets = field(default_factory=_Offsets)
    kinds: dict[str, _Offsets] = field(default_factory=dict)
    classes: dict[str, _Offsets] = field(default_factory=dict)

    def bases(self, request: _Request, of_row: float, surprise: float) -> list[float]:
        """By bucket, the score of a claim of one half."""
        shift = of_row + self.weights[1] * surprise
        bases = [position + shift for position in self.positions.values]
        if (of_kind := self.kinds.get(request.text_kind)) is not None:
            bases = [base + offset for base, offset in zip(bases, of_kind.values)]
        if (of_class := self.classes.get(request.prompt_class)) is not None:
            bases = [base + offset for base, offset in zip(bases, of_class.values)]
        return bases

    def learn(
        self, claim: float, surprise: float, bucket: int, request: _Request, *, of_row: float, held: float
    ) -> float:
        """Each part by the error of what is said with it but without the finer ones: claim and position, kind of text,
        class, surprise, request. Returns the error of all together. `claim` as a logit, 0 where there is none.

        Were the surprise of the last draft to come before the class, it would explain a hard class away, and the next
        request of that class, which has no last draft yet, would start as if nothing were known.
        """
        weights = self.weights
        score = self.positions.values[bucket] + weights[0] * claim
        error = held - logistic(score)
        self._weigh(0, error * claim)
        self.positions.move(bucket, error, rate=RATE)
        for found, key in ((self.kinds, request.text_kind), (self.classes, request.prompt_class)):
            offsets = recent.use(found, key, _Offsets)
            score += offsets.values[bucket]
            offsets.move(bucket, held - logistic(score), rate=CLASS_RATE, pull=CLASS_PULL)
        score += weights[1] * surprise
        self._weigh(1, (held - logistic(score)) * surprise)
        return held - logistic(score + of_row)

    def _weigh(self, i: int, gradient: float) -> None:
        squares = self.squares[i] = self.squares[i] + gradient * gradient
        self.weights[i] += RATE * gradient / sqrt(squares)


@dataclass
class _Row:
    """Of one request and drafter: its offsets for either regression, and by how much its last draft surprised."""

    sighted: float = 0.0
    blind: float = 0.0
    surprise: float = 0.0


@dataclass
class _Request:
    prompt_class: str = ""
    text_kind: str = ""
    rows: dict[str, _Row] = field(default_factory=dict)


class AcceptanceModel:
    """Conditional acceptance by drafter, class, request, position and claim.

    `claims` are survivals as in types.Draft: falling, each known before its token was drawn. A claim is believed at
    first (weight 1, offsets 0); without one the first guess is `first_guess`.
    """

    def __init__(self, *, first_guess: float = 0.6) -> None:
        self.first_guess = first_guess
        self.sighted: dict[str, _Regression] = {}
        self.blind: dict[str, _Regression] = {}
        self.requests: dict[int, _Request] = {}

    def begin(self, seq_id: int, prompt_class: str) -> None:
        """A request of that class; those that are never begun share the class ""."""
        self.requests[seq_id] = _Request(prompt_class)

    def read(self, seq_id: int, text_kind: str) -> None:
        """What the request's answer looks like now (a name), before it drafts."""
        if (request := self.requests.get(seq_id)) is not None:
            request.text_kind = text_kind

    def forget(self, seq_id: int) -> None:
        """The request has ended; what it taught stays."""
        self.requests.pop(seq_id, None)

    def survival(self, seq_id: int, source: str, claims: Sequence[float]) -> list[float]:
        """Probability that drafts 0..j are all accepted, for each j of a draft with these claims."""
        if not claims:
            return []
        request = self.requests.get(seq_id) or _Request()
        row = request.rows.get(source) or _Row()
        regression = self._sighted(source)
        bases = regression.bases(request, row.sighted, row.surprise)
        weight = regression.weights[0]
        found, alive, before = [], 1.0, 1.0
        for j, claim in enumerate(claims):
            score = weight * logit(claim / before if before > 0 else 0.0) + bases[j if j < LAST else LAST]
            alive *= logistic(score)
            before = claim
            found.append(alive)
        return found

    def judge(self, seq_id: int, source: str) -> Callable[[int, float], float]:
        """judge(j, chance) -> what draft j is worth of which the drafter itself says `chance`, where those before it
        hold: `survival` step by step, while a draft grows."""
        request = self.requests.get(seq_id) or _Request()
        row = request.rows.get(source) or _Row()
        regression = self._sighted(source)
        bases, weight = regression.bases(request, row.sighted, row.surprise), regression.weights[0]
        return lambda j, chance: logistic(weight * logit(chance) + bases[j if j < LAST else LAST])

    def foresee(self, seq_id: int, source: str, num_tokens: int) -> list[float]:
        """The same for a draft of that many tokens which is not there yet."""
        request = self.requests.get(seq_id) or _Request()
        row = request.rows.get(source) or _Row()
        bases = self._blind(source).bases(request, row.blind, row.surprise)
        chances = [logistic(base) for base in bases]
        found, alive = [], 1.0
        for j in range(num_tokens):
            alive *= chances[j if j < LAST else LAST]
            found.append(alive)
        return found

    def rest(self, seq_id: int) -> None:
        """A step of the request in which nothing was verified."""
        if (request := self.requests.get(seq_id)) is not None:
            for row in request.rows.values():
                row.sighted *= 1 - IDLE_PULL
                row.blind *= 1 - IDLE_PULL
                row.surprise *= 1 - IDLE_PULL

    def update(
        self, seq_id: int, source: str, claims: Sequence[float], *, num_verified: int, num_accepted: int
    ) -> None:
        """Learn from one verdict: drafts 0..num_accepted - 1 held, the next verified one (if any) did not."""
        looked_at = claims[: min(num_verified, num_accepted + 1)]
        if not looked_at:
            return
        request = self.requests.setdefault(seq_id, _Request())
        row = request.rows.setdefault(source, _Row())
        sighted, blind = self._sighted(source), self._blind(source)
        before, surprises = 1.0, 0.0
        for j, claim in enumerate(looked_at):
            held, bucket = float(j < num_accepted), j if j < LAST else LAST
            stated = logit(claim / before if before > 0 else 0.0)
            error = sighted.learn(stated, row.surprise, bucket, request, of_row=row.sighted, held=held)
            row.sighted = row.sighted * (1 - ROW_PULL) + SIGHTED_ROW_RATE * error
            error = blind.learn(0.0, row.surprise, bucket, request, of_row=row.blind, held=held)
            row.blind = row.blind * (1 - ROW_PULL) + BLIND_ROW_RATE * error
            before, surprises = claim, surprises + error
        row.surprise = surprises / len(looked_at)

    # -- saved and loaded

    def as_dict(self) -> dict[str, Any]:
        """What all requests share, as JSON values."""

        def plain(regressions: Mapping[str, _Regression]) -> dict[str, Any]:
            return {
                source: {
                    "weights": [found.weights, found.squares],
                    "positions": [found.positions.values, found.positions.squares],
                    "kinds": {name: [row.values, row.squares] for name, row in found.kinds.items()},
                    "classes": {name: [row.values, row.squares] for name, row in found.classes.items()},
                }
                for source, found in regressions.items()
            }

        return {"first_guess": self.first_guess, "sighted": plain(self.sighted), "blind": plain(self.blind)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AcceptanceModel:
        """Raises ValueError for what `as_dict` did not make."""
        try:
            model = cls(first_guess=read.number(values, "first_guess", least=TINY, most=1 - TINY))
            for kind, regressions in (("sighted", model.sighted), ("blind", model.blind)):
                listed = read.table(values, kind)
                regressions.update({source: _regression(read.table(listed, source)) for source in listed})
        except ValueError as error:
            raise ValueError(f"these are not the values of an acceptance model: {error}") from None
        return model

    # -- inside

    def _sighted(self, source: str) -> _Regression:
        if source not in self.sighted:
            self.sighted[source] = _Regression(weights=[1.0, 0.0])
        return self.sighted[source]

    def _blind(self, source: str) -> _Regression:
        if source not in self.blind:
            first = _Offsets(values=[logit(self.first_guess)] * NUM_BUCKETS)
            self.blind[source] = _Regression(weights=[0.0, 0.0], positions=first)
        return self.blind[source]


def _regression(values: Mapping[str, Any]) -> _Regression:
    weights, squares = _pair(values, "weights", count=2)
    kinds, classes = read.table(values, "kinds"), read.table(values, "classes")
    return _Regression(
        weights=weights,
        squares=squares,
        positions=_offsets(values, "positions"),
        kinds=recent.check({name: _offsets(kinds, name) for name in kinds}, "kinds of text"),
        classes=recent.check({name: _offsets(classes, name) for name in classes}, "classes"),
    )


def _offsets(holder: Mapping[str, Any], key: str) -> _Offsets:
    return _Offsets(*_pair(holder, key, count=NUM_BUCKETS))


def _pair(holder: Mapping[str, Any], key: str, *, count: int) -> tuple[list[float], list[float]]:
    """Values, and the squares of their gradients, which start at FIRST_SQUARES and only grow."""
    both = read.sequence(holder, key)
    if len(both) != 2:
        raise ValueError(f"{key} holds {len(both)} lists, not values and squares")
    return (
        read.as_numbers(key, both[0], count=count, least=-LARGEST_OFFSET, most=LARGEST_OFFSET),
        read.as_numbers(key, both[1], count=count, least=FIRST_SQUARES),
    )
