"""AttentionMaker: the PagedAttention of each pass, over the fastest attention kernel that works here.
It must never trust a kernel that it has not tried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dspark.model.attention import PagedAttention
from dspark.model.batch import Packed, Span, pack
from dspark.model.cache import KVCache, LayerSpec


class AttentionMaker:
    """Makes the PagedAttention of each pass of one runner, with the fastest kernel that works on the cache's device.

    Which of torch's kernels read page tables depends on its version, the flash-attention build that is active, the
    processor, the head size and the page size; so each is tried once on a small ragged batch. On a CPU: "sdpa".
    """

    def __init__(self, *, num_heads: int, row_by_row: bool = False) -> None:
        self.num_heads = num_heads
        self.row_by_row = row_by_row
        self._kernels: dict[int, tuple[str, Callable[..., Any] | None]] = {}

    def __call__(self, packed: Packed, cache: KVCache) -> PagedAttention:
        if cache.page_size not in self._kernels:
            self._kernels[cache.page_size] = self._choose(cache)
        kernel, varlen = self._kernels[cache.page_size]
        return PagedAttention(packed, cache, kernel=kernel, row_by_row=self.row_by_row, varlen=varlen)

    def _choose(self, cache: KVCache) -> tuple[str, Callable[..., Any] | None]:
        pool = cache.keys[0]
        if self.row_by_row or pool.device.type != "cuda" or pool.dtype not in (torch.bfloat16, torch.float16):
            return "sdpa", None
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            return "sdpa", None
        for kernel in ("paged", "packed"):
            if kernel_works(kernel, varlen_attn, cache, num_heads=self.num_heads):
                return kernel, varlen_attn
        return "sdpa", None


def kernel_works(kernel: str, varlen: Callable[..., Any], cache: KVCache, *, num_heads: int) -> bool:
    """Whether the kernel runs on a cache of that shape and agrees with the explicit computation."""
    device, dtype = cache.keys[0].device, cache.keys[0].dtype
    _, page_size, num_kv_heads, head_dim = cache.keys[0].shape
    shape = dict(num_kv_heads=num_kv_heads, head_dim=head_dim)
    specs = [LayerSpec(**shape), LayerSpec(**shape, window=page_size + 3)]
    small = KVCache(specs, num_pages=8, page_size=page_size, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    for pool in small.keys + small.values:
        pool.normal_(generator=generator)
    starts, counts = (2 * page_size + 1, 0), (3, 1)
    for seq, (start, count) in enumerate(zip(starts, counts, strict=True)):
        small.open(seq, [0] * (start + count))
        small.reserve(seq, start + count)
    spans = [Span(seq_id=seq, start=starts[seq], tokens=[0] * counts[seq], num_logits=0) for seq in range(2)]
    packed = pack(spans, small)
    q = torch.randn(4, num_heads, head_dim, generator=generator, device=device).to(dtype)
    try:
        attention = PagedAttention(packed, small, kernel=kernel, varlen=varlen)
        got = [attention.attend(layer, q, scale=head_dim**-0.5) for layer in range(2)]
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    reference = PagedAttention(packed, small)
    wanted = [reference.attend(layer, q, scale=head_dim**-0.5) for layer in range(2)]
    return all(bool((a.float() - b.float()).abs().max() < 0.05) for a, b in zip(got, wanted, strict=True))
