"""TorchRunner: DecoderWeights run in torch with fused projections, on CPU or GPU.
It must never know a model family, nor hold more of the weights than it multiplies with.

Shapes: R rows that want logits, T packed tokens, V vocabulary, D hidden, H heads, G key-value heads, E head_dim,
F intermediate, N positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.model.attention import PagedAttention
from dspark.model.batch import Packed
from dspark.model.cache import KVCache, LayerSpec
from dspark.model.kernels import AttentionMaker
from dspark.model.linear import Linear, make_linear
from dspark.model.runner import Output
from dspark.model.weights import DecoderWeights, LayerWeights


class TorchRunner:
    """Runs packed passes; see ModelRunner. Activations are in the weights' dtype, norms and rotations in float32."""

    name = "torch"

    def __init__(
        self, weights: DecoderWeights, *, exact: bool = False, quantization: str | None = None, prepack: bool = True
    ) -> None:
        """exact: linears in fixed row tiles and attention row by row (CPU). quantization: None or "int8". prepack: see
        make_linear."""
        assert not exact or weights.embed.device.type == "cpu"
        self.exact = exact
        self.layer_specs = [
            LayerSpec(num_kv_heads=weights.num_kv_heads, head_dim=weights.head_dim, window=layer.window)
            for layer in weights.layers
        ]
        self.vocab_size = weights.vocab_size
        self.hidden_size = weights.hidden_size
        self.num_layers = len(weights.layers)
        self.max_context = weights.max_context
        self.cache_dtype = weights.embed.dtype
        self.device = weights.embed.device
        self._embed = weights.embed
        self._embed_scale = weights.embed_scale
        self._norm = weights.norm
        self._eps = weights.eps
        self._softcap = weights.logit_softcap
        self._rope_tables = weights.rope_tables
        make = partial(make_linear, dtype=self.cache_dtype, exact=exact, quantization=quantization, prepack=prepack)
        self._head = make(weights.head)
        self._layers = [_Layer(layer, weights, index, make) for index, layer in enumerate(weights.layers)]
        self._attention = AttentionMaker(num_heads=weights.num_heads, row_by_row=exact)

    @torch.no_grad()
    def forward(self, packed: Packed, cache: KVCache, *, taps: Sequence[int] = ()) -> Output:
        """See ModelRunner.forward. Taps are in the weights' dtype."""
        wanted = set(taps)
        assert wanted <= set(range(self.num_layers + 1)), f"taps {taps} of a model with {self.num_layers} layers"
        attention = self._attention(packed, cache)
        positions = torch.from_numpy(packed.positions).to(self.device)
        ropes = [(cos[positions][:, None], sin[positions][:, None]) for cos, sin in self._rope_tables]
        x = F.embedding(torch.from_numpy(packed.tokens).to(self.device), self._embed)
        if self._embed_scale != 1.0:
            x = x * self._embed_scale
        found: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in wanted:
                found[index] = x
            x = layer(x, ropes[layer.rope], attention)
        last = self.num_layers
        rows = torch.from_numpy(packed.logit_rows).to(self.device)
        if last in wanted:
            found[last] = rms_norm(x, self._norm, self._eps)
            final = found[last][rows]
        else:
            final = rms_norm(x[rows], self._norm, self._eps)
        return Output(logits=self._logits(final), taps=[found[tap] for tap in taps])

    def _logits(self, final: Tensor) -> Tensor:
        """final (R, D) -> (R, V) float32."""
        if final.shape[0] == 0:
            return final.new_zeros(0, self.vocab_size, dtype=torch.float32)
        logits = self._head(final).float()
        return self._softcap * torch.tanh(logits / self._softcap) if self._softcap else logits


class _Layer:
    """One decoder layer: (T, D) -> (T, D)."""

    def __init__(
        self, layer: LayerWeights, weights: DecoderWeights, index: int, make_linear: Callable[..., Linear]
    ) -> None:
        self.index = index
        self.rope = layer.rope
        self.norms = layer.attn_norm, layer.post_attn_norm, layer.mlp_norm, layer.post_mlp_norm
        self.qk_norms = layer.q_norm, layer.k_norm
        self.qkv = make_linear(layer.qkv, layer.qkv_bias)
        self.o = make_linear(layer.o, layer.o_bias)
        self.gate_up = make_linear(layer.gate_up)
        self.down = make_linear(layer.down)
        self.num_heads, self.num_kv_heads = weights.num_heads, weights.num_kv_heads
        self.head_dim, self.scale, self.eps = weights.head_dim, weights.attn_scale, weights.eps
        self.gelu = weights.activation == "gelu_tanh"
        assert weights.activation in ("silu", "gelu_tanh")

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], attention: PagedAttention) -> Tensor:
        attn_norm, post_attn_norm, mlp_norm, post_mlp_norm = self.norms
        branch = self._attend(rms_norm(x, attn_norm, self.eps), rope, attention)
        x = x + (branch if post_attn_norm is None else rms_norm(branch, post_attn_norm, self.eps))
        gate, up = self.gate_up(rms_norm(x, mlp_norm, self.eps)).chunk(2, dim=-1)
        branch = self.down((F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)) * up)
        return x + (branch if post_mlp_norm is None else rms_norm(branch, post_mlp_norm, self.eps))

    def _attend(self, x: Tensor, rope: tuple[Tensor, Tensor], attention: PagedAttention) -> Tensor:
        num_rotated = self.num_heads + self.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], num_rotated + self.num_kv_heads, self.head_dim)
        qk = qkv[:, :num_rotated]
        q_norm, k_norm = self.qk_norms
        if q_norm is not None and k_norm is not None:
            q, k = qk.split([self.num_heads, self.num_kv_heads], dim=1)
            qk = torch.cat([rms_norm(q, q_norm, self.eps), rms_norm(k, k_norm, self.eps)], dim=1)
        qk = rotate(qk, *rope)
        attention.write(self.index, qk[:, self.num_heads :], qkv[:, num_rotated:])
        out = attention.attend(self.index, qk[:, : self.num_heads], scale=self.scale)
        return self.o(out.reshape(x.shape[0], -1))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., E) over its last dimension, in float32, rounded once to x's dtype. weight (E,) float32."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (RoFormer, eq. 34) in the half layout: x (T, any, E), cos and sin (T, 1, E) float32."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
