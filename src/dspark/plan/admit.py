"""Admission: who comes next, who takes part in a step, and how many tokens of prompts are read beside them.
It must never pass a waiting request over more than MAX_OVERTAKEN times, or leave a running one or the prompts out of
more than MAX_REST steps in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dspark.plan.cost import Costs
from dspark.plan.pace import Pace

MAX_OVERTAKEN = 16
MAX_REST = 8
MIN_CHUNK = 32
"""Prompt tokens that a step reads at least if it reads any: fewer cost a pass nearly as much."""
STALL = 3.0
"""How much longer than without prompts a step may take under "latency"."""
BESIDE_RATE = 0.1
LOOK_AHEAD = 64
"""Waiting requests that are compared."""


@dataclass(frozen=True, kw_only=True)
class Applicant:
    """A waiting request. `num_tokens` that are to be read before it emits."""

    seq_id: int
    priority: int
    num_tokens: int


@dataclass(kw_only=True)
class Admission:
    """What decides about a step before anything is drafted.

    `cost`: seconds of a step's target phases by packed rows; None where nothing is measured: then all take part and
    prompts take what room there is. `expected(seq_id)`: drafts of a request that are foreseen to be accepted, for a
    drafter that takes a pass for each token of the longest draft; None for others. `beside`: seconds of a step that are
    not the target's, such as drafting, lately.
    """

    pace: Pace = field(default_factory=Pace)
    cost: Costs | None = None
    expected: Callable[[int], float] | None = None
    rests: dict[int, int] = field(default_factory=dict)
    overtaken: dict[int, int] = field(default_factory=dict)
    num_unread: int = 0
    beside: float = 0.0

    def begin(self, seq_id: int, *, floor: float | None = None, priority: int = 0) -> None:
        """A request comes in."""
        self.pace.begin(seq_id, floor=floor, priority=priority)

    def forget(self, seq_id: int) -> None:
        """It has ended."""
        self.pace.forget(seq_id)
        self.rests.pop(seq_id, None)
        self.overtaken.pop(seq_id, None)

    def time(self, beside: float) -> None:
        """A step took so many seconds beside the target's."""
        self.beside += BESIDE_RATE * (beside - self.beside)

    def may_overtake(self, seq_id: int) -> bool:
        """Whether a waiting request may be passed over once more."""
        return self.overtaken.get(seq_id, 0) < MAX_OVERTAKEN

    def pass_over(self, seq_ids: Sequence[int]) -> None:
        """Others went before these."""
        for seq_id in seq_ids:
            self.overtaken[seq_id] = self.overtaken.get(seq_id, 0) + 1

    def resting(self, seq_ids: Sequence[int], weights: Sequence[float] | None) -> set[int]:
        """Those of the decoding requests that sit this step out.

        With floors or classes of priority, a request whose tokens are worth less than the time that they take from the
        others waits: taken are the first so many in the order of what a packed row brings, at which weighted tokens a
        second are most, and whoever has waited MAX_REST steps.
        """
        if weights is None or self.cost is None or not self.pace.has_claims(seq_ids):
            self.rests.clear()
            return set()
        usual = [self.pace.usual(seq_id) for seq_id in seq_ids]
        order = sorted(range(len(seq_ids)), key=lambda i: -weights[i] * usual[i][0] / usual[i][1])
        tokens = packed = best_rate = 0.0
        taken = 0
        for count, i in enumerate(order, start=1):
            tokens += weights[i] * usual[i][0]
            packed += usual[i][1]
            rate = tokens / (self.beside + self.cost.seconds(packed))
            if rate > best_rate:
                best_rate, taken = rate, count
        out = {seq_ids[i] for i in order[taken:] if self.rests.get(seq_ids[i], 0) < MAX_REST - 1}
        self.rests = {seq_id: self.rests.get(seq_id, 0) + 1 for seq_id in out}
        return out

    def prompt_tokens(self, seq_ids: Sequence[int], *, most: int, now: float) -> int:
        """Prompt tokens to read beside these decoding requests: `most`, or as many as leave them their floors (under
        "latency": at most STALL times the step's time), but MIN_CHUNK or none."""
        if not seq_ids or self.cost is None:
            self.num_unread = 0
            return most
        allowed = self.pace.seconds_left(seq_ids, now) - self.beside
        packed = sum(self.pace.usual(seq_id)[1] for seq_id in seq_ids)
        if self.pace.objective == "latency":
            allowed = min(allowed, STALL * self.cost.seconds(packed))
        if allowed == float("inf"):
            self.num_unread = 0
            return most
        count = _most_within(self.cost, packed, allowed, most)
        if count < MIN_CHUNK:
            self.num_unread += 1
            count = MIN_CHUNK if self.num_unread >= MAX_REST or self.pace.objective == "latency" else 0
        if count:
            self.num_unread = 0
        return min(count, most)

    def next_waiting(self, waiting: Sequence[Applicant], running: Sequence[int]) -> int:
        """Index of the one that is admitted next: of the most urgent class the first, unless another one fits better.

        Under "latency" that is the one with fewest tokens to read (shortest job first). For a drafter with a pass a
        token it is the one of which about as many drafts are expected as of those that run: the passes of a step are as
        many as its longest draft has tokens, and the others wait for them.
        """
        if not self.may_overtake(waiting[0].seq_id):
            return 0
        ahead = next((i for i, w in enumerate(waiting) if w.priority != waiting[0].priority), len(waiting))
        ahead = min(ahead, LOOK_AHEAD)
        blocked = next((i for i in range(1, ahead) if not self.may_overtake(waiting[i].seq_id)), ahead)
        candidates = range(min(ahead, blocked + 1))
        if self.pace.objective == "latency":
            return min(candidates, key=lambda i: waiting[i].num_tokens)
        if self.expected is None or not running:
            return 0
        usual = sum(map(self.expected, running)) / len(running)
        expected = self.expected
        return min(candidates, key=lambda i: abs(expected(waiting[i].seq_id) - usual))


def _most_within(cost: Costs, packed: float, allowed: float, most: int) -> int:
    """The largest number of further rows, up to `most`, with which a pass takes no longer than allowed."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if cost.seconds(packed + middle) <= allowed:
            low = middle
        else:
            high = middle - 1
    return low
