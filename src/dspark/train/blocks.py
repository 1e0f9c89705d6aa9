"""Blocks: anchors chosen in answers, and everything a head needs to learn from them.
It must never choose an anchor in a prompt, nor a label outside the answer.

Shapes: N blocks, B positions of a block, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.heads.blocks import Context, Rope
from dspark.heads.eagle import EagleHead
from dspark.heads.semi_ar import SemiAutoregressiveHead, block_positions
from dspark.train.answers import Example
from dspark.train.states import States


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks ordered by sequence: counts[i] of sequence i. anchors (N,): positions. previous, tokens (N, B) target
    ids: the token before each position's, and the position's own, 0 where the answer has ended; valid (N, B)."""

    counts: list[int]
    anchors: Tensor
    previous: Tensor
    tokens: Tensor
    valid: Tensor

    def to(self, device: torch.device) -> Blocks:
        """The same blocks on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("anchors", "previous", "tokens", "valid")}
        return Blocks(counts=self.counts, **moved)


def choose_anchors(example: Example, most: int, rng: np.random.Generator) -> list[int]:
    """Up to `most` distinct anchors, ascending. An anchor is a token of the answer that has one after it."""
    candidates = np.arange(example.num_prompt, len(example.tokens) - 1)
    if len(candidates) > most:
        candidates = np.sort(rng.choice(candidates, most, replace=False))
    return candidates.tolist()


def make_blocks(examples: Sequence[Example], anchors: Sequence[Sequence[int]], block_size: int) -> Blocks:
    """The blocks at the given anchors."""
    rows, valid, positions = [], [], []
    for example, chosen in zip(examples, anchors, strict=True):
        padded = np.zeros(len(example.tokens) + block_size, np.int64)
        padded[: len(example.tokens)] = example.tokens
        for anchor in chosen:
            rows.append(padded[anchor : anchor + block_size + 1])
            valid.append(np.arange(anchor + 1, anchor + block_size + 1) < len(example.tokens))
            positions.append(anchor)
    table = torch.from_numpy(np.stack(rows))
    return Blocks(
        counts=[len(chosen) for chosen in anchors],
        anchors=torch.tensor(positions),
        previous=table[:, :-1],
        tokens=table[:, 1:],
        valid=torch.from_numpy(np.stack(valid)),
    )


Head = SemiAutoregressiveHead | EagleHead


def teacher_forced(
    head: Head, blocks: Blocks, states: States, rope: Rope
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What logits are made of, given the answer's tokens before each position: final hidden (N, B, D) and the Markov
    head's latents (N, B, r) (see `output_logits`), and confidence logits (N, B)."""
    if isinstance(head, EagleHead):
        steps, _ = _eagle_steps(head, blocks, states, rope, tokens=blocks.previous)
        return head.norm(torch.stack(steps, dim=1)), None, None
    hidden = run_blocks(head, blocks, states, rope)
    confidence = None if head.confidence_head is None else head.confidence(hidden, blocks.previous)
    latents = None if head.markov_head is None else head.markov_head.latents(blocks.previous, hidden)
    return hidden, latents, confidence


def output_logits(head: Head, hidden: Tensor, latents: Tensor | None) -> Tensor:
    """(..., D) and (..., r) -> (..., W)."""
    logits = head.lm_head(hidden)
    if latents is not None:
        assert isinstance(head, SemiAutoregressiveHead) and head.markov_head is not None
        logits = logits + head.markov_head.markov_w2(latents)
    return logits


def greedy_chains(head: Head, blocks: Blocks, states: States, rope: Rope) -> tuple[Tensor, Tensor]:
    """What greedy requests are served: tokens (N, B) target ids and the logits (N, B) of their acceptance."""
    if isinstance(head, SemiAutoregressiveHead):
        return head.draft_greedily(run_blocks(head, blocks, states, rope), blocks.previous[:, 0])
    _, found = _eagle_steps(head, blocks, states, rope, tokens=None)
    logits = torch.stack(found, dim=1).float()
    sure = torch.logit(logits.softmax(dim=-1).amax(dim=-1), eps=1e-4)
    return head.draft_ids[logits.argmax(dim=-1)], sure


def _eagle_steps(
    head: EagleHead, blocks: Blocks, states: States, rope: Rope, *, tokens: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Hidden states (N, D) of each step, and its logits (N, W) where they decide what the next one reads.

    The first step takes the target's state of the token before the anchor, the later ones the head's own
    (training-time test, EAGLE-3, section 3.2). `tokens` (N, B): what each step reads; None: what the step before
    drafted."""
    cos, sin = rope
    features = head.fuse(states.taps[: len(head.config.target_layer_ids)])
    lengths = [stop - start for start, stop in zip(states.starts, states.starts[1:])]
    keys, values = [], []
    for part, ids in zip(features.split(lengths), states.sequences, strict=True):
        place = torch.arange(len(part) - 1, device=cos.device)
        following = torch.tensor(ids[1:], device=cos.device)
        k, v = head.keys_values(following, part[:-1], (cos[place], sin[place]))
        keys.append(k)
        values.append(v)
    rows_before = blocks.anchors - 1
    context = Context(keys=keys, values=values, counts=blocks.counts, anchors=rows_before)
    feature, read, rows = features[anchor_rows(blocks, states) - 1], blocks.previous[:, 0], None
    hidden, logits = [], []
    for j in range(head.config.block_size):
        place = rows_before + j
        feature, rows = head(read, feature, (cos[place], sin[place]), context, rows)
        hidden.append(feature)
        if tokens is None:
            logits.append(head.logits(feature))
            read = head.draft_ids[logits[j].argmax(dim=-1)]
        elif j + 1 < head.config.block_size:
            read = tokens[:, j + 1]
    return hidden, logits


def run_blocks(head: SemiAutoregressiveHead, blocks: Blocks, states: States, rope: Rope) -> Tensor:
    """Hidden (N, B, D) of the blocks, by the context that the head's configuration names."""
    config = head.config
    cos, sin = rope
    if config.context == "target":
        keys, values = states.keys, states.values
    else:
        keys, values = _fused(head, states, rope)
    contexts = [Context(keys=k, values=v, counts=blocks.counts, anchors=blocks.anchors) for k, v in zip(keys, values)]
    positions = block_positions(blocks.anchors, config.num_rows)
    inputs = head.inputs(blocks.previous[:, 0], features_of(head, blocks, states))
    return head(inputs, (cos[positions], sin[positions]), contexts)


def anchor_rows(blocks: Blocks, states: States) -> Tensor:
    """(N,): the row of each anchor among the T tokens of the states."""
    starts = torch.repeat_interleave(torch.tensor(states.starts[:-1]), torch.tensor(blocks.counts))
    return starts.to(blocks.anchors.device) + blocks.anchors


def features_of(head: SemiAutoregressiveHead, blocks: Blocks, states: States) -> Tensor | None:
    """(N, D): the target's final hidden state of the token before each anchor."""
    if not head.config.anchor_feature:
        return None
    tap = states.taps[len(head.config.taps) - 1]
    return tap[anchor_rows(blocks, states) - 1]


def _fused(head: SemiAutoregressiveHead, states: States, rope: Rope) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Keys and values per layer and sequence from the fused states of all tokens."""
    cos, sin = rope
    count = len(head.config.target_layer_ids)
    lengths = [stop - start for start, stop in zip(states.starts, states.starts[1:])]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(cos.device)
    pairs = head.context_of(head.fuse(states.taps[:count]), (cos[positions], sin[positions]))
    return [list(k.split(lengths)) for k, _ in pairs], [list(v.split(lengths)) for _, v in pairs]
