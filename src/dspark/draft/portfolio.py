"""Portfolio: for each row and step the drafter that is expected to bring most: a head, a lookup, or none.
It must never choose by what a drafter has drawn, only by what was known before.

All choices are made from the history of the row and of the traffic, and from lookups, which are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dspark.draft.base import Drafter, DraftRow, Taps
from dspark.types import Draft, Verdict

PROBE_EVERY = 16
PROBE_SHARE = 0.005
"""Of the time of a row whose head rests, what may go into asking it again."""


NUM_ROUNDS = 2
LIKELY = 0.3
"""A lookup's draft whose first token is less likely than that is as good as none."""


class Costs(Protocol):
    """Seconds, of which only ratios matter. `others`: rows that decode in this step and are not asked for drafts."""

    others: int

    def target(self, rows: float) -> float:
        """A target pass of that many packed rows."""
        ...

    def head(self, greedy: int, sampled: int) -> float:
        """A draft pass of the head, for that many rows of either kind."""
        ...


class Portfolio:
    """A head that pays for its drafts, beside a lookup drafter that does not (or None).

    A step gets the drafts that promise most tokens a second of all its rows together. With E accepted and V verified
    drafts a row, as the head brought in earlier steps of the row and of its like, n rows of which the head is asked for
    c promise n + sum of E + sum of S for C(n + sum of V + sum of k) + h(c) seconds: S and k are expectation and length
    of the lookup's draft, as judged, as far as a token is worth its place, for the rows that go without the head.
    Rows are taken in the order of what the head brings more than the lookup, as long as the rate rises. Where both
    drafted and begin alike, the lookup's draft may take the head's place. A row whose head rests is asked again after
    PROBE_EVERY steps, or as many more as make that PROBE_SHARE of its part of their time.
    """

    def __init__(
        self,
        head: Drafter,
        *,
        costs: Costs | None,
        expected: Callable[[int, str], tuple[float, float]] = lambda seq_id, kind: (0.0, 0.0),
        lookup: Drafter | None = None,
        survival: Callable[[int, str, Sequence[float]], Sequence[float]] = lambda seq_id, source, claims: claims,
    ) -> None:
        """`costs` None: drafts are free, for fixed lengths. `expected(seq_id, kind)`: drafts of the head that will be
        accepted, and verified, in the row's next step, "alone" or "beside" a likely draft of the lookup's.
        `survival(seq_id, source, claims)`: what these claims are worth, by what drafts of that source have turned out
        to be."""
        self.head = head
        self.lookup = lookup
        self.costs = costs
        self.expected = expected
        self.survival = survival
        self.name = "auto" if lookup is not None else head.name
        beside = "" if lookup is None else lookup.name
        self.confirmed, self.contested = f"{beside}+{head.name}", f"{head.name}>{beside}"
        self.kinds = {head.name: "alone", self.contested: "beside", self.confirmed: "beside"}
        """Sources of drafts that the head was asked for: where the lookup had none that is likely, the head's own in
        the place of such a one, and the lookup's that begin as the head's. By its name a block is judged, so that must
        not tell what was drawn."""
        self.taps = head.taps
        self.num_places = head.num_places
        self.idle: dict[int, int] = {}
        """Steps since the head was last asked for a row."""

    def propose(
        self,
        rows: Sequence[DraftRow],
        limits: Sequence[int],
        *,
        floors: Sequence[float] | None = None,
    ) -> list[Draft]:
        drafts = [Draft(source=self.name) for _ in rows]
        if self.lookup is not None:
            drafts = self.lookup.propose(rows, limits, floors=floors)
        judged = [self.survival(row.seq_id, draft.source, draft.survival) for row, draft in zip(rows, drafts)]
        chosen = self._rows_to_ask(rows, limits, judged)
        if chosen:
            proposals = self.head.propose([rows[i] for i in chosen], [limits[i] for i in chosen])
            for i, proposal in zip(chosen, proposals):
                if proposal.tokens:
                    own = replace(proposal, source=self.contested) if _kind(judged[i]) == "beside" else proposal
                    drafts[i] = self._better(rows[i].seq_id, own, drafts[i])
        return drafts

    def observe(self, rows: Sequence[DraftRow], verdicts: Sequence[Verdict | None], taps: Taps | None = None) -> None:
        self.head.observe(rows, verdicts, taps)
        if self.lookup is not None:
            self.lookup.observe(rows, verdicts)

    def forget(self, seq_id: int) -> None:
        self.idle.pop(seq_id, None)
        self.head.forget(seq_id)
        if self.lookup is not None:
            self.lookup.forget(seq_id)

    def _rows_to_ask(
        self, rows: Sequence[DraftRow], limits: Sequence[int], judged: Sequence[Sequence[float]]
    ) -> list[int]:
        """Indices of the rows for which the head is asked. `judged`: survivals of the lookup's drafts."""
        costs = self.costs
        if costs is None:
            return [i for i, limit in enumerate(limits) if limit > 0]
        weights = [row.weight for row in rows]
        lookups, price = self._lookup_plan(judged, weights, costs)
        prospects = [
            self._prospect(i, row, _kind(judged[i]), *lookups[i])
            for i, (row, limit) in enumerate(zip(rows, limits))
            if limit > 0
        ]
        asked = {p.index for p in prospects if not rows[p.index].thrifty}
        num_forced = len(asked)
        order = sorted(prospects, key=lambda p: (p.index not in asked, -p.gain(price)))
        num_rows = len(rows) + costs.others
        tokens = sum(weights) + costs.others + sum(expected for expected, _ in lookups)
        packed = num_rows + float(sum(length for _, length in lookups))
        counts, best_rate, taken = [0, 0], tokens / costs.target(packed), num_forced
        for number, prospect in enumerate(order, start=1):
            tokens += prospect.accepted - prospect.lookup
            packed += prospect.verified - prospect.length
            counts[prospect.sampled] += 1
            rate = tokens / (costs.target(packed) + costs.head(*counts))
            if number <= num_forced or rate > best_rate:
                best_rate, taken = rate, number
        asked |= {prospect.index for prospect in order[:taken]}
        for prospect in order:
            if prospect.index not in asked and self._probe_is_due(rows[prospect.index], prospect, num_rows, asked):
                asked.add(prospect.index)
        for prospect in prospects:
            seq_id = rows[prospect.index].seq_id
            self.idle[seq_id] = 0 if prospect.index in asked else self.idle.get(seq_id, 0) + 1
        return sorted(asked)

    def _prospect(self, index: int, row: DraftRow, kind: str, lookup: float, length: int) -> _Prospect:
        accepted, verified = self.expected(row.seq_id, kind)
        return _Prospect(index, row.weight * accepted, verified, lookup, length, sampled=not _is_greedy(row))

    def _lookup_plan(
        self, judged: Sequence[Sequence[float]], weights: Sequence[float], costs: Costs
    ) -> tuple[list[tuple[float, int]], float]:
        """(expected tokens by weight, length) of each row's best prefix of the lookup's draft, and the tokens that a
        place in the pass must bring: its part of the seconds, at the step's own rate."""
        num_rows, base = len(judged) + costs.others, sum(weights) + costs.others
        judged = [[weight * alive for alive in row] for weight, row in zip(weights, judged)]
        lengths = [len(row) for row in judged]
        plan: list[tuple[float, int]] = []
        price = 0.0
        for _ in range(NUM_ROUNDS):
            packed = num_rows + max(1, sum(lengths))
            plain = costs.target(num_rows)
            seconds = costs.target(num_rows + sum(lengths))
            expected = base + sum(sum(row[:k]) for row, k in zip(judged, lengths))
            rate = max(expected / seconds, base / plain)
            price = rate * (costs.target(packed) - plain) / (packed - num_rows)
            lengths = [sum(alive > price for alive in row) for row in judged]
            plan = [(sum(row[:k]), k) for row, k in zip(judged, lengths)]
        return plan, price

    def _probe_is_due(self, row: DraftRow, prospect: _Prospect, num_rows: int, asked: set[int]) -> bool:
        """Whether to ask the head for a row again although it is not expected to pay: worth a step only where the row
        would else go without drafts."""
        assert self.costs is not None
        idle = self.idle.get(row.seq_id, 0) + 1
        if idle < PROBE_EVERY or prospect.accepted <= prospect.lookup:
            return False
        count = len(asked)
        pair = (0, count + 1) if prospect.sampled else (count + 1, 0)
        before = (0, count) if prospect.sampled else (count, 0)
        price = self.costs.head(*pair) - (self.costs.head(*before) if count else 0.0)
        return idle * self.costs.target(num_rows) / num_rows * PROBE_SHARE >= price

    def _better(self, seq_id: int, own: Draft, found: Draft) -> Draft:
        """The head's draft, or the lookup's where both begin alike and that promises more: a match that the head
        confirms goes on longer than a block. Deterministic drafts only: what was drawn must not decide what is kept."""
        alike = 0
        while alike < min(len(own.tokens), len(found.tokens)) and own.tokens[alike] == found.tokens[alike]:
            alike += 1
        if not alike or own.q is not None or found.q is not None:
            return own
        joined = Draft(tokens=found.tokens, source=self.confirmed, survival=_either(own, found, alike))
        promises = [sum(self.survival(seq_id, draft.source, draft.survival)) for draft in (own, joined)]
        return joined if promises[1] > promises[0] else own


@dataclass(frozen=True)
class _Prospect:
    """What the head promises a row, and what it would replace: drafts accepted and verified, and the expected tokens
    and length of the lookup's draft; tokens by their weight."""

    index: int
    accepted: float
    verified: float
    lookup: float
    length: int
    sampled: bool

    def gain(self, price: float) -> float:
        """Tokens more than with the lookup, places in the pass paid for, the head not."""
        return self.accepted - self.lookup - price * (self.verified - self.length)


def _is_greedy(row: DraftRow) -> bool:
    return row.sampler is None or row.sampler.legal_greedy


def _kind(judged: Sequence[float]) -> str:
    """Of a block of the head, by the survival of the lookup's draft at that place: known before anything is drawn."""
    return "beside" if judged and judged[0] >= LIKELY else "alone"


def _either(one: Draft, other: Draft, alike: int) -> list[float]:
    """Survival of `other`'s tokens, of which the first `alike` are those of `one` as well: a token that two drafters
    say fails only where both do. What follows is as sure as `other` says."""
    found, alive = [], 1.0
    for j in range(len(other.tokens)):
        conditional = _conditional(other, j)
        if j < alike:
            conditional = 1 - (1 - conditional) * (1 - _conditional(one, j))
        alive *= conditional
        found.append(alive)
    return found


def _conditional(draft: Draft, j: int) -> float:
    before = draft.survival[j - 1] if j else 1.0
    return min(1.0, draft.survival[j] / before) if before > 0 else 0.0
