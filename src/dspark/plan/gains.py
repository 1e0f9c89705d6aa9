"""Gains: what a step with a whole drafted block has brought, by request, class of prompts and over all.
It must never count a step in which no block was drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from dspark.plan import recent
from dspark.plan import values as read

FIRST_GUESS = 1.0
"""Accepted drafts of a block, before anything is known; three times as many verified."""
PRIOR_WEIGHT = 4.0
ROW_DECAY = 0.9
IDLE_DECAY = 0.8
"""Of a request's own sums for each step without a block: what it was like says ever less of what it is like."""
CLASS_DECAY = 0.98
CLASS_IDLE_DECAY = 0.999
"""The same of a class: what it is known by are the steps with a block, which stop where it does badly."""
OVERALL_DECAY = 0.995
LONGEST_DRAFT = 1e6
"""Drafts a step, beyond any that a drafter makes."""
KINDS = ("alone", "beside")
"""Blocks where nothing else had a draft, and beside one that cost nothing: there the text repeats, and both know."""


@dataclass
class _Record:
    """Decayed sums over steps: drafts accepted, drafts verified, steps."""

    accepted: float = 0.0
    verified: float = 0.0
    steps: float = 0.0

    def add(self, accepted: int, verified: int, *, decay: float) -> None:
        self.fade(decay)
        self.accepted += accepted
        self.verified += verified
        self.steps += 1

    def fade(self, decay: float) -> None:
        self.accepted *= decay
        self.verified *= decay
        self.steps *= decay

    def shrunk(self, accepted: float, verified: float) -> tuple[float, float]:
        """Means, as if PRIOR_WEIGHT steps of `accepted` and `verified` had been seen as well."""
        steps = self.steps + PRIOR_WEIGHT
        return (self.accepted + PRIOR_WEIGHT * accepted) / steps, (self.verified + PRIOR_WEIGHT * verified) / steps


class Gains:
    """Means of accepted and verified drafts a step: a request's own, shrunk towards those of its class, and these
    towards those of all traffic."""

    def __init__(self) -> None:
        self.overall = _Record(FIRST_GUESS * PRIOR_WEIGHT, 3 * FIRST_GUESS * PRIOR_WEIGHT, PRIOR_WEIGHT)
        self.classes: dict[str, _Record] = {}
        self.rows: dict[int, _Record] = {}
        self.class_of: dict[int, str] = {}

    def begin(self, seq_id: int, prompt_class: str) -> None:
        self.class_of[seq_id] = prompt_class

    def forget(self, seq_id: int) -> None:
        """The request has ended; what it taught stays."""
        self.class_of.pop(seq_id, None)
        self.rows.pop(seq_id, None)

    def expected(self, seq_id: int) -> tuple[float, float]:
        """Drafts that are accepted, and verified, in the request's next step with a block."""
        steps = self.overall.steps
        means = self.overall.accepted / steps, self.overall.verified / steps
        for record in (self.classes.get(self.class_of.get(seq_id, "")), self.rows.get(seq_id)):
            if record is not None:
                means = record.shrunk(*means)
        return means

    def update(self, seq_id: int, *, num_verified: int, num_accepted: int) -> None:
        """A step with a block, though none of it may have been verified."""
        self.overall.add(num_accepted, num_verified, decay=OVERALL_DECAY)
        self.rows.setdefault(seq_id, _Record()).add(num_accepted, num_verified, decay=ROW_DECAY)
        of_class = recent.use(self.classes, self.class_of.get(seq_id, ""), _Record)
        of_class.add(num_accepted, num_verified, decay=CLASS_DECAY)

    def rest(self, seq_id: int) -> None:
        """A step without a block."""
        if (record := self.rows.get(seq_id)) is not None:
            record.fade(IDLE_DECAY)
        if (record := self.classes.get(self.class_of.get(seq_id, ""))) is not None:
            record.fade(CLASS_IDLE_DECAY)

    def as_dict(self) -> dict[str, Any]:
        """What all requests share, as JSON values."""
        classes = {name: astuple(record) for name, record in self.classes.items()}
        return {"overall": astuple(self.overall), "classes": classes}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Gains:
        """Raises ValueError for what `as_dict` did not make."""
        gains = cls()
        gains.overall = _record(values, "overall", least=1e-9)
        classes = read.table(values, "classes")
        gains.classes = recent.check({name: _record(classes, name) for name in classes}, "classes")
        return gains


def _record(holder: Mapping[str, Any], key: str, *, least: float = 0.0) -> _Record:
    accepted, verified, steps = read.numbers(holder, key, count=3, least=0.0)
    # Rounding of sums that have faded away may leave a little where there are no steps any more.
    if accepted > verified or steps < least or verified > LONGEST_DRAFT * steps + 1e-9:
        raise ValueError(f"{key}={[accepted, verified, steps]} are not accepted and verified drafts and steps")
    return _Record(accepted, verified, steps)
