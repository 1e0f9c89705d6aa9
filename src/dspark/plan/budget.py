"""choose: how many drafted tokens of each row to verify in this step.
It must never let a token's verification depend on anything learned after that token was drawn (unless told that
drafts are deterministic, where nothing can be anticipated)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence


def choose(
    survivals: Sequence[Sequence[float]],
    cost: Callable[[int], float],
    max_tokens: int,
    *,
    other_rows: int = 0,
    other_tokens: float = 0.0,
    search_all: bool = False,
) -> list[int]:
    """Prefix lengths that maximise expected emitted tokens a second (DSpark, section 3.2.2, algorithm 1).

    `survivals[i][j]`: probability that drafts 0..j of row i are all accepted, computed before draft j was drawn; each
    list falls or stays. `cost(n)`: seconds of the step when the pass has n packed tokens. `other_rows`: packed tokens
    that are there anyway (prompt chunks, and rows whose drafts are not for choice), from which `other_tokens` emitted
    tokens are expected. At most `max_tokens` drafts are kept over all rows.

    Candidates are added in the order of survival, ties by position, then by row. The default stops at the first that
    does not raise throughput. That is what makes it lossless with sampled drafts: whether draft j is kept then depends
    only on survivals at least as large as its own, which were all known before it was drawn (in its own row they belong
    to earlier positions). Looking past the stop, as `search_all` does, would let a later survival, which depends on
    the token drawn at j, decide whether j is verified (docs/losslessness.md has the counter-example). `search_all` is
    for deterministic drafts and for capacities taken from earlier steps; it finds the best of all prefix vectors.
    """
    num_rows = len(survivals)
    lengths = [0] * num_rows
    best_lengths = list(lengths)
    expected = num_rows + other_tokens
    best_rate = expected / cost(num_rows + other_rows)
    heap = [(-row[0], 0, i) for i, row in enumerate(survivals) if row]
    heapq.heapify(heap)
    for count in range(1, max_tokens + 1):
        if not heap:
            break
        negative, position, i = heapq.heappop(heap)
        expected -= negative
        rate = expected / cost(num_rows + other_rows + count)
        lengths[i] = position + 1
        if rate > best_rate:
            best_rate, best_lengths = rate, list(lengths)
        elif not search_all:
            break
        if position + 1 < len(survivals[i]):
            heapq.heappush(heap, (-min(survivals[i][position + 1], -negative), position + 1, i))
    return best_lengths
