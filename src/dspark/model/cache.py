"""KVCache: paged keys and values with prefix reuse, rollback and sliding windows.
It must never copy a key, and never let a page be free and owned, or owned without a count."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int32]
NO_PAGE = 0  # stands in a table for a page that fell out of the window; kernels never look there


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Shape of one layer's cache. `window` 0 means full attention, else keys p - window + 1 .. p are visible to p."""

    num_kv_heads: int
    head_dim: int
    window: int = 0


@dataclass
class _Table:
    """Pages of one sequence in one group; pages[:first] have been dropped."""

    pages: list[int] = field(default_factory=list)
    first: int = 0


@dataclass
class _Entry:
    """One open sequence: a table for each group, and the prefix keys of its full pages."""

    tables: list[_Table]
    keys: list[bytes]


class PagePool:
    """Which pages are free, owned (with a count), or free but still holding a prefix that may be found again."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self.owners = [0] * num_pages
        self.page_of: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}

    def take(self, after: int | None) -> int:
        """A free page, the neighbour of `after` if it is free (so that short tables stay contiguous)."""
        if after is not None and after + 1 in self.free and after + 1 not in self.key_of:
            page = after + 1
            del self.free[page]
        else:
            page, _ = self.free.popitem(last=False)
        if (key := self.key_of.pop(page, None)) is not None:
            del self.page_of[key]
        assert self.owners[page] == 0
        self.owners[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more owner of a page found by its prefix."""
        self.free.pop(page, None)
        self.owners[page] += 1

    def drop(self, page: int) -> None:
        """One owner less; a page without owners is free, and reused last if it holds a prefix."""
        assert self.owners[page] > 0, f"page {page} is dropped twice"
        self.owners[page] -= 1
        if self.owners[page] == 0:
            self.free[page] = None
            if page not in self.key_of:
                self.free.move_to_end(page, last=False)

    def name(self, page: int, key: bytes) -> None:
        """Remember that `page` holds the prefix `key`, unless another page already does."""
        if key not in self.page_of:
            self.page_of[key] = page
            self.key_of[page] = key


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """Zeros that on a CPU take memory only where they are written: a cache is made for the worst case, and torch.zeros
    would touch every page of it. Aligned to 64 bytes for vector loads."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    raw = np.zeros(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)


class KVCache:
    """Keys and values of one model for many sequences.

    Layers with the same window form a group with its own pages and tables. `keys[l]`, `values[l]`: tensors
    (num_pages, page_size, num_kv_heads, head_dim). A sequence's rollback is `commit` with a smaller length: pages past
    it are dropped, and what is left in the last page is overwritten by the next pass.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        num_pages: int,
        page_size: int,
        max_window_pages: int = 1 << 30,
        prefix_reuse: bool = True,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        """`max_window_pages`: pages given to each sliding group (they need only windows, not contexts)."""
        self.page_size = page_size
        self.prefix_reuse = prefix_reuse
        self.windows = sorted({spec.window for spec in layers})
        self.group_of = [self.windows.index(spec.window) for spec in layers]
        sizes = [num_pages if window == 0 else min(num_pages, max_window_pages) for window in self.windows]
        self.pools = [PagePool(size) for size in sizes]
        self.keys, self.values = [], []
        for spec, group in zip(layers, self.group_of):
            shape = (sizes[group], page_size, spec.num_kv_heads, spec.head_dim)
            self.keys.append(_zeros(shape, dtype=dtype, device=device))
            self.values.append(_zeros(shape, dtype=dtype, device=device))
        self.sequences: dict[int, _Entry] = {}

    # -- a sequence's life: open, reserve, commit, (reserve, commit)*, close

    def open(self, seq_id: int, tokens: Sequence[int]) -> int:
        """Begin a sequence; returns how many of its first tokens are already cached (a multiple of the page size,
        and never all of them: the last token's logits must be computed)."""
        assert seq_id not in self.sequences, f"sequence {seq_id} is open"
        keys: list[bytes] = []
        if self.prefix_reuse:
            self._extend_keys(keys, tokens, (len(tokens) - 1) // self.page_size)
        num_hit = self._longest_hit(keys)
        tables = []
        for pool, window in zip(self.pools, self.windows):
            first = self._first_visible(num_hit * self.page_size, window)
            pages = [NO_PAGE] * first + [pool.page_of[key] for key in keys[first:num_hit]]
            for page in pages[first:]:
                pool.share(page)
            tables.append(_Table(pages=pages, first=first))
        self.sequences[seq_id] = _Entry(tables=tables, keys=keys[:num_hit])
        return num_hit * self.page_size

    def reserve(self, seq_id: int, length: int, *, ahead: int = 0) -> bool:
        """Own pages for positions 0 .. length - 1, in groups with full attention for `ahead` positions if that is more
        (a prompt that comes in chunks). False, and nothing changed, when there are not enough."""
        tables = self.sequences[seq_id].tables
        wanted = [-(-(length if window else max(length, ahead)) // self.page_size) for window in self.windows]
        if any(count - len(t.pages) > len(pool.free) for count, t, pool in zip(wanted, tables, self.pools)):
            return False
        for count, table, pool in zip(wanted, tables, self.pools):
            while len(table.pages) < count:
                last = table.pages[-1] if len(table.pages) > table.first else None
                table.pages.append(pool.take(last))
        return True

    def commit(self, seq_id: int, tokens: Sequence[int], length: int, *, num_final: int | None = None) -> None:
        """The first `length` of `tokens` are cached, and everything after is rolled back. `num_final` of them (None:
        all) will never be rolled back; it never falls."""
        keep = -(-length // self.page_size)
        final = length if num_final is None else min(length, num_final)
        entry = self.sequences[seq_id]
        num_named = len(entry.keys)
        if self.prefix_reuse:
            self._extend_keys(entry.keys, tokens, final // self.page_size)
        for table, pool, window in zip(entry.tables, self.pools, self.windows):
            while len(table.pages) > keep:
                pool.drop(table.pages.pop())
            for index in range(max(num_named, table.first), len(entry.keys)):
                pool.name(table.pages[index], entry.keys[index])
            first = min(self._first_visible(final, window), len(table.pages))
            for index in range(table.first, first):
                pool.drop(table.pages[index])
                table.pages[index] = NO_PAGE
            table.first = max(table.first, first)

    def close(self, seq_id: int) -> None:
        """Give every page of the sequence back. Full pages stay findable until they are needed."""
        for table, pool in zip(self.sequences.pop(seq_id).tables, self.pools):
            for page in reversed(table.pages[table.first :]):
                pool.drop(page)

    # -- what a pass needs

    def tables_and_slots(
        self, seq_ids: Sequence[int], row_starts: IntArray, positions: IntArray
    ) -> tuple[tuple[IntArray, ...], tuple[IntArray, ...]]:
        """Page tables (S, P) and write slots (T,) of each group; see model/batch.Packed."""
        all_tables, all_slots = [], []
        for group in range(len(self.pools)):
            lists = [self.sequences[seq_id].tables[group].pages for seq_id in seq_ids]
            table = np.zeros((len(lists), max(map(len, lists))), np.int32)
            for row, pages in zip(table, lists):
                row[: len(pages)] = pages
            owner = np.repeat(np.arange(len(lists)), np.diff(row_starts))
            page = table[owner, positions // self.page_size]
            all_slots.append((page * self.page_size + positions % self.page_size).astype(np.int32))
            all_tables.append(table)
        return tuple(all_tables), tuple(all_slots)

    def check(self) -> None:
        """Assert that every page is free or owned, and that counts agree with the tables."""
        for group, pool in enumerate(self.pools):
            counts = [0] * pool.num_pages
            for entry in self.sequences.values():
                table = entry.tables[group]
                for page in table.pages[table.first :]:
                    counts[page] += 1
            assert counts == pool.owners, f"group {group}: tables and counts disagree"
            for page, count in enumerate(counts):
                assert (count == 0) == (page in pool.free), f"group {group}: page {page} is free and owned, or neither"
            assert all(pool.page_of[key] == page for page, key in pool.key_of.items())
            assert len(pool.page_of) == len(pool.key_of)

    # -- inside

    def _first_visible(self, length: int, window: int) -> int:
        """Index of the first page that a token at position >= length can see."""
        return max(0, length - window + 1) // self.page_size if window else 0

    def _extend_keys(self, keys: list[bytes], tokens: Sequence[int], num_pages: int) -> None:
        """A chain of digests, one a full page, each over the page's tokens and everything before it. A digest of 128
        bits, not `hash`: a collision would answer with another request's context."""
        for index in range(len(keys), num_pages):
            page = array("i", tokens[index * self.page_size : (index + 1) * self.page_size]).tobytes()
            parent = keys[-1] if keys else b""
            keys.append(hashlib.blake2b(parent + page, digest_size=16).digest())

    def _longest_hit(self, keys: list[bytes]) -> int:
        """The largest number of pages such that every group still holds what the next token can see."""
        num_hit = 0
        full = [pool for pool, window in zip(self.pools, self.windows) if window == 0]
        sliding = [(pool, window) for pool, window in zip(self.pools, self.windows) if window]
        for count in range(1, len(keys) + 1):
            if any(keys[count - 1] not in pool.page_of for pool in full):
                break
            held = (
                all(key in pool.page_of for key in keys[self._first_visible(count * self.page_size, window) : count])
                for pool, window in sliding
            )
            if all(held):
                num_hit = count
        return num_hit
