"""Portfolio: for each row and step the drafter that is expected to bring most: a head, a lookup, or none.
It must never choose by what a drafter has drawn, only by what was known before.

All choices are made from the history of the row and of the traffic, and from lookups, which are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dspark.draft.base import Drafter, DraftRow, Taps
from dspark.types import Draft, Verdict

FIRST_GUESS = 1.0
"""Accepted drafts of the head a step, before anything is known; three times as many verified."""
PRIOR_WEIGHT = 4.0
DECAY = 0.9
OVERALL_DECAY = 0.995
PROBE_EVERY = 16
LONGEST_PAUSE = 128


@dataclass
class _Record:
    """Decayed sums over steps that the head drafted: drafts accepted, drafts verified, steps."""

    accepted: float = 0.0
    verified: float = 0.0
    steps: float = 0.0

    def add(self, verdict: Verdict, *, decay: float) -> None:
        self.accepted = self.accepted * decay + verdict.num_accepted
        self.verified = self.verified * decay + verdict.num_verified
        self.steps = self.steps * decay + 1


@dataclass
class _Row:
    """What the head brought this row; steps since it was last asked, and after how many it is asked again; whether the
    draft now being verified is the head's."""

    record: _Record = field(default_factory=_Record)
    idle: int = 0
    pause: int = PROBE_EVERY
    pending: bool = False


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
    the head brings 1 + E tokens for C(n (1 + V)) + d(n) seconds: E and V are the row's running means, shrunk towards
    those of all rows. The best prefix of the lookup's draft brings 1 + S_k for C(n (1 + k)), S_k the sum of its
    calibrated survival; k = 0 is no draft at all. A row whose head rests is asked again after PROBE_EVERY steps, and
    after twice as many each time that this was in vain.
    """

    def __init__(
        self,
        head: Drafter,
        *,
        costs: Costs | None,
        lookup: Drafter | None = None,
        calibrated: Callable[[str, Sequence[float]], Sequence[float]] = lambda source, claims: claims,
    ) -> None:
        """`costs` None: drafts are free, for fixed lengths. `calibrated(source, survival)`: the survival that drafts
        of that source have turned out to have."""
        self.head = head
        self.lookup = lookup
        self.costs = costs
        self.calibrated = calibrated
        self.name = "auto" if lookup is not None else head.name
        self.taps = head.taps
        self.num_places = head.num_places
        self.rows: dict[int, _Row] = {}
        self.overall = _Record(
            accepted=FIRST_GUESS * PRIOR_WEIGHT, verified=3 * FIRST_GUESS * PRIOR_WEIGHT, steps=PRIOR_WEIGHT
        )

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
        head_seconds = self.costs.head(num_greedy, len(rows) - num_greedy) if self.costs else 0.0
        chosen = [
            i
            for i, (row, limit, draft) in enumerate(zip(rows, limits, drafts))
            if limit > 0 and self._head_pays(row.seq_id, draft, num_rows=len(rows), head_seconds=head_seconds)
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
                state.record.add(verdict, decay=DECAY)
                self.overall.add(verdict, decay=OVERALL_DECAY)
        self.head.observe(rows, verdicts, taps)
        if self.lookup is not None:
            self.lookup.observe(rows, verdicts)

    def forget(self, seq_id: int) -> None:
        self.rows.pop(seq_id, None)
        self.head.forget(seq_id)
        if self.lookup is not None:
            self.lookup.forget(seq_id)

    def expected(self, seq_id: int) -> tuple[float, float]:
        """Drafts of the head that are accepted, and verified, in the row's next step."""
        record = self.rows[seq_id].record if seq_id in self.rows else _Record()
        steps = record.steps + PRIOR_WEIGHT

        def mean(of_row: float, of_all: float) -> float:
            return (of_row + PRIOR_WEIGHT * of_all / self.overall.steps) / steps

        return mean(record.accepted, self.overall.accepted), mean(record.verified, self.overall.verified)

    def _head_pays(self, seq_id: int, draft: Draft, *, num_rows: int, head_seconds: float) -> bool:
        state = self.rows.setdefault(seq_id, _Row())
        accepted, verified = self.expected(seq_id)
        lookup = self._lookup_rate(draft, num_rows)
        if (1 + accepted) / (self._seconds(num_rows, verified) + head_seconds) > lookup:
            state.idle, state.pause = 0, PROBE_EVERY
            return True
        state.idle += 1
        # A probe is worth a step only where the row would else go without drafts.
        if state.idle >= state.pause and (1 + accepted) / self._seconds(num_rows, verified) > lookup:
            state.idle, state.pause = 0, min(2 * state.pause, LONGEST_PAUSE)
            return True
        return False

    def _lookup_rate(self, draft: Draft, num_rows: int) -> float:
        """Tokens a row and second with the best prefix of a lookup's draft."""
        best, expected = 1 / self._seconds(num_rows, 0), 1.0
        for k, alive in enumerate(self.calibrated(draft.source, draft.survival), start=1):
            expected += alive
            best = max(best, expected / self._seconds(num_rows, k))
        return best

    def _seconds(self, num_rows: int, drafts: float) -> float:
        """Of a target pass with that many drafts a row."""
        return self.costs.target(num_rows * (1 + drafts)) if self.costs else 1.0
