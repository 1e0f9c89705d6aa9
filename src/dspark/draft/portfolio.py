"""Portfolio: for each row and step the drafter that is expected to bring most: a head, a lookup, or none.
It must never choose by what a drafter has drawn, only by what was known before.

All choices are made from the history of the row and of the traffic, and from lookups, which are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.draft.base import Drafter, DraftRow, Taps
from dspark.types import Draft, Verdict

FIRST_GUESS = 1.0
"""Accepted drafts of the head a step, before anything is known."""
PRIOR_WEIGHT = 4.0
DECAY = 0.9
OVERALL_DECAY = 0.995
PROBE_EVERY = 16


@dataclass
class _Row:
    """What the head brought this row: decayed accepted drafts and steps; steps since the head was last asked; whether
    the draft now being verified is the head's."""

    accepted: float = 0.0
    steps: float = 0.0
    idle: int = 0
    pending: bool = False


class Portfolio:
    """A head that pays for its drafts, beside a lookup drafter that does not (or None).

    With E accepted drafts expected, a step brings 1 + E tokens for one target pass, and the head's pass costs `price`
    target passes more: the head drafts where (1 + E_head) / (1 + price) > 1 + E_lookup. E_lookup is the sum of the
    lookup's survival, 0 without a match; E_head is the row's running mean, shrunk towards that of all rows. A row whose
    head rests is asked again every PROBE_EVERY steps.
    """

    def __init__(self, head: Drafter, *, lookup: Drafter | None = None, price: Callable[[int, int], float]) -> None:
        """price(greedy, sampled): seconds of a draft pass of the head over those of a target pass, for that many rows
        of either kind."""
        self.head = head
        self.lookup = lookup
        self.price = price
        self.name = "auto" if lookup is not None else head.name
        self.taps = head.taps
        self.num_places = head.num_places
        self.rows: dict[int, _Row] = {}
        self.overall = [FIRST_GUESS * PRIOR_WEIGHT, PRIOR_WEIGHT]

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
        price = self.price(num_greedy, len(rows) - num_greedy)
        chosen = [
            i
            for i, (row, limit, draft) in enumerate(zip(rows, limits, drafts))
            if limit > 0 and self._head_pays(row.seq_id, sum(draft.survival), price)
        ]
        if chosen:
            proposals = self.head.propose([rows[i] for i in chosen], [limits[i] for i in chosen])
            for i, proposal in zip(chosen, proposals):
                if proposal.tokens:
                    drafts[i] = proposal
                    self.rows[rows[i].seq_id].pending = True
        return drafts

    def observe(self, rows: Sequence[DraftRow], verdicts: Sequence[Verdict | None], taps: Taps | None = None) -> None:
        for row, verdict in zip(rows, verdicts):
            state = self.rows.get(row.seq_id)
            if state is not None and state.pending and verdict is not None:
                state.pending = False
                state.accepted = state.accepted * DECAY + verdict.num_accepted
                state.steps = state.steps * DECAY + 1
                self.overall[0] = self.overall[0] * OVERALL_DECAY + verdict.num_accepted
                self.overall[1] = self.overall[1] * OVERALL_DECAY + 1
        self.head.observe(rows, verdicts, taps)
        if self.lookup is not None:
            self.lookup.observe(rows, verdicts)

    def forget(self, seq_id: int) -> None:
        self.rows.pop(seq_id, None)
        self.head.forget(seq_id)
        if self.lookup is not None:
            self.lookup.forget(seq_id)

    def expected(self, seq_id: int) -> float:
        """Accepted drafts of the head in the row's next step."""
        state = self.rows.get(seq_id) or _Row()
        overall = self.overall[0] / self.overall[1]
        return (state.accepted + PRIOR_WEIGHT * overall) / (state.steps + PRIOR_WEIGHT)

    def _head_pays(self, seq_id: int, lookup: float, price: float) -> bool:
        state = self.rows.setdefault(seq_id, _Row())
        if (1 + self.expected(seq_id)) / (1 + price) > 1 + lookup:
            state.idle = 0
            return True
        state.idle += 1
        # A probe is worth a step only where the row would else go without drafts.
        if state.idle % PROBE_EVERY == 0 and lookup < self.expected(seq_id):
            return True
        return False
