"""Block passes of a DSpark head over the target's paged cache: all rows at once, natively on a CPU or in torch.
They must never write where a committed token's key lies.

Shapes: R rows (one block each), B positions of a block, T = R B, D hidden, W draft vocabulary, L layers of the head,
G key-value heads, E head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dspark.heads.blocks import Context
from dspark.heads.rope import rope_tables
from dspark.heads.semi_ar import SemiAutoregressiveHead, block_positions
from dspark.model.batch import IntArray, Span, pack
from dspark.model.cache import KVCache, LayerSpec
from dspark.model.weights import DecoderWeights, LayerWeights

Blocks = tuple[Tensor, Tensor]
"""Base logits (R, B, W) float32, without the Markov bias, and final hidden states (R, B, D)."""


class BlockRunner(Protocol):
    """Runs one block a row. `seq_ids`: sequences open in the cache, with all tokens before their anchor cached;
    anchors (R,): positions; `tokens` (R): the anchors' ids; features (R, D): the target's final state of the token
    before each, where the head wants one. `places`: places past the cached tokens that a block is written to, 0 when
    it is written nowhere."""

    places: int

    def __call__(
        self, seq_ids: Sequence[int], anchors: IntArray, tokens: Sequence[int], features: Tensor | None
    ) -> Blocks: ...


def context_layers(head: SemiAutoregressiveHead, num_target_layers: int) -> tuple[int, ...]:
    """Layers of the cache that the head's layers read: the target's own, or those added behind them for the head."""
    config = head.config
    if config.context == "target":
        return config.target_layer_ids
    return tuple(range(num_target_layers, num_target_layers + config.num_layers))


def added_layers(head: SemiAutoregressiveHead) -> list[LayerSpec]:
    """Cache layers that the head needs beside the target's."""
    config = head.config
    if config.context == "target":
        return []
    return [LayerSpec(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)] * config.num_layers


class TorchBlocks:
    """The network itself, on any device. The context is gathered from the cache row by row."""

    places = 0

    def __init__(self, head: SemiAutoregressiveHead, cache: KVCache, layers: Sequence[int]) -> None:
        self.head = head
        self.cache = cache
        self.layers = tuple(layers)
        self.rope = rope_tables(head.config, head.config.max_positions, device=cache.keys[0].device)

    @torch.no_grad()
    def __call__(
        self, seq_ids: Sequence[int], anchors: IntArray, tokens: Sequence[int], features: Tensor | None
    ) -> Blocks:
        device = self.cache.keys[0].device
        inputs = self.head.inputs(torch.tensor(tokens, device=device), features)
        at = torch.from_numpy(anchors).to(device).long()
        contexts = []
        for layer in self.layers:
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            group = self.cache.group_of[layer]
            found = [self._pages(seq_id, group, int(anchor)) for seq_id, anchor in zip(seq_ids, anchors)]
            contexts.append(
                Context(
                    keys=[keys[pages].flatten(0, 1)[: int(a)] for pages, a in zip(found, anchors)],
                    values=[values[pages].flatten(0, 1)[: int(a)] for pages, a in zip(found, anchors)],
                    counts=[1] * len(seq_ids),
                    anchors=at,
                    window=self.cache.windows[group],
                )
            )
        positions = block_positions(at, self.head.config.num_rows)
        cos, sin = self.rope
        hidden = self.head(inputs.to(self.head.dtype), (cos[positions], sin[positions]), contexts)
        return self.head.lm_head(hidden).float(), hidden

    def _pages(self, seq_id: int, group: int, length: int) -> Tensor:
        pages = self.cache.sequences[seq_id].tables[group].pages[: -(-length // self.cache.page_size)]
        return torch.tensor(pages, dtype=torch.long, device=self.cache.keys[0].device)


class NativeBlocks:
    """One C++ call for all rows. A block's own keys and values go to the places behind the sequence's cached tokens,
    which the target's next pass overwrites."""

    def __init__(
        self,
        head: SemiAutoregressiveHead,
        cache: KVCache,
        layers: Sequence[int],
        *,
        quantization: str | None,
        threads: int | None,
    ) -> None:
        from dspark.model.native import NativeRunner

        self.cache = cache
        self.block, self.places = head.config.block_size, head.config.num_rows
        self.runner = NativeRunner(
            decoder_weights(head, dtype=cache.keys[0].dtype),
            quantization=quantization,
            threads=threads,
            compress=False,
            cache_layers=layers,
        )
        self.final = self.runner.num_layers
        self.inputs = _Inputs(head)

    @torch.no_grad()
    def __call__(
        self, seq_ids: Sequence[int], anchors: IntArray, tokens: Sequence[int], features: Tensor | None
    ) -> Blocks:
        block, num_rows = self.block, self.places
        spans = [
            Span(seq_id=seq_id, start=int(anchor), tokens=[0] * num_rows, num_logits=block)
            for seq_id, anchor in zip(seq_ids, anchors)
        ]
        reach = np.repeat(anchors + np.int32(num_rows - 1), num_rows).astype(np.int32)
        flat = self.inputs(tokens, features)
        output = self.runner.forward(pack(spans, self.cache), self.cache, taps=(self.final,), inputs=flat, reach=reach)
        hidden = output.taps[0].view(len(spans), num_rows, -1)[:, -block:].contiguous()
        return output.logits.view(len(spans), block, -1), hidden


class _Inputs:
    """SemiAutoregressiveHead.inputs in float32 with as few operators as it takes: on a CPU each costs as much as a
    hundredth of the pass, and more when others use the machine. What is returned is overwritten by the next call."""

    def __init__(self, head: SemiAutoregressiveHead) -> None:
        config = head.config
        self.embed = head.embed_tokens.weight
        self.project = head.feature_proj.weight.detach().float().T.contiguous() if config.anchor_feature else None
        with torch.no_grad():
            nothing = torch.zeros(1, config.hidden_size) if config.anchor_feature else None
            self.like = head.inputs(torch.zeros(1, dtype=torch.long), nothing).float()
        self.buffer = self.like

    def __call__(self, tokens: Sequence[int], features: Tensor | None) -> Tensor:
        """tokens (R), features (R, D) -> (R rows, D) float32."""
        if len(tokens) > len(self.buffer):
            self.buffer = self.like.repeat(len(tokens), 1, 1)
        buffer = self.buffer[: len(tokens)]
        first = self.embed[list(tokens)].float()
        if self.project is not None:
            assert features is not None
            first = torch.addmm(first, features.float(), self.project)
        buffer[:, 0] = first
        return buffer.flatten(0, 1)


def decoder_weights(head: SemiAutoregressiveHead, *, dtype: torch.dtype) -> DecoderWeights:
    """The head's backbone as plain weights; inputs are handed over, so no embedding is kept."""
    config, state = head.config, head.state_dict()

    def layer(i: int) -> LayerWeights:
        def weight(name: str) -> Tensor:
            return state[f"layers.{i}.{name}.weight"].to(dtype)

        def joined(kind: str, names: Sequence[str]) -> Tensor:
            return torch.cat([state[f"layers.{i}.self_attn.{name}_proj.{kind}"].to(dtype) for name in names])

        norm = {name: state.get(f"layers.{i}.self_attn.{name}_norm.weight") for name in "qk"}
        return LayerWeights(
            attn_norm=state[f"layers.{i}.input_layernorm.weight"].float(),
            qkv=joined("weight", "qkv"),
            qkv_bias=joined("bias", "qkv") if config.qkv_bias else None,
            q_norm=norm["q"],
            k_norm=norm["k"],
            o=weight("self_attn.o_proj"),
            o_bias=joined("bias", "o") if config.o_bias else None,
            post_attn_norm=None,
            mlp_norm=state[f"layers.{i}.post_attention_layernorm.weight"].float(),
            gate_up=torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]),
            down=weight("mlp.down_proj"),
            post_mlp_norm=None,
        )

    return DecoderWeights(
        layers=[layer(i) for i in range(config.num_layers)],
        embed=torch.zeros(1, config.hidden_size, dtype=dtype),
        head=state["lm_head.weight"].to(dtype),
        norm=state["norm.weight"].float(),
        rope_tables=[rope_tables(config, config.max_positions)],
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        activation="silu",
        eps=config.rms_norm_eps,
        attn_scale=config.head_dim**-0.5,
    )


def native_chain(head: SemiAutoregressiveHead, *, threads: int, exact_weights: bool = False) -> Any:
    """The sequential part for greedy rows in C++. `exact_weights`: W2 in float32 rather than bfloat16."""
    from dspark.model.chain import NativeChain

    markov, confidence = head.markov_head, head.confidence_head
    gate = None
    if markov is not None and markov.kind != "vanilla":
        linear = markov.gate_proj if markov.kind == "gated" else markov.joint_proj
        gate = (linear.weight, linear.bias)
    return NativeChain(
        words=head.draft_ids,
        hidden_size=head.config.hidden_size,
        kind="vanilla" if markov is None else markov.kind,
        first=None if markov is None else markov.markov_w1.weight,
        second=None if markov is None else markov.markov_w2.weight,
        gate=gate,
        confidence=None if confidence is None else (confidence.proj.weight, confidence.proj.bias),
        threads=threads,
        exact_weights=exact_weights,
    )
