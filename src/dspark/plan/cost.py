"""CostTable and PacedTable: what one pass costs on this machine, by the number of packed rows.
It must never smooth a step of the measured curve away: cliffs are where decisions are made."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

NUM_SMALL_ROWS = 8
PACE_RATE = 0.05
LARGEST_RATIO = 5.0
"""What one step may say at most: a hiccup is no new price."""
PROFILE_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class CostTable:
    """Seconds of a pass by rows: linear between measured points, proportional beyond the last."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """`points`: (rows >= 1, seconds > 0), at least one. Kept as measured, only sorted."""
        if not points or any(rows < 1 or seconds <= 0 for rows, seconds in points):
            raise ValueError("a cost table needs points of at least one row and a positive time each")
        self.points = sorted(points)
        self.rows = [rows for rows, _ in self.points]

    def seconds(self, rows: float) -> float:
        """Time of a pass over that many rows; a mean need not be a whole number."""
        index = bisect.bisect_left(self.rows, rows)
        if index == len(self.rows):
            last_rows, last = self.points[-1]
            return last * rows / last_rows
        high_rows, high = self.points[index]
        if index == 0 or high_rows == rows:
            return high
        low_rows, low = self.points[index - 1]
        return low + (high - low) * (rows - low_rows) / (high_rows - low_rows)


class PacedTable:
    """A cost table times how much longer passes take now than it says, as a running ratio.

    Tables hold the fastest of a few tries; what a loop adds to a pass is not in them, and on a busy machine small
    operations grow more than large ones.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.ratio = 1.0

    @property
    def points(self) -> list[tuple[int, float]]:
        """As measured at the start."""
        return self.table.points

    def seconds(self, rows: float) -> float:
        """Time of a pass over that many rows, as passes go now."""
        return self.ratio * self.table.seconds(rows)

    def observe(self, rows: float, seconds: float, *, passes: int = 1) -> None:
        """So many passes over that many rows took so long."""
        expected = passes * self.table.seconds(rows)
        self.ratio += PACE_RATE * (min(seconds / expected, LARGEST_RATIO) - self.ratio)


Costs = CostTable | PacedTable


def profile(run: Callable[[int], float], *, max_rows: int, repetitions: int = 3) -> CostTable:
    """Measure `run(rows) -> seconds` at the profile's row counts, the fastest of `repetitions` each.

    The fastest, not the mean: other processes only ever add time, and the shape of the curve is what matters.
    """
    sizes = [rows for rows in PROFILE_ROWS if rows <= max_rows] or [1]
    for rows in (sizes[0], sizes[-1]):
        run(rows)
    best = dict.fromkeys(sizes, float("inf"))
    # Small passes are what most decisions compare, and one that is timed too slow makes drafts look free: they are
    # tried twice as often.
    for rows in [*sizes, *(rows for rows in sizes if rows <= NUM_SMALL_ROWS)] * repetitions:
        best[rows] = min(best[rows], run(rows))
    return CostTable(list(best.items()))
