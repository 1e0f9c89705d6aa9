"""EagleHead against a plain dense computation, and drafting against training-time test."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from dspark.heads.blocks import Context, rotate
from dspark.heads.config import HeadConfig
from dspark.heads.eagle import EagleHead, Rows
from dspark.heads.rope import rope_tables

CONFIG = HeadConfig(
    kind="eagle3",
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=61,
    draft_vocab_size=40,
    target_layer_ids=(0, 2, 3),
    num_target_layers=5,
    qk_norm=True,
)


def make(config: HeadConfig = CONFIG) -> EagleHead:
    torch.manual_seed(7)
    head = EagleHead(config).eval()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return head


def inputs(length: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(11)
    states = [torch.randn(length, 32) for _ in CONFIG.target_layer_ids]
    return torch.randint(0, 61, (length + 8,)), torch.stack(states)


def dense(head: EagleHead, tokens: Tensor, states: Tensor, steps: int) -> list[Tensor]:
    """Hidden of every row and step, one row and one key at a time, straight from the definition."""
    layer, config = head.layers[0], head.config
    attention = layer.self_attn
    cos, sin = rope_tables(config, 64)
    features = head.fc(torch.cat(list(states), dim=-1))
    num = len(features)
    first_keys: list[tuple[Tensor, Tensor]] = []
    own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num)]
    found = []
    for j in range(steps):
        hidden = []
        for t in range(num):
            normed = layer.hidden_norm(features[t])
            mixed = torch.cat([layer.input_layernorm(head.embed_tokens(tokens[t + 1 + j])), normed])
            rope = (cos[t + j], sin[t + j])
            pair = (
                rotate(attention.k_norm(attention.k_proj(mixed).view(2, 8)), rope),
                attention.v_proj(mixed).view(2, 8),
            )
            q = rotate(attention.q_norm(attention.q_proj(mixed).view(4, 8)), rope)
            if j == 0:
                first_keys.append(pair)
            else:
                own[t].append(pair)
            seen = first_keys[: t + 1] + own[t]
            out = []
            for h in range(4):
                scores = torch.stack([q[h] @ k[h // 2] for k, _ in seen]) / 8**0.5
                out.append(sum(w * v[h // 2] for w, (_, v) in zip(torch.softmax(scores, 0), seen, strict=True)))
            residual = normed if config.norm_before_residual else features[t]
            x = residual + attention.o_proj(torch.cat(out))
            hidden.append(x + layer.mlp(layer.post_attention_layernorm(x)))
        features = torch.stack(hidden)
        found.append(features)
    return found


def train(head: EagleHead, tokens: Tensor, states: Tensor, steps: int) -> list[Tensor]:
    """All rows of a sequence at once, as in training-time test."""
    num = states.shape[1]
    cos, sin = rope_tables(head.config, 64)
    features = head.fuse(list(states))
    keys, values = head.keys_values(tokens[1 : num + 1], features, (cos[:num], sin[:num]))
    context = Context(keys=[keys], values=[values], counts=[num], anchors=torch.arange(num))
    rows: Rows | None = None
    found = []
    for j in range(steps):
        rope = (cos[j : num + j], sin[j : num + j])
        features, rows = head(tokens[1 + j : num + 1 + j], features, rope, context, rows)
        found.append(features)
    return found


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}])
def test_rows_of_a_sequence_equal_the_definition(changes: dict[str, bool]) -> None:
    head = make(dataclasses.replace(CONFIG, **changes))
    tokens, states = inputs(6)
    with torch.no_grad():
        for got, wanted in zip(train(head, tokens, states, 3), dense(head, tokens, states, 3), strict=True):
            torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-5)


def test_the_two_residuals_differ() -> None:
    tokens, states = inputs(6)
    with torch.no_grad():
        plain = train(make(), tokens, states, 1)[0]
        normed = train(make(dataclasses.replace(CONFIG, norm_before_residual=True)), tokens, states, 1)[0]
    assert (plain - normed).abs().max() > 0.1


def test_drafting_several_sequences_equals_training() -> None:
    """Rows of two sequences of unequal length, each with the keys of the rows before it only."""
    head = make()
    tokens, states = inputs(9)
    cos, sin = rope_tables(head.config, 64)
    with torch.no_grad():
        wanted = train(head, tokens, states, 3)
        features = head.fuse(list(states))
        keys, values = head.keys_values(tokens[1:10], features, (cos[:9], sin[:9]))
        rows_at = torch.tensor([0, 5, 8])  # the first two in one sequence, the last in another
        context = Context(keys=[keys[:5], keys[:8]], values=[values[:5], values[:8]], counts=[2, 1], anchors=rows_at)
        feature, rows = features[rows_at], None
        for j in range(3):
            at = rows_at + j
            step = head.step(tokens[at + 1], feature, (cos[at], sin[at]), context, rows)
            torch.testing.assert_close(step.hidden, wanted[j][rows_at], atol=2e-6, rtol=1e-5)
            torch.testing.assert_close(step.logits, head.logits(wanted[j][rows_at]), atol=1e-5, rtol=1e-5)
            assert step.rows[0].shape == step.rows[1].shape == (3, j + 1, 2, 8)
            feature, rows = step.hidden, step.rows


def test_no_row_sees_what_lies_ahead() -> None:
    """The gradient of row t with respect to the target's states after t is zero, and that of its own is not."""
    head = make()
    tokens, states = inputs(7)
    states.requires_grad_()
    train(head, tokens, states, 3)[2][3].sum().backward()
    assert states.grad is not None
    assert (states.grad[:, 4:] == 0).all()
    assert all((states.grad[:, t] != 0).any() for t in range(4))


def test_an_offset_of_all_positions_changes_nothing() -> None:
    head = make()
    tokens, states = inputs(5)
    cos, sin = rope_tables(head.config, 64)
    found = []
    with torch.no_grad():
        for offset in (0, 13):
            rope = (cos[offset : offset + 5], sin[offset : offset + 5])
            features = head.fuse(list(states))
            keys, values = head.keys_values(tokens[1:6], features, rope)
            context = Context(keys=[keys], values=[values], counts=[5], anchors=torch.arange(5))
            found.append(head.step(tokens[1:6], features, rope, context).logits)
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(ValueError, match="use one layer"):
        EagleHead(dataclasses.replace(CONFIG, num_layers=2))
    with pytest.raises(ValueError, match="anchor_feature=false"):
        EagleHead(dataclasses.replace(CONFIG, anchor_feature=True))
