"""Gains: what a step with a whole drafted block has brought, by request, class of prompts and over all.
It must never count a step in which no block was drafted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

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
MAX_CLASSES = 256
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
        prompt_class = self.class_of.get(seq_id, "")
        if prompt_class in self.classes or len(self.classes) < MAX_CLASSES:
            record = self.classes.setdefault(prompt_class, _Record())
            record.add(num_accepted, num_verified, decay=CLASS_DECAY)

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
        try:
            gains.overall = _record(values["overall"], least=1e-9)
            gains.classes = {str(name): _record(numbers) for name, numbers in values["classes"].items()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"these are not gains of blocks ({error!r}): save them again") from None
        return gains


def _record(numbers: Sequence[float], *, least: float = 0.0) -> _Record:
    accepted, verified, steps = map(float, numbers)
    if not (0 <= accepted <= verified < math.inf and least <= steps < math.inf):
        raise ValueError(f"{list(numbers)} are not accepted and verified drafts and steps")
    return _Record(accepted, verified, steps)
