"""Driver: plays the engine's part towards a ModelRunner in tests: open, reserve, pack, forward, commit.
It must never look inside a runner, and never keep a token that was rolled back."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.model.batch import Span, pack
from dspark.model.cache import KVCache
from dspark.model.runner import ModelRunner, build_runner

PATHS = ("general", "torch", "native")


def runner_of(model: Any, path: str, **options: Any) -> ModelRunner:
    """A runner on the path asked for; skips the test where the machine has no C++ compiler."""
    if path == "native":
        assert importlib.util.find_spec("dspark.model.native") is not None
        from dspark.model.build import library, reason

        if library() is None:
            pytest.skip(f"native path: {reason()}")
    return build_runner(model, path=path, **options)


def own_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """(T, V) float32: what transformers' own forward says."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()


class Driver:
    """Sequences on one cache. `texts[i]`: the committed tokens of sequence i."""

    def __init__(
        self, runner: ModelRunner, *, page_size: int = 4, num_pages: int = 256, prefix_reuse: bool = False
    ) -> None:
        self.runner = runner
        self.cache = KVCache(
            runner.layer_specs,
            num_pages=num_pages,
            page_size=page_size,
            prefix_reuse=prefix_reuse,
            dtype=runner.cache_dtype,
            device=runner.device,
        )
        self.texts: dict[int, list[int]] = {}
        self.taps: list[Tensor] = []

    def open(self, seq_id: int, prompt: Sequence[int] = ()) -> int:
        """Begin a sequence; returns how many tokens of its prompt are cached already (they count as committed)."""
        num_hit = self.cache.open(seq_id, prompt)
        self.texts[seq_id] = list(prompt[:num_hit])
        return num_hit

    def close(self, seq_id: int) -> None:
        self.cache.close(seq_id)
        del self.texts[seq_id]

    def step(
        self,
        new: Mapping[int, Sequence[int]],
        *,
        keep: Mapping[int, int] | None = None,
        num_logits: Mapping[int, int] | None = None,
        taps: Sequence[int] = (),
    ) -> dict[int, Tensor]:
        """One pass over `new` tokens of some sequences. Returns each sequence's logits (n, V): of all its new tokens,
        or of the last `num_logits`. The first `keep` (default: all) of the new tokens stay, the rest is rolled back."""
        spans = []
        for seq_id, tokens in new.items():
            start = len(self.texts[seq_id])
            assert self.cache.reserve(seq_id, start + len(tokens))
            wanted = len(tokens) if num_logits is None else num_logits[seq_id]
            spans.append(Span(seq_id=seq_id, start=start, tokens=tokens, num_logits=wanted))
        out = self.runner.forward(pack(spans, self.cache), self.cache, taps=taps)
        self.taps = out.taps
        for seq_id, tokens in new.items():
            kept = len(tokens) if keep is None else keep[seq_id]
            self.texts[seq_id] += tokens[:kept]
            self.cache.commit(seq_id, self.texts[seq_id], len(self.texts[seq_id]))
        self.cache.check()
        parts = out.logits.split([span.num_logits for span in spans])
        return {span.seq_id: part for span, part in zip(spans, parts, strict=True)}
