"""The transformer layers of a draft head, and attention of whole blocks over a context that somebody else keeps.
It must never let a block see the context from its own anchor on, nor another block.

Shapes: N blocks, B positions of a block, D hidden, H query heads, G key-value heads, E head_dim, S context tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.heads.config import HeadConfig

Rope = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32, rounded once to x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Context:
    """Keys and values of one layer for several sequences, rotated: each (S_i, G, E).

    Blocks are ordered by sequence: the first counts[0] belong to sequence 0, and so on. Block n sees the first
    anchors[n] tokens of its sequence (N,). `window` 0 is full attention, else a row at position p sees keys from
    p - window + 1 on.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    counts: Sequence[int]
    anchors: Tensor
    window: int = 0


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """x (..., heads, E), rope: cos and sin (..., E) in the half layout (RoFormer, equation 34)."""
    cos, sin = rope[0].unsqueeze(-2), rope[1].unsqueeze(-2)
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def attend(
    q: Tensor, k: Tensor, v: Tensor, context: Context, *, scale: float, kernel: Callable[..., Tensor] | None = None
) -> Tensor:
    """q (N, B, H, E), k and v (N, B, G, E) of the blocks, rotated -> (N, B, H, E).

    Every position of a block sees its context up to the anchor and the whole block in both directions (DSpark,
    section 3.1). Softmax in float32. `kernel`: what does one sequence (a BlockAttention).
    """
    kernel = kernel or _attend
    parts, start = [], 0
    for keys, values, count in zip(context.keys, context.values, context.counts, strict=True):
        rows = slice(start, start + count)
        start += count
        if count:
            anchors = context.anchors[rows]
            reach = int(anchors.max())
            part = q[rows], k[rows], v[rows], keys[:reach].to(q.dtype), values[:reach].to(q.dtype)
            parts.append(kernel(*part, anchors, scale, context.window))
    return torch.cat(parts)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, anchors: Tensor, scale: float, window: int
) -> Tensor:
    """The blocks of one sequence, with the context that the last of them sees."""
    num, size, heads, dim = q.shape
    groups, reach = k.shape[2], keys.shape[0]
    # (G, H/G, N, B, E): the query heads of a group beside one another
    q = q.view(num, size, groups, heads // groups, dim).permute(2, 3, 0, 1, 4)
    k, v = k.permute(2, 0, 1, 3).unsqueeze(1), v.permute(2, 0, 1, 3).unsqueeze(1)
    seen = torch.matmul(q.reshape(groups, num * size * (heads // groups), dim), keys.permute(1, 2, 0)).view(
        *q.shape[:4], reach
    )
    positions = torch.arange(reach, device=q.device)
    hidden = positions >= anchors.view(-1, 1, 1)
    if window:
        rows = anchors.view(-1, 1, 1) + torch.arange(size, device=q.device).view(1, -1, 1)
        hidden = hidden | (positions <= rows - window)
    seen = seen.float().masked_fill(hidden, -torch.inf)
    own = torch.matmul(q, k.transpose(-1, -2)).float()
    weights = torch.softmax(torch.cat([seen, own], dim=-1) * scale, dim=-1).to(q.dtype)
    far, near = weights.split([reach, size], dim=-1)
    out = torch.matmul(far.reshape(groups, num * size * (heads // groups), reach), values.transpose(0, 1)).view(
        *q.shape
    ) + torch.matmul(near, v)
    return out.permute(2, 3, 0, 1, 4).reshape(num, size, heads, dim)


class Rotation(nn.Module):
    """`rotate` as a module, so that it can be compiled where it stands."""

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        return rotate(x, rope)


class BlockAttention(nn.Module):
    """Attention of the blocks of one sequence; see `attend`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, anchors: Tensor, scale: float, window: int
    ) -> Tensor:
        return _attend(q, k, v, keys, values, anchors, scale, window)


class Attention(nn.Module):
    """Projections of one layer, named as in DeepSpec's checkpoints."""

    def __init__(self, config: HeadConfig, *, input_size: int | None = None) -> None:
        super().__init__()
        size, dim = input_size or config.hidden_size, config.head_dim
        self.heads, self.groups, self.dim = config.num_heads, config.num_kv_heads, dim
        self.q_proj = nn.Linear(size, config.num_heads * dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(size, config.num_kv_heads * dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(size, config.num_kv_heads * dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * dim, config.hidden_size, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm
        self.rotate = Rotation()

    def query(self, x: Tensor, rope: Rope) -> Tensor:
        """x (..., D) -> (..., H, E), rotated."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.dim))
        return self.rotate(self.q_norm(q) if self.qk_norm else q, rope)

    def key_value(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """x (..., D) -> keys, rotated, and values, each (..., G, E)."""
        k = self.k_proj(x).unflatten(-1, (self.groups, self.dim))
        v = self.v_proj(x).unflatten(-1, (self.groups, self.dim))
        return self.rotate(self.k_norm(k) if self.qk_norm else k, rope), v


class MLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class BlockLayer(nn.Module):
    """One layer of the parallel backbone: (N, B, D) -> (N, B, D)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.scale = config.head_dim**-0.5
        self.self_attn = Attention(config)
        self.attention = BlockAttention()
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Rope, context: Context) -> Tensor:
        normed = self.input_layernorm(x)
        q = self.self_attn.query(normed, rope)
        k, v = self.self_attn.key_value(normed, rope)
        attended = attend(q, k, v, context, scale=self.scale, kernel=self.attention)
        x = x + self.self_attn.o_proj(attended.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


def compile_parts(head: nn.Module) -> None:
    """Have torch.compile fuse what stands between the matrix products; shapes stay dynamic. For training."""
    for module in head.modules():
        if isinstance(module, (RMSNorm, Rotation, BlockAttention, MLP)):
            module.compile(dynamic=True)
