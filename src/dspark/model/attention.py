"""PagedAttention: attention of one packed pass over the paged cache, in torch.
It must never look at a key past a row's position or outside its window, and never keep anything beyond the pass.

Shapes: S sequences, T new tokens, H query heads, G key-value heads, E head_dim, N visible keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.model.batch import Packed
from dspark.model.cache import KVCache

# How keys reach the kernel: "sdpa": one call a sequence (any device); "packed": visible keys gathered into one ragged
# tensor, one call; "paged": the kernel reads the page tables itself, one call.
KERNELS = ("paged", "packed", "sdpa")


@dataclass(frozen=True, kw_only=True)
class _Read:
    """Rows start .. end - 1 of the pass, at positions from `position` on, see keys lo .. lo + num_keys - 1.

    The keys lie in `num_keys` slots from `slot` on, or, when the pages are scattered, from `offset` on in `pages`.
    """

    start: int
    end: int
    position: int
    lo: int
    num_keys: int
    slot: int
    offset: int
    pages: Tensor | None


class PagedAttention:
    """Writes the new keys and values of a pass into the cache, and attends over what each row may see.

    One object serves all layers of one pass; a layer's window is that of its cache group.
    """

    def __init__(
        self,
        packed: Packed,
        cache: KVCache,
        *,
        kernel: str = "sdpa",
        row_by_row: bool = False,
        varlen: Callable[..., Any] | None = None,
    ) -> None:
        """`row_by_row` makes a row's bits independent of its company (kernel "sdpa" only). `varlen` is the function
        that "packed" and "paged" call, with the arguments of torch.nn.attention.varlen.varlen_attn."""
        assert kernel in KERNELS and (kernel == "sdpa" or (varlen is not None and not row_by_row))
        self.packed = packed
        self.cache = cache
        self.kernel = kernel
        self.row_by_row = row_by_row
        self.varlen = varlen
        self.device = cache.keys[0].device
        self._slots = [self._to_device(slots).long() for slots in packed.slots]
        self._reads: dict[int, list[_Read]] = {}
        self._ragged: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._tables: dict[int, Tensor] = {}
        if kernel != "sdpa":
            self._row_starts = self._to_device(packed.row_starts)
            self._context_lens = self._to_device(packed.context_lens)
            self._max_rows = int(np.diff(packed.row_starts).max())

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v (T, G, E), rotated: put each new token's key and value into its slot."""
        slots = self._slots[self.cache.group_of[layer]]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, slots, k.to(keys.dtype))
        values.view(-1, *values.shape[2:]).index_copy_(0, slots, v.to(values.dtype))

    def attend(
        self, layer: int, q: Tensor, *, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
    ) -> Tensor:
        """q (T, H, E) -> (T, H, E), in q's dtype. `sinks` (H,): a further logit in every row's softmax, without value.
        `softcap` c > 0 replaces each score s by c * tanh(s / c)."""
        group = self.cache.group_of[layer]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        plain = not softcap and sinks is None
        if plain and self.kernel == "paged":
            return self._attend_paged(group, q, keys, values, scale)
        if plain and self.kernel == "packed":
            return self._attend_packed(group, q, keys, values, scale)
        window = self.cache.windows[group]
        out = torch.empty_like(q)
        for read in self._reads_of(group):
            k, v = _visible(keys, read), _visible(values, read)
            rows = q[read.start : read.end]
            if plain:
                out[read.start : read.end] = _attend_block(rows, k, v, read, window=window, scale=scale)
            else:
                mask = _mask(read, window, q.device)
                out[read.start : read.end] = explicit_attention(
                    rows, k, v, mask, scale=scale, softcap=softcap, sinks=sinks
                )
        return out

    # -- one call for all sequences

    def _attend_paged(self, group: int, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        assert self.varlen is not None
        if group not in self._tables:
            self._tables[group] = self._to_device(self.packed.tables[group])
        return self.varlen(
            q,
            keys,
            values,
            self._row_starts,
            None,
            self._max_rows,
            self._tables[group].shape[1] * self.cache.page_size,
            scale=scale,
            window_size=self._window_size(group),
            enable_gqa=q.shape[1] != keys.shape[2],
            seqused_k=self._context_lens,
            block_table=self._tables[group],
        )

    def _attend_packed(self, group: int, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        assert self.varlen is not None
        if group not in self._ragged:
            self._ragged[group] = self._ragged_keys(group)
        index, key_starts, max_keys = self._ragged[group]
        return self.varlen(
            q,
            keys.view(-1, *keys.shape[2:]).index_select(0, index),
            values.view(-1, *values.shape[2:]).index_select(0, index),
            self._row_starts,
            key_starts,
            self._max_rows,
            max_keys,
            scale=scale,
            window_size=self._window_size(group),
            enable_gqa=q.shape[1] != keys.shape[2],
        )

    def _window_size(self, group: int) -> tuple[int, int]:
        window = self.cache.windows[group]
        return (window - 1, 0) if window else (-1, 0)

    def _ragged_keys(self, group: int) -> tuple[Tensor, Tensor, int]:
        """Slots of all visible keys, one sequence after another; where each begins (S + 1,); the longest."""
        size, parts = self.cache.page_size, []
        for seq, (lo, context) in enumerate(zip(self._first_visible(group), self.packed.context_lens, strict=True)):
            positions = np.arange(lo, context)
            pages = self.packed.tables[group][seq, positions // size].astype(np.int64)
            parts.append(pages * size + positions % size)
        lengths = [len(part) for part in parts]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return self._to_device(np.concatenate(parts)), self._to_device(starts), max(lengths)

    def _first_visible(self, group: int) -> np.ndarray:
        """(S,) the first key that any new row of each sequence sees."""
        starts = self.packed.context_lens - np.diff(self.packed.row_starts)
        window = self.cache.windows[group]
        return np.maximum(starts - window + 1, 0) if window else np.zeros_like(starts)

    # -- one call a sequence, or a row

    def _reads_of(self, group: int) -> list[_Read]:
        if group not in self._reads:
            spans = []
            for seq, context in enumerate(self.packed.context_lens.tolist()):
                start, end = self.packed.row_starts[seq : seq + 2].tolist()
                if self.row_by_row:
                    spans += [(seq, row, row + 1, context - (end - row)) for row in range(start, end)]
                else:
                    spans.append((seq, start, end, context - (end - start)))
            self._reads[group] = [self._read(group, *span) for span in spans]
        return self._reads[group]

    def _read(self, group: int, seq: int, start: int, end: int, position: int) -> _Read:
        size, window = self.cache.page_size, self.cache.windows[group]
        context = position + end - start
        lo = max(0, position - window + 1) if window else 0
        first, last = lo // size, -(-context // size)
        pages = self.packed.tables[group][seq, first:last]
        contiguous = bool((np.diff(pages) == 1).all())
        return _Read(
            start=start,
            end=end,
            position=position,
            lo=lo,
            num_keys=context - lo,
            slot=int(pages[0]) * size + lo % size if contiguous else -1,
            offset=lo % size,
            pages=None if contiguous else self._to_device(pages).long(),
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def _visible(pool: Tensor, read: _Read) -> Tensor:
    """pool (num_pages, page_size, G, E) -> (N, G, E); a view when the pages are neighbours."""
    if read.pages is None:
        return pool.view(-1, *pool.shape[2:])[read.slot : read.slot + read.num_keys]
    return pool[read.pages].flatten(0, 1)[read.offset : read.offset + read.num_keys]


def _mask(read: _Read, window: int, device: torch.device) -> Tensor | None:
    """(rows, N) True where the key is visible; None when every key is visible to every row."""
    if read.end - read.start == 1:
        return None
    rows = torch.arange(read.position, read.position + read.end - read.start, device=device)[:, None]
    keys = torch.arange(read.lo, read.lo + read.num_keys, device=device)[None, :]
    mask = keys <= rows
    return mask & (keys > rows - window) if window else mask


def _attend_block(q: Tensor, k: Tensor, v: Tensor, read: _Read, *, window: int, scale: float) -> Tensor:
    """q (rows, H, E), k and v (N, G, E) -> (rows, H, E)."""
    causal = read.end - read.start == read.num_keys > 1 and (not window or read.num_keys <= window)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None].to(q.dtype),
        v.transpose(0, 1)[None].to(q.dtype),
        attn_mask=None if causal else _mask(read, window, q.device),
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention written out, in float32: q (M, H, E), k and v (N, G, E), mask (M, N) True where visible -> (M, H, E).
    For what fused kernels lack: capped scores (Gemma 2) and attention sinks (gpt-oss)."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.float().view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("mgre,nge->grmn", grouped, k.float()) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    probabilities = scores.softmax(-1)[..., : k.shape[0]]
    out = torch.einsum("grmn,nge->mgre", probabilities, v.float())
    return out.reshape(num_rows, num_heads, head_dim).to(q.dtype)
