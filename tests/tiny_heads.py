"""Tiny DSpark heads with fixed random weights for tiny targets, and what training would compute with them.
They must never be trained: agreement with the target is a matter of `similar`, not of luck."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.heads.rope import rope_tables
from dspark.heads.semi_ar import SemiAutoregressiveHead
from dspark.model.families import extract
from dspark.train.answers import Example
from dspark.train.blocks import make_blocks, run_blocks
from dspark.train.recipe import HeadRecipe
from dspark.train.start import config_for, new_head, rope_of
from dspark.train.states import TargetStates

BLOCK = 4


def tiny_head(
    model: Any,
    *,
    kind: str = "dspark",
    context: str = "target",
    layers: Sequence[int] = (0, 2),
    markov: str = "vanilla",
    rank: int = 8,
    draft_vocab: int | None = None,
    feature: bool = True,
    confidence: bool = True,
    seed: int = 0,
) -> Any:
    """A head for a tiny transformers model: its weights where the context is the target's, else random."""
    if kind == "eagle3":
        context = "fused"
    weights, reason = extract(model)
    assert weights is not None, reason
    recipe = HeadRecipe(
        kind=kind,
        context=context,
        layers=tuple(layers),
        num_layers=2,
        block_size=BLOCK,
        anchor_feature=feature,
        markov_rank=rank,
        markov_type=markov,
        confidence=confidence,
    )
    rope = rope_of(model.config)
    size = draft_vocab or weights.vocab_size
    config = config_for(recipe, weights, rope=rope, draft_vocab_size=size)
    ids = torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(weights.vocab_size)[:size]))
    head = new_head(config, weights, ids, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    feature = config.anchor_feature
    with torch.no_grad():
        if config.markov_rank:
            head.markov_head.markov_w2.weight.normal_(std=0.7, generator=generator)
        if feature:
            head.feature_proj.weight.normal_(std=0.3 / weights.hidden_size**0.5, generator=generator)
        if context == "fused":
            for parameter in head.layers.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(std=1.5 / parameter.shape[1] ** 0.5, generator=generator)
    return head.eval().requires_grad_(False)


def training_view(head: SemiAutoregressiveHead, runner: Any, tokens: Sequence[int], anchors: Sequence[int]) -> Tensor:
    """Hidden (N, B, D) of the blocks at `anchors` as training computes them: one pass over the whole text."""
    example = Example(tokens=tuple(tokens), num_prompt=1, task="t", temperature=0.0, held_out=False)
    states = TargetStates(runner, head.config, max_tokens=len(tokens) + 1)([example.tokens])
    blocks = make_blocks([example], [list(anchors)], head.config.block_size)
    with torch.no_grad():
        return run_blocks(head, blocks, states, rope_tables(head.config, head.config.max_positions))
