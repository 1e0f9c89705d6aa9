"""TargetStates: keys, values and hidden states of the frozen target, made on the fly for a few answers.
It must never compute them in another way than the engine does: the same runner, the same cache.

Shapes: S_i tokens of sequence i, T all of them, D hidden, G key-value heads, E head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.heads.config import HeadConfig
from dspark.model.batch import Span, pack
from dspark.model.cache import KVCache

PAGE = 16


@dataclass(frozen=True, kw_only=True)
class States:
    """Of some sequences: keys[l][i], values[l][i] (S_i, G, E) of the l-th layer that the head reads (context "target"),
    taps: (T, D) each, in HeadConfig.taps' order; starts: where each sequence begins in T, and T at the end."""

    sequences: Sequence[Sequence[int]]

    keys: list[list[Tensor]]
    values: list[list[Tensor]]
    taps: list[Tensor]
    starts: list[int]

    def of_sequence(self, tap: Tensor, index: int) -> Tensor:
        """(S_i, D)."""
        return tap[self.starts[index] : self.starts[index + 1]]


class TargetStates:
    """Packed passes of the target over whole sequences, at most `max_tokens` in one."""

    def __init__(
        self, runner: Any, config: HeadConfig, *, max_tokens: int = 4096, extra_taps: Sequence[int] = ()
    ) -> None:
        """`extra_taps`: further taps, after those of the head."""
        self.runner = runner
        self.layers = config.target_layer_ids if config.context == "target" else ()
        self.taps = (*config.taps, *extra_taps)
        self.max_tokens = max_tokens
        specs = list(runner.layer_specs)
        self.num_pages = window_pages = -(-max_tokens // PAGE) + 64
        self.cache = KVCache(
            specs,
            num_pages=window_pages,
            page_size=PAGE,
            max_window_pages=window_pages,
            prefix_reuse=False,
            dtype=runner.cache_dtype,
            device=runner.device,
        )

    def __call__(self, sequences: Sequence[Sequence[int]]) -> States:
        """One pass after another until all sequences are done. Each must have at most `max_tokens` tokens."""
        starts = [0]
        for tokens in sequences:
            starts.append(starts[-1] + len(tokens))
        keys: list[list[Tensor]] = [[] for _ in self.layers]
        values: list[list[Tensor]] = [[] for _ in self.layers]
        taps: list[list[Tensor]] = [[] for _ in self.taps]
        first = 0
        while first < len(sequences):
            last = first + 1
            while last < len(sequences) and self._fits(sequences[first : last + 1]):
                last += 1
            self._run(sequences[first:last], keys, values, taps)
            first = last
        return States(
            sequences=sequences, keys=keys, values=values, taps=[torch.cat(parts) for parts in taps], starts=starts
        )

    def _fits(self, sequences: Sequence[Sequence[int]]) -> bool:
        num_pages = sum(-(-len(tokens) // PAGE) for tokens in sequences)
        return num_pages <= self.num_pages and sum(map(len, sequences)) <= self.max_tokens

    def _run(self, sequences: Sequence[Sequence[int]], keys: Any, values: Any, taps: Any) -> None:
        cache, spans = self.cache, []
        for i, tokens in enumerate(sequences):
            cache.open(i, tokens)
            assert cache.reserve(i, len(tokens)), "a sequence is longer than TargetStates.max_tokens"
            spans.append(Span(seq_id=i, start=0, tokens=tokens, num_logits=0))
        output = self.runner.forward(pack(spans, cache), cache, taps=self.taps)
        for found, tap in zip(taps, output.taps):
            found.append(tap)
        for i, tokens in enumerate(sequences):
            for found_keys, found_values, layer in zip(keys, values, self.layers):
                pages = cache.sequences[i].tables[cache.group_of[layer]].pages
                found_keys.append(cache.keys[layer][pages].flatten(0, 1)[: len(tokens)])
                found_values.append(cache.values[layer][pages].flatten(0, 1)[: len(tokens)])
            cache.close(i)
