"""PromptClasses: prompts of a kind, found while serving, so that a new one can start with what its like have shown.
It must never see a token: a prompt is a short list of numbers to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dspark.plan import values as read

NUM_NUMBERS = 128
"""Of a sketch (engine/sketch)."""
MAX_CLASSES = 24
MOST_CLASSES = 256
"""That a saved history may ask for: each costs a product of sketches a request."""
UNIT = 1 + 1e-6
"""Largest number of a vector of length 1, with what rounding adds."""
LEAST_LIKENESS = 0.3
"""Cosine below which a prompt opens a class of its own, while there is room."""
RATE = 0.1
LONGEST_MEMORY = 500
"""Prompts over which the mean of all is taken."""


class PromptClasses:
    """Online spherical k-means (Zhong 2005) on sketches from which the running mean of all is taken, as what every
    prompt has in common, such as a chat template, says nothing."""

    def __init__(self, *, max_classes: int = MAX_CLASSES, least_likeness: float = LEAST_LIKENESS) -> None:
        self.max_classes = max_classes
        self.least_likeness = least_likeness
        self.mean: list[float] = []
        self.num_seen = 0
        self.centres: list[list[float]] = []

    def assign(self, sketch: Sequence[float]) -> int:
        """The class of a prompt, which moves a little towards it. Sketches must have the same length each time."""
        centred = self._centre(sketch)
        likeness = [sum(a * b for a, b in zip(centre, centred, strict=True)) for centre in self.centres]
        best = max(range(len(likeness)), key=likeness.__getitem__, default=-1)
        if best < 0 or (likeness[best] < self.least_likeness and len(self.centres) < self.max_classes):
            self.centres.append(centred)
            return len(self.centres) - 1
        self.centres[best] = _unit([a + RATE * b for a, b in zip(self.centres[best], centred)])
        return best

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PromptClasses:
        """Raises ValueError for what `as_dict` did not make."""
        found = cls(
            max_classes=read.whole(values, "max_classes", least=1, most=MOST_CLASSES),
            least_likeness=read.number(values, "least_likeness", least=-1.0, most=1.0),
        )
        found.num_seen = read.whole(values, "num_seen")
        length = NUM_NUMBERS if found.num_seen else 0
        found.mean = read.numbers(values, "mean", count=length, least=-UNIT, most=UNIT)
        found.centres = [
            read.as_numbers("centres", centre, count=length, least=-UNIT, most=UNIT)
            for centre in read.sequence(values, "centres")
        ]
        most = min(found.max_classes, found.num_seen)
        if not min(1, most) <= len(found.centres) <= most:
            raise ValueError(
                f"{len(found.centres)} centres are not those of {found.num_seen} prompts in {most} classes"
            )
        return found

    def _centre(self, sketch: Sequence[float]) -> list[float]:
        unit = _unit(sketch)
        self.num_seen += 1
        if not self.mean:
            self.mean = [0.0] * len(unit)
        rate = 1 / min(self.num_seen, LONGEST_MEMORY)
        self.mean = [m + rate * (x - m) for m, x in zip(self.mean, unit, strict=True)]
        return _unit([x - m for x, m in zip(unit, self.mean)]) if self.num_seen > 1 else unit


def _unit(values: Sequence[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values] if length else list(values)
