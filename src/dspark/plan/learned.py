"""LearnedCost: seconds of a step by packed rows, learned from steps alone, where no pass can be measured beforehand.
It must never take one slow step for a price, or forget a size that has not come for a while.
"""

from __future__ import annotations

import bisect

from dspark.plan.cost import PROFILE_ROWS, CostTable, Shape

SIZES = (*PROFILE_ROWS, 384, 512, 768, 1024)
FIRST_SLOPE = 0.02
"""Of a step with one row, what each further row is taken to add before anything is known: little, so that drafts are
tried and the truth is found out."""
SLOPE_WEIGHT = 100.0
"""Squared rows of spread that the known slope counts for against what steps show."""
SLOPE_RATE = 0.02
MEMORY = 0.99
"""Of what earlier steps say, for each new one: about the last hundred count."""
SIZE_WEIGHT = 4.0
"""Steps of a size after which what it says against the line counts by half."""
LONGEST_SIZE_MEMORY = 50.0
LEAST_STEPS = 8
LARGEST_RATIO = 2.0
"""What one step may say against what was expected, once LEAST_STEPS are known: a hiccup is no new price."""


class LearnedCost:
    """A line by rows, the least squares of the recent steps, times what each size says against it, never falling.

    The line's slope is drawn towards the one that it had for long (Hoerl and Kennard 1970), as steps of one size tell
    none. Sizes are those of `SIZES`; a step counts for the nearest. It stands in for plan/cost.StepCost, from which it
    differs in that context, sequences and sampling go into the line as they come.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.slope = FIRST_SLOPE
        self.weight = self.mean_rows = self.mean_seconds = 0.0
        self.spread = self.product = 0.0
        self.says: dict[int, tuple[float, float]] = {}
        self.table = CostTable([(1, 1.0), (2, 1.0 + FIRST_SLOPE)])

    @property
    def points(self) -> list[tuple[int, float]]:
        """(rows, seconds) as they are known now; of unit 1 before the first step."""
        return self.table.points

    def begin(self, shape: Shape) -> None:
        """A step of that shape comes."""

    def seconds(self, rows: float) -> float:
        """Of a step with that many packed rows."""
        return self.table.seconds(rows)

    def predict(self, shape: Shape) -> float:
        """Of a step of that shape."""
        return self.table.seconds(max(1, shape.rows))

    def observe(self, shape: Shape, seconds: float) -> None:
        """A step of that shape took so long."""
        rows, said = max(1, shape.rows), self.predict(shape)
        if self.num_steps >= LEAST_STEPS:
            seconds = min(max(seconds, said / LARGEST_RATIO), said * LARGEST_RATIO)
        self.num_steps += 1
        self._move_line(rows, seconds)
        base, slope = self._line()
        size = _nearest(rows)
        ratio, count = self.says.get(size, (1.0, 0.0))
        count = min(LONGEST_SIZE_MEMORY, count + 1.0)
        ratio += (seconds / (base + slope * rows) - ratio) / count
        self.says[size] = ratio, count
        self.table = self._curve(base, slope)

    def _move_line(self, rows: int, seconds: float) -> None:
        """Decayed means, and sums of squares about them (West 1979)."""
        self.weight = MEMORY * self.weight + 1.0
        off_rows, off_seconds = rows - self.mean_rows, seconds - self.mean_seconds
        self.mean_rows += off_rows / self.weight
        self.mean_seconds += off_seconds / self.weight
        self.spread = MEMORY * self.spread + off_rows * (rows - self.mean_rows)
        self.product = MEMORY * self.product + off_rows * (seconds - self.mean_seconds)

    def _line(self) -> tuple[float, float]:
        """Seconds of no row, and of each. `slope` is kept as a share of a step with one row, so that it outlives a
        change of pace."""
        one = self.mean_seconds / (1.0 + self.slope * (self.mean_rows - 1.0))
        known = self.slope * one
        slope = (self.product + SLOPE_WEIGHT * known) / (self.spread + SLOPE_WEIGHT)
        slope = min(max(slope, 0.0), self.mean_seconds / self.mean_rows)
        base = self.mean_seconds - slope * self.mean_rows
        self.slope += SLOPE_RATE * (slope / (base + slope) - self.slope)
        return base, slope

    def _curve(self, base: float, slope: float) -> CostTable:
        points, least = [], 0.0
        for size in SIZES:
            ratio, count = self.says.get(size, (1.0, 0.0))
            shrunk = 1.0 + (ratio - 1.0) * count / (count + SIZE_WEIGHT)
            least = max(least, shrunk * (base + slope * size))
            points.append((size, least))
        return CostTable(points)


def _nearest(rows: int) -> int:
    index = bisect.bisect_left(SIZES, rows)
    if index == len(SIZES):
        return SIZES[-1]
    if index and rows - SIZES[index - 1] < SIZES[index] - rows:
        index -= 1
    return SIZES[index]
