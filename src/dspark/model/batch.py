"""Packed: one flat, ragged batch of new tokens for one model pass.
It must never pad, and never know why a token is in it (prompt chunk, last token or draft)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dspark.model.cache import KVCache

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Span:
    """The new tokens of one sequence: ids at positions start .. start + len(tokens) - 1.

    `num_logits` counts the rows, from the end of the span, whose logits are wanted (0 for an inner prompt chunk).
    """

    seq_id: int
    start: int
    tokens: Sequence[int]
    num_logits: int


@dataclass(frozen=True, kw_only=True)
class Packed:
    """S sequences, T new tokens, R rows that want logits, G cache groups (layers with one attention window).

    tokens, positions: (T,) int32. row_starts: (S + 1,) the T-range of each sequence. context_lens: (S,) keys each
    sequence has once its new tokens are written. tables: per group (S, P) page ids, pages outside the window 0.
    slots: per group (T,) page * page_size + offset, where each new token's key and value go. logit_rows: (R,) indices
    into T, ascending.
    """

    tokens: IntArray
    positions: IntArray
    row_starts: IntArray
    context_lens: IntArray
    tables: tuple[IntArray, ...]
    slots: tuple[IntArray, ...]
    logit_rows: IntArray

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)


def pack(spans: Sequence[Span], cache: KVCache) -> Packed:
    """Lay spans one after another. Their pages must have been reserved."""
    lengths = [len(span.tokens) for span in spans]
    row_starts = np.zeros(len(spans) + 1, np.int32)
    np.cumsum(lengths, out=row_starts[1:])
    total = int(row_starts[-1])
    tokens = np.fromiter((token for span in spans for token in span.tokens), np.int32, total)
    positions = np.concatenate([np.arange(s.start, s.start + n, dtype=np.int32) for s, n in zip(spans, lengths)])
    context_lens = np.array([s.start + n for s, n in zip(spans, lengths)], np.int32)
    tables, slots = cache.tables_and_slots([s.seq_id for s in spans], row_starts, positions)
    rows = [np.arange(end - s.num_logits, end, dtype=np.int32) for s, end in zip(spans, row_starts[1:])]
    return Packed(
        tokens=tokens,
        positions=positions,
        row_starts=row_starts,
        context_lens=context_lens,
        tables=tables,
        slots=slots,
        logit_rows=np.concatenate(rows),
    )
