"""DecoderWeights: a decoder-only transformer of the Llama / Mistral / Qwen2 / Qwen3 / Gemma3 kind, as plain data.
It must never know a family's name: what differs between families is which fields are set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dspark.model.quantised import Quantised, Weight


def dense(weight: Weight) -> Tensor:
    """A weight that was never quantised; what needs such weights asks first whether they are."""
    assert not isinstance(weight, Quantised)
    return weight


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer. D hidden, H heads, G key-value heads, E head_dim, F intermediate.

    qkv ((H + 2G) E, D): query, key, value rows one after another. gate_up (2F, D): gate rows, then up rows.
    Norm weights are final multipliers in float32 (Gemma's 1 + w already added). `window` 0 is full attention.
    `rope` indexes DecoderWeights.rope_tables. Weights of linears may be quantised (model/quantised).
    """

    attn_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    o_bias: Tensor | None
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Weight
    down: Weight
    post_mlp_norm: Tensor | None
    window: int = 0
    rope: int = 0


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """The whole model.

    embed (V, D), head (V, D) (the same tensor when tied), norm (D,) float32. `embed_scale` multiplies embeddings
    (Gemma: sqrt(D), rounded to the model's dtype as transformers does). rope_tables: pairs (cos, sin), each
    (max_context, E) float32 in transformers' half-rotation layout, attention scaling included.
    activation: "silu" or "gelu_tanh". `eps` of every RMS norm; `attn_scale` multiplies q.k.
    logit_softcap 0 means none.
    """

    layers: Sequence[LayerWeights]
    embed: Tensor
    head: Weight
    norm: Tensor
    rope_tables: Sequence[tuple[Tensor, Tensor]]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    eps: float
    attn_scale: float
    embed_scale: float = 1.0
    logit_softcap: float = 0.0

    @property
    def hidden_size(self) -> int:
        return int(self.embed.shape[1])

    @property
    def vocab_size(self) -> int:
        return int(self.head.shape[0])

    @property
    def max_context(self) -> int:
        return int(self.rope_tables[0][0].shape[0])
