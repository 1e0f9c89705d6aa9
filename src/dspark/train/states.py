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


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """The same of one sequence: a tensor a layer, a layer, a tap."""

    keys: list[Tensor]
    values: list[Tensor]
    taps: list[Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values, *self.taps))


class TargetStates:
    """Packed passes of the target over whole sequences, at most `max_tokens` in one."""

    def __init__(
        self,
        runner: Any,
        config: HeadConfig,
        *,
        max_tokens: int = 4096,
        extra_taps: Sequence[int] = (),
        keep_bytes: int = 0,
    ) -> None:
        """`extra_taps`: further taps, after those of the head. States of up to `keep_bytes` are kept, first come,
        for when the same sequence is asked for again."""
        self.runner = runner
        self.layers = config.target_layer_ids if config.context == "target" else ()
        self.taps = (*config.taps, *extra_taps)
        self.max_tokens = max_tokens
        self.room = keep_bytes
        self.kept: dict[tuple[int, ...], _Kept] = {}
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
        wanted = [tuple(tokens) for tokens in sequences]
        parts = {tokens: self.kept[tokens] for tokens in wanted if tokens in self.kept}
        missing = [tokens for tokens in dict.fromkeys(wanted) if tokens not in parts]
        first = 0
        while first < len(missing):
            last = first + 1
            while last < len(missing) and self._fits(missing[first : last + 1]):
                last += 1
            for tokens, part in zip(missing[first:last], self._run(missing[first:last])):
                parts[tokens] = part
                self._keep(tokens, part)
            first = last
        found = [parts[tokens] for tokens in wanted]
        starts = [0]
        for row in sequences:
            starts.append(starts[-1] + len(row))
        return States(
            sequences=sequences,
            keys=[[part.keys[i] for part in found] for i in range(len(self.layers))],
            values=[[part.values[i] for part in found] for i in range(len(self.layers))],
            taps=[torch.cat([part.taps[i] for part in found]) for i in range(len(self.taps))],
            starts=starts,
        )

    def _keep(self, tokens: tuple[int, ...], part: _Kept) -> None:
        if part.num_bytes <= self.room:
            self.room -= part.num_bytes
            # Slices of a pass would hold the whole of it.
            self.kept[tokens] = _Kept(
                keys=[t.clone() for t in part.keys],
                values=[t.clone() for t in part.values],
                taps=[t.clone() for t in part.taps],
            )

    def _fits(self, sequences: Sequence[Sequence[int]]) -> bool:
        num_pages = sum(-(-len(tokens) // PAGE) for tokens in sequences)
        return num_pages <= self.num_pages and sum(map(len, sequences)) <= self.max_tokens

    def _run(self, sequences: Sequence[Sequence[int]]) -> list[_Kept]:
        cache, spans = self.cache, []
        for i, tokens in enumerate(sequences):
            cache.open(i, tokens)
            assert cache.reserve(i, len(tokens)), "a sequence is longer than TargetStates.max_tokens"
            spans.append(Span(seq_id=i, start=0, tokens=tokens, num_logits=0))
        output = self.runner.forward(pack(spans, cache), cache, taps=self.taps)
        taps = [tap.split([len(tokens) for tokens in sequences]) for tap in output.taps]
        parts = []
        for i, tokens in enumerate(sequences):
            pages = [cache.sequences[i].tables[cache.group_of[layer]].pages for layer in self.layers]
            keys = [cache.keys[l][p].flatten(0, 1)[: len(tokens)] for l, p in zip(self.layers, pages)]
            values = [cache.values[l][p].flatten(0, 1)[: len(tokens)] for l, p in zip(self.layers, pages)]
            parts.append(_Kept(keys=keys, values=values, taps=[tap[i] for tap in taps]))
            cache.close(i)
        return parts
