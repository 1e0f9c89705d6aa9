"""CostTable, PacedTable and StepCost: what one pass costs on this machine, by packed rows and context.
They must never smooth a step of the measured curve away: cliffs are where decisions are made."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

NUM_SMALL_ROWS = 8
PACE_RATE = 0.05
LARGEST_RATIO = 5.0
"""What one step may say at most: a hiccup is no new price."""
AGREEMENT = 0.1
MAX_TRIES = 10
OVERHEAD = 1e-4
"""Seconds, the unit of what a sequence or a sampled row adds to a step beside the pass."""
STEP_NOISE = 0.05
"""Scatter of a step's time, as a share of it, that says nothing of the price."""
FIRST_SPREAD = (0.05, 0.2, 0.2, 1.0, 1.0)
"""Variances of what is believed of each part at the start, see StepCost."""
SIZE = len(FIRST_SPREAD)
DRIFT = 3e-4
"""Of FIRST_SPREAD, by which prices may wander in a step: what was seen a dozen steps ago hardly counts."""
LARGEST_SURPRISE = 0.5
BEND_RATE = 0.03
RECENT_RATE = 0.3
LARGEST_BEND = 2.0
PROFILE_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256)
"""With both sides of the usual tile edges: between two points the curve is taken for straight."""


class CostTable:
    """Seconds of a pass by rows: linear between measured points, and on beyond the last as between the last two."""

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
            return self._beyond(rows)
        high_rows, high = self.points[index]
        if index == 0 or high_rows == rows:
            return high
        low_rows, low = self.points[index - 1]
        return low + (high - low) * (rows - low_rows) / (high_rows - low_rows)

    def _beyond(self, rows: float) -> float:
        """At least as steep as from nothing to the last point, halved: two points may lie on a plateau."""
        last_rows, last = self.points[-1]
        steepness = last / last_rows
        if len(self.points) > 1:
            before_rows, before = self.points[-2]
            steepness = max((last - before) / (last_rows - before_rows), steepness / 2)
        return last + steepness * (rows - last_rows)


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


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a pass is made of. `rows`: packed tokens. `context`: cached tokens that a row attends to, summed over the
    rows, `seq_context`: over the sequences, whose keys and values are read from memory once for all their rows. `seqs`:
    sequences that emit. `sampled`: rows whose token is drawn from a law rather than being the largest."""

    rows: int
    context: int = 0
    seq_context: int = 0
    seqs: int = 0
    sampled: int = 0


class StepCost:
    """Seconds of a step's target phases, by its shape, corrected after each step.

    a T(rows) + b c context + b' c' seq_context + OVERHEAD (d seqs + e sampled): T the measured table, of next to no
    context, c and c' the measured seconds of one more cached token for one row, and for one sequence. (a, b, b', d, e)
    start at (1, 1, 1, 0, 0) and follow the clock as a random walk seen through relative errors (a Kalman filter; Ljung
    and Soderstrom 1983, section 2.3). What is left over bends the table's nearest point, slowly: one that was measured
    at a bad moment is mended, cliffs stay.
    """

    def __init__(self, table: CostTable, *, per_context: float = 0.0, per_seq_context: float = 0.0) -> None:
        """`per_context`, `per_seq_context`: c and c', seconds."""
        self.table = table
        self.per_context = per_context
        self.per_seq_context = per_seq_context
        self.parts = [1.0, 1.0, 1.0, 0.0, 0.0]
        self.spread = [[v if i == j else 0.0 for j in range(SIZE)] for i, v in enumerate(FIRST_SPREAD)]
        self.per_row = self.fixed = 0.0
        self.recent = 0.0
        self.bends = CostTable([(rows, 1.0) for rows in table.rows])

    @property
    def points(self) -> list[tuple[int, float]]:
        """As measured at the start."""
        return self.table.points

    @property
    def ratio(self) -> float:
        """How much longer passes take now than the table says."""
        return self.parts[0]

    def begin(self, shape: Shape) -> None:
        """A step comes whose undrafted rows make this shape: `seconds` speaks of steps like it with more rows."""
        _, b, b_seq, d, e = self.parts
        rows = max(shape.rows, 1)
        self.per_row = (b * self.per_context * shape.context + OVERHEAD * e * shape.sampled) / rows
        self.fixed = b_seq * self.per_seq_context * shape.seq_context + OVERHEAD * d * shape.seqs

    def seconds(self, rows: float) -> float:
        """Of a step with that many packed rows, alike but for their number to the one begun."""
        return self.parts[0] * self._table_seconds(rows) + self.per_row * rows + self.fixed

    def predict(self, shape: Shape) -> float:
        """Of a step of that shape."""
        return sum(part * x for part, x in zip(self.parts, self._inputs(shape)))

    def observe(self, shape: Shape, seconds: float) -> None:
        """A step of that shape took so long."""
        inputs = self._inputs(shape)
        base = inputs[0]
        x = [value / base for value in inputs]
        said = sum(part * value for part, value in zip(self.parts, x))
        surprise = min(LARGEST_SURPRISE, max(-LARGEST_SURPRISE, seconds / base - said))
        spread_x = [sum(s * value for s, value in zip(row, x)) for row in self.spread]
        doubt = STEP_NOISE**2 + sum(value * sx for value, sx in zip(x, spread_x))
        gain = [sx / doubt for sx in spread_x]
        self.parts = [max(0.0, part + g * surprise) for part, g in zip(self.parts, gain)]
        self.parts[0] = max(self.parts[0], 1 / LARGEST_RATIO)
        spread = [[s - g * sx for s, sx in zip(row, spread_x)] for row, g in zip(self.spread, gain)]
        for i, most in enumerate(FIRST_SPREAD):  # in doubt, but never more than at the start: a part may not be seen
            spread[i][i] = max(spread[i][i], min(most, spread[i][i] + DRIFT * most))
        self.spread = spread
        # A change of pace surprises at every size alike: only what one size says against the others is of its own.
        self._bend(shape.rows, surprise - self.recent)
        self.recent += RECENT_RATE * (surprise - self.recent)

    def _table_seconds(self, rows: float) -> float:
        bend = self.bends.seconds(min(rows, self.table.rows[-1]))
        return bend * self.table.seconds(rows)

    def _bend(self, rows: int, surprise: float) -> None:
        """At the measured size nearest to `rows`."""
        sizes = self.table.rows
        index = bisect.bisect_left(sizes, rows)
        if index == len(sizes) or (index and rows - sizes[index - 1] < sizes[index] - rows):
            index -= 1
        size, bend = self.bends.points[index]
        bend = min(LARGEST_BEND, max(1 / LARGEST_BEND, bend * (1 + BEND_RATE * surprise)))
        self.bends.points[index] = (size, bend)

    def _inputs(self, shape: Shape) -> tuple[float, ...]:
        contexts = self.per_context * shape.context, self.per_seq_context * shape.seq_context
        return self._table_seconds(shape.rows), *contexts, OVERHEAD * shape.seqs, OVERHEAD * shape.sampled


class StepCosts(Protocol):
    """What a step costs by its shape, and follows the clock: StepCost, or plan/learned where nothing was measured."""

    @property
    def points(self) -> list[tuple[int, float]]:
        """(rows, seconds), as a profile keeps them."""
        ...

    def begin(self, shape: Shape) -> None:
        """A step comes whose undrafted rows make this shape."""
        ...

    def seconds(self, rows: float) -> float:
        """Of a step with that many packed rows, alike but for their number to the one begun."""
        ...

    def predict(self, shape: Shape) -> float:
        """Of a step of that shape."""
        ...

    def observe(self, shape: Shape, seconds: float) -> None:
        """A step of that shape took so long."""
        ...


Costs = CostTable | PacedTable | StepCosts


def profile(
    run: Callable[[int], float], *, max_rows: int, repetitions: int = 3, longest: float = math.inf
) -> CostTable:
    """Measure `run(rows) -> seconds` at the profile's row counts, the fastest of at least `repetitions` each.

    The fastest, not the mean: other processes only ever add time, and the shape of the curve is what matters. A size
    whose two fastest differ by more than AGREEMENT is tried again, up to MAX_TRIES times. Sizes beyond the first that
    takes more than `longest` seconds are left out.
    """
    sizes = [rows for rows in PROFILE_ROWS if rows <= max_rows] or [1]
    run(sizes[0])
    for index, rows in enumerate(sizes):
        if run(rows) > longest:
            sizes = sizes[: index + 1]
            break
    times: dict[int, list[float]] = {rows: [] for rows in sizes}
    # Small passes are what most decisions compare, and one that is timed too slow makes drafts look free: they are
    # tried twice as often. In turns, so that a slow moment does not hit all tries of one size.
    for rows in [*sizes, *(rows for rows in sizes if rows <= NUM_SMALL_ROWS)] * repetitions:
        times[rows].append(run(rows))
    for _ in range(MAX_TRIES - repetitions):
        unsure = [rows for rows, found in times.items() if sorted(found)[1] > (1 + AGREEMENT) * min(found)]
        for rows in unsure:
            times[rows].append(run(rows))
    return CostTable([(rows, min(found)) for rows, found in times.items()])
