"""choose: how many drafted tokens of each row to verify in this step.
It must never let a token's verification depend on anything learned after that token was drawn (unless told that
drafts are deterministic, where nothing can be anticipated)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from dspark.plan.cost import Costs


def choose(
    survivals: Sequence[Sequence[float]],
    cost: Callable[[int], float],
    max_tokens: int,
    *,
    other_rows: int = 0,
    other_tokens: float = 0.0,
    weights: Sequence[float] | None = None,
    search_all: bool = False,
    capacity: int = 0,
) -> list[int]:
    """Prefix lengths that maximise expected emitted tokens a second (DSpark, section 3.2.2, algorithm 1).

    `survivals[i][j]`: probability that drafts 0..j of row i are all accepted, computed before draft j was drawn; each
    list falls or stays. `cost(n)`: seconds of the step when the pass has n packed tokens (`beside_prompts` where some
    are a prompt's). `other_rows`: packed tokens that are there anyway (prompt chunks, and rows whose drafts are not for
    choice), from which `other_tokens` emitted tokens are expected. `weights`: what a token of each row is worth (1
    each). At most `max_tokens` drafts are kept over all rows; time O(candidates log rows).

    Candidates are added in the order of weighted survival, ties by position, then by row. The default stops at the
    first that does not raise throughput. That is what makes it lossless with sampled drafts: whether draft j is kept
    then depends only on survivals at least as large as its own, which were all known before it was drawn (in its own
    row they belong to earlier positions). Looking past the stop, as `search_all` does, would let a later survival,
    which depends on the token drawn at j, decide whether j is verified (docs/losslessness.md has the counter-example).
    `search_all` is for deterministic drafts and for plans from earlier steps; it finds the best of all prefix vectors.

    A curve with cliffs stops the default before one that many good candidates would pay for together. `capacity`,
    drafts that a search over an *earlier* step's survivals found worth a pass (the paper's asynchronous variant), lets
    it go on up to there as long as the rate rises against the curve's convex minorant, which has no cliffs.
    """
    num_rows = len(survivals)
    worth = [1.0] * num_rows if weights is None else weights
    lengths = [0] * num_rows
    best_lengths = list(lengths)
    expected = sum(worth) + other_tokens
    base = num_rows + other_rows
    rate = best_rate = expected / cost(base)
    smooth = _convex_minorant([cost(base + n) for n in range(capacity + 1)]) if capacity and not search_all else []
    for count, (value, position, i) in enumerate(_candidates(survivals, worth), start=1):
        if count > max_tokens:
            break
        before, expected = expected, expected + value
        last_rate, rate = rate, expected / cost(base + count)
        lengths[i] = position + 1
        if rate > best_rate:
            best_rate, best_lengths = rate, list(lengths)
        if search_all:
            continue
        if count < len(smooth):
            if expected / smooth[count] <= before / smooth[count - 1]:
                lengths[i] = position
                break
        elif rate <= last_rate:
            lengths[i] = position
            break
    return best_lengths if search_all else lengths


def beside_prompts(target: Costs, num_rows: int, num_prompt_tokens: int) -> Callable[[int], float]:
    """Cost of a pass by packed tokens in which so many belong to prompts, as drafts should see it: of a pass without
    them, and what each draft adds to the pass that there is.

    A prompt must be read whatever is drafted, so its time is no reason to check more: by the whole pass's time, which a
    long prompt makes ten times as long, next to any draft would be worth its place.
    """
    if not num_prompt_tokens:
        return target.seconds
    beside = target.seconds(num_rows) - target.seconds(num_rows + num_prompt_tokens)
    return lambda packed: beside + target.seconds(packed)


def _candidates(survivals: Sequence[Sequence[float]], worth: Sequence[float]) -> Iterator[tuple[float, int, int]]:
    """(weighted survival, position, row), the largest first; in a row they fall, by force where need be."""
    heap = [(-worth[i] * row[0], 0, i) for i, row in enumerate(survivals) if row]
    heapq.heapify(heap)
    while heap:
        negative, position, i = heapq.heappop(heap)
        yield -negative, position, i
        if position + 1 < len(survivals[i]):
            value = min(worth[i] * survivals[i][position + 1], -negative)
            heapq.heappush(heap, (-value, position + 1, i))


def _convex_minorant(values: Sequence[float]) -> list[float]:
    """The largest convex function below `values` at 0, 1, 2, ..."""
    corners: list[int] = []
    for x, y in enumerate(values):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (values[b] - values[a]) * (x - a) >= (y - values[a]) * (b - a):
                corners.pop()
            else:
                break
        corners.append(x)
    found = [values[0]]
    for a, b in zip(corners, corners[1:]):
        steepness = (values[b] - values[a]) / (b - a)
        found += [values[a] + steepness * (x - a) for x in range(a + 1, b + 1)]
    return found
