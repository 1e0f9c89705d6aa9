"""EagleHead: an EAGLE-3 style drafter, one token at a time, with its own output fed back as the next feature.
It must never see a row of the context that lies ahead, nor the draft rows of another row.

Shapes: S context rows, N rows that draft, J draft rows behind one of them, D hidden, H query heads, G key-value heads,
E head_dim, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dspark.heads.blocks import MLP, Attention, Context, RMSNorm, Rope
from dspark.heads.config import HeadConfig

Rows = tuple[Tensor, Tensor]
"""Keys, rotated, and values of the draft rows so far, each (N, J, G, E)."""


class Step(NamedTuple):
    """One drafting step: `hidden` (N, D) is the next step's feature, `logits` (N, W), `rows` with this step's added."""

    hidden: Tensor
    logits: Tensor
    rows: Rows


class EagleLayer(nn.Module):
    """The layer that attends over [norm(embedding), norm(feature)], named as in speculators' checkpoints."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Attention(config, input_size=2 * config.hidden_size)
        self.mlp = MLP(config)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def mix(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Both (..., D) -> the attention's input (..., 2D) and the residual (..., D)."""
        normed = self.hidden_norm(features)
        mixed = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return mixed, normed if self.norm_before_residual else features

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual (..., D), attended (..., H, E) -> (..., D)."""
        x = residual + self.self_attn.o_proj(attended.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """Row t takes the embedding of token t + 1 and a feature of position t, and predicts token t + 2 (EAGLE-3,
    section 3.1). The feature is the fused states of the target at t in a row's first step, the row's own hidden of
    the step before in the later ones, in training (training-time test) as in drafting.

    Rows of the context hold keys and values of first steps (`keys_values`). A row that drafts sees the context rows
    before it, and the rows of its own steps, the first included; so step j of row t has position t + j, give or take
    an offset common to all. `embed_tokens` is (V, D), `lm_head` (W, D); `draft_ids` (W,) maps its rows to target ids.
    """

    draft_ids: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        assert config.kind == "eagle3"
        if config.num_layers != 1:
            raise ValueError(f"num_layers={config.num_layers} of an eagle3 head is not supported: use one layer")
        if config.context != "fused" or config.anchor_feature:
            raise ValueError("an eagle3 head fuses the target's states: use context='fused' and anchor_feature=false")
        self.config = config
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Hidden states of the tapped layers, each (S, D) -> features (S, D)."""
        return self.fc(torch.cat(list(states), dim=-1).to(self.fc.weight.dtype))

    def keys_values(self, token_ids: Tensor, features: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values (S, G, E) of context rows: token_ids (S,) the token after each row's position,
        features (S, D) fused, rope: cos and sin (S, E)."""
        mixed, _ = self._layer.mix(self._embed(token_ids), features)
        return self._layer.self_attn.key_value(mixed, rope)

    def forward(
        self, token_ids: Tensor, features: Tensor, rope: Rope, context: Context, rows: Rows | None = None
    ) -> tuple[Tensor, Rows]:
        """One step of N rows -> hidden (N, D), not normed, and `rows` with this step's added.

        token_ids (N,), features (N, D), rope: cos and sin (N, E). context.anchors (N,): how many context rows each
        sees, those before its first step's. rows: None in the first step, then what the step before returned.
        """
        layer = self._layer
        mixed, residual = layer.mix(self._embed(token_ids), features)
        key, value = (x.unsqueeze(1) for x in layer.self_attn.key_value(mixed, rope))
        if rows is not None:
            key, value = torch.cat([rows[0], key], dim=1), torch.cat([rows[1], value], dim=1)
        attended = _attend_rows(layer.self_attn.query(mixed, rope), (key, value), context)
        return layer.finish(residual, attended), (key, value)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) of a step -> (..., W)."""
        return self.lm_head(self.norm(hidden))

    def step(self, token_ids: Tensor, features: Tensor, rope: Rope, context: Context, rows: Rows | None = None) -> Step:
        """`forward` and `logits` of one step."""
        hidden, rows = self(token_ids, features, rope, context, rows)
        return Step(hidden, self.logits(hidden), rows)

    @property
    def _layer(self) -> EagleLayer:
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer)
        return layer

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self.embed_tokens(token_ids).to(self.dtype)


def _attend_rows(q: Tensor, rows: Rows, context: Context) -> Tensor:
    """q (N, H, E), rows (N, J, G, E) each -> (N, H, E): one query a row. Softmax in float32."""
    assert not context.window
    parts, start = [], 0
    for keys, values, count in zip(context.keys, context.values, context.counts, strict=True):
        part = slice(start, start + count)
        start += count
        if count:
            parts.append(_attend(q[part], (rows[0][part], rows[1][part]), (keys, values), context.anchors[part]))
    return torch.cat(parts)


def _attend(q: Tensor, rows: Rows, context: Rows, anchors: Tensor) -> Tensor:
    """The rows of one sequence; context: keys and values (S, G, E)."""
    num, heads, dim = q.shape
    groups, reach = rows[0].shape[2], int(anchors.max())
    keys, values = (x[:reach].to(q.dtype).transpose(0, 1) for x in context)  # (G, reach, E)
    own_keys, own_values = (x.transpose(1, 2) for x in rows)  # (N, G, J, E)
    q = q.view(num, groups, heads // groups, dim)
    # (G, N * H/G, reach): the context is shared, so its product is one a group
    far = torch.matmul(q.transpose(0, 1).reshape(groups, num * (heads // groups), dim), keys.transpose(1, 2))
    far = far.view(groups, num, heads // groups, reach).transpose(0, 1).float()
    ahead = torch.arange(reach, device=q.device) >= anchors.view(-1, 1, 1, 1)
    near = torch.matmul(q, own_keys.transpose(-1, -2)).float()
    scores = torch.cat([far.masked_fill(ahead, -torch.inf), near], dim=-1) * dim**-0.5
    weights = torch.softmax(scores, dim=-1).to(q.dtype)
    far, near = weights.split([reach, near.shape[-1]], dim=-1)
    seen = torch.matmul(far.transpose(0, 1).reshape(groups, num * (heads // groups), reach), values)
    seen = seen.view(groups, num, heads // groups, dim).transpose(0, 1)
    return (seen + torch.matmul(near, own_values)).reshape(num, heads, dim)
