"""draft_lengths: how many tokens an autoregressive drafter should draft for each row of a step, all rows together.
It must never see more than what is foreseen before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.plan.cost import Costs

NUM_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class JointPlan:
    """`lengths` by row, and the `rate` that they promise: expected tokens a second of the whole step."""

    lengths: list[int]
    rate: float


def draft_lengths(
    foreseen: Sequence[Sequence[float]],
    target: Costs,
    draft: Costs,
    *,
    other_rows: int = 0,
    weights: Sequence[float] | None = None,
) -> JointPlan:
    """Lengths that make (R + sum of survivals) / (C(R + sum of lengths) + sum over depths j of d(rows at j)) large.

    `foreseen[i][j]`: survival of draft j of row i, falling. The drafter takes one pass for each depth, over the rows
    that are still drafting there, and every row waits for the last of them: a depth pays only if all of its rows
    together expect more tokens than its pass and their places in the target's are worth at the step's own rate
    (Dinkelbach 1967: the rate is found by iteration, from plain decoding's). `other_rows`: of the step, which do not
    draft here and emit a token each. `weights`: what a token of each row is worth (1 each); the rate is of worth then.
    """
    num_rows = len(foreseen)
    if not num_rows:
        return JointPlan(lengths=[], rate=0.0)
    base, tokens = num_rows + other_rows, float(num_rows + other_rows)
    if weights is not None:
        tokens = sum(weights) + other_rows
        foreseen = [[weight * alive for alive in row] for weight, row in zip(weights, foreseen)]
    plain = tokens / target.seconds(base)
    best = JointPlan(lengths=[0] * num_rows, rate=plain)
    rate = plain
    for _ in range(NUM_ROUNDS):
        found = _lengths_at(rate, foreseen, target, draft, base, tokens)
        if found.rate <= best.rate * (1 + 1e-9):
            break
        best, rate = found, found.rate
    return best


def _lengths_at(
    rate: float, foreseen: Sequence[Sequence[float]], target: Costs, draft: Costs, base: int, tokens: float
) -> JointPlan:
    """The lengths that are worth most if a second is worth `rate` tokens. `base` rows emit `tokens` without drafts."""
    lengths = [0] * len(foreseen)
    rows, drafting = base, 0.0
    best_worth, best = tokens - rate * target.seconds(rows), (list(lengths), rows, tokens, drafting)
    alive = [i for i, row in enumerate(foreseen) if row]
    depth = 0
    while alive:
        chosen = _rows_of_depth(rate, [foreseen[i][depth] for i in alive], target, draft, rows)
        alive = sorted(alive, key=lambda i: -foreseen[i][depth])[:chosen]
        if not alive:
            break
        depth += 1
        for i in alive:
            lengths[i] = depth
        rows += len(alive)
        tokens += sum(foreseen[i][depth - 1] for i in alive)
        drafting += draft.seconds(len(alive))
        worth = tokens - rate * (target.seconds(rows) + drafting)
        if worth > best_worth:
            best_worth, best = worth, (list(lengths), rows, tokens, drafting)
        alive = [i for i in alive if len(foreseen[i]) > depth]
    lengths, rows, tokens, drafting = best
    return JointPlan(lengths=lengths, rate=tokens / (target.seconds(rows) + drafting))


def _rows_of_depth(rate: float, survivals: Sequence[float], target: Costs, draft: Costs, rows: int) -> int:
    """How many rows, the likeliest first, a depth should have: as many as are worth most, and where none is worth its
    pass, the most that lose least, since a deeper look may make up for it."""
    before, expected = target.seconds(rows), 0.0
    best_worth, best = -float("inf"), 0
    for count, alive in enumerate(sorted(survivals, reverse=True), start=1):
        expected += alive
        worth = expected - rate * (target.seconds(rows + count) - before + draft.seconds(count))
        if worth >= best_worth:
            best_worth, best = worth, count
    return best
