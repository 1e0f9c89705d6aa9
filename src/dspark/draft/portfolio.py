"""Portfolio: for each row and step the drafter that is expected to bring most: a head, a lookup, or none.
It must never choose by what a drafter has drawn, only by what was known before.

All choices are made from the history of the row and of the traffic, and from lookups, which are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from dspark.draft.base import Drafter, DraftRow, Taps
from dspark.types import Draft, Verdict

PROBE_EVERY = 16
PROBE_SHARE = 0.005
"""Of the time of a row whose head rests, what may go into asking it again."""


LIKELY = 0.3
"""A lookup's draft whose first token is less likely than that is as good as none."""


class Costs(Protocol):
    """Seconds, of which only ratios matter."""

    def target(self, rows: float) -> float:
        """A target pass of that many packed rows."""
        ...

    def head(self, greedy: int, sampled: int) -> float:
        """A draft pass of the head, for that many rows of either kind."""
        ...


class Portfolio:
    """A head that pays for its drafts, beside a lookup drafter that does not (or None).

    Each row gets what promises most tokens a second. With n rows in the step, E accepted and V verified drafts a step,
    the head brings 1 + E tokens for C(n (1 + V)) + d(n) seconds: E and V are what it brought in earlier steps of the
    row and of its like. The best prefix of the lookup's draft brings 1 + S_k for C(n (1 + k)), S_k the sum of its
    survival as judged; k = 0 is no draft at all. Where both drafted and begin alike, the lookup's draft may take the
    head's place. A row whose head rests is asked again after PROBE_EVERY steps, or as many more as make that
    PROBE_SHARE of their time.
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
        masks: Sequence[Any] | None = None,
    ) -> list[Draft]:
        drafts = [Draft(source=self.name) for _ in rows]
        if self.lookup is not None:
            drafts = self.lookup.propose(rows, limits, floors=floors, masks=masks)
        num_greedy = sum(row.sampler is None or row.sampler.plain_greedy for row in rows)
        head_seconds = self._head_seconds(num_greedy, len(rows) - num_greedy)
        judged = [self.survival(row.seq_id, draft.source, draft.survival) for row, draft in zip(rows, drafts)]
        chosen = [
            i
            for i, (row, limit) in enumerate(zip(rows, limits))
            if limit > 0 and self._head_pays(row, judged[i], num_rows=len(rows), head_seconds=head_seconds)
        ]
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

    def _head_pays(self, row: DraftRow, judged: Sequence[float], *, num_rows: int, head_seconds: float) -> bool:
        """`judged`: survival of the lookup's draft."""
        if not row.thrifty:
            return True
        accepted, verified = self.expected(row.seq_id, _kind(judged))
        lookup = self._lookup_rate(judged, num_rows)
        idle = self.idle.get(row.seq_id, 0) + 1
        pays = (1 + accepted) / (self._seconds(num_rows, verified) + head_seconds) > lookup
        # A probe is worth a step only where the row would else go without drafts.
        due = idle >= PROBE_EVERY and idle * self._seconds(num_rows, 0) * PROBE_SHARE >= head_seconds
        asked = pays or (due and (1 + accepted) / self._seconds(num_rows, verified) > lookup)
        self.idle[row.seq_id] = 0 if asked else idle
        return asked

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

    def _lookup_rate(self, judged: Sequence[float], num_rows: int) -> float:
        """Tokens a row and second with the best prefix of a lookup's draft."""
        best, expected = 1 / self._seconds(num_rows, 0), 1.0
        for k, alive in enumerate(judged, start=1):
            expected += alive
            best = max(best, expected / self._seconds(num_rows, k))
        return best

    def _seconds(self, num_rows: int, drafts: float) -> float:
        """Of a step with that many drafts a row, but for the head."""
        return self.costs.target(num_rows * (1 + drafts)) if self.costs else 1.0

    def _head_seconds(self, greedy: int, sampled: int) -> float:
        return self.costs.head(greedy, sampled) if self.costs and greedy + sampled else 0.0


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
