"""The networks that draft: what may be seen, and that one position after another equals all at once."""

from __future__ import annotations

import pytest
import torch

from dspark.heads.blocks import Context, attend
from dspark.heads.config import HeadConfig, head_config
from dspark.heads.markov import MarkovHead
from dspark.heads.rope import rope_tables
from tests.tiny_heads import BLOCK, tiny_head
from tests.tiny_models import tiny_model

SHAPE = dict(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=60,
    draft_vocab_size=40,
    block_size=4,
    target_layer_ids=(0, 2),
    num_target_layers=3,
    markov_rank=6,
)


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


@pytest.mark.parametrize("context", ("target", "fused"))
def test_a_block_sees_nothing_from_its_anchor_on(model, context):
    """Gradients of every output of every block with respect to the context and the other blocks' inputs."""
    head = tiny_head(model, context=context)
    length, anchors = 30, torch.tensor([3, 9, 9 + BLOCK, 20])
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(length, 2, 16, generator=generator, requires_grad=True)
    values = torch.randn(length, 2, 16, generator=generator, requires_grad=True)
    inputs = torch.randn(len(anchors), BLOCK, 48, generator=generator, requires_grad=True)
    contexts = [Context(keys=[keys], values=[values], counts=[len(anchors)], anchors=anchors)] * 2
    cos, sin = rope_tables(head.config, 64)
    positions = anchors[:, None] + torch.arange(BLOCK)
    hidden = head(inputs, (cos[positions], sin[positions]), contexts)
    for n, anchor in enumerate(anchors.tolist()):
        for j in range(BLOCK):
            grads = torch.autograd.grad(hidden[n, j].sum(), (keys, values, inputs), retain_graph=True)
            for grad in grads[:2]:
                touched = grad.abs().sum(dim=(1, 2)) > 0
                assert not touched[anchor:].any(), "a block sees the future"
                assert touched[:anchor].all(), "a block misses a part of its context"
            rows = grads[2].abs().sum(dim=-1) > 0
            assert rows[n].all(), "a block is not seen in both directions"
            rows[n] = False
            assert not rows.any(), "a block sees another block"


def test_attention_equals_a_dense_mask():
    generator = torch.Generator().manual_seed(2)
    counts, lengths = [2, 3], [11, 17]
    anchors = torch.tensor([4, 11, 1, 9, 17])
    q = torch.randn(5, 3, 4, 8, generator=generator)
    k, v = torch.randn(2, 5, 3, 2, 8, generator=generator)
    keys = [torch.randn(n, 2, 8, generator=generator) for n in lengths]
    values = [torch.randn(n, 2, 8, generator=generator) for n in lengths]
    for window in (0, 6):
        context = Context(keys=keys, values=values, counts=counts, anchors=anchors, window=window)
        found = attend(q, k, v, context, scale=0.3)
        for n, owner in enumerate([0, 0, 1, 1, 1]):
            for j in range(3):
                start = max(0, int(anchors[n]) + j - window + 1) if window else 0
                seen_k = torch.cat([keys[owner][start : anchors[n]], k[n]]).repeat_interleave(2, dim=1)
                seen_v = torch.cat([values[owner][start : anchors[n]], v[n]]).repeat_interleave(2, dim=1)
                weights = torch.softmax(torch.einsum("he,she->hs", q[n, j], seen_k) * 0.3, dim=-1)
                torch.testing.assert_close(found[n, j], torch.einsum("hs,she->he", weights, seen_v))


@pytest.mark.parametrize("kind", ("vanilla", "gated", "rnn"))
def test_markov_steps_equal_the_whole_block(kind):
    torch.manual_seed(3)
    markov = MarkovHead(HeadConfig(**SHAPE, markov_type=kind))
    previous, hidden = torch.randint(60, (5, 4)), torch.randn(5, 4, 32)
    whole = markov.bias(previous, hidden)
    state = markov.start(5, hidden)
    for j in range(4):
        state, bias = markov.step(state, previous[:, j], hidden[:, j])
        torch.testing.assert_close(bias, whole[:, j])


@pytest.mark.parametrize("kind", ("vanilla", "gated", "rnn"))
def test_markov_never_looks_ahead(kind):
    torch.manual_seed(4)
    markov = MarkovHead(HeadConfig(**SHAPE, markov_type=kind))
    previous, hidden = torch.randint(60, (1, 4)), torch.randn(1, 4, 32)
    for j in range(1, 4):
        other, changed = previous.clone(), hidden.clone()
        other[0, j] = (other[0, j] + 1) % 60
        changed[0, j] += 1
        same = markov.bias(other, changed)
        torch.testing.assert_close(same[:, :j], markov.bias(previous, hidden)[:, :j])


@pytest.mark.parametrize("markov", ("vanilla", "gated", "rnn"))
def test_the_greedy_chain_is_the_argmax_of_teacher_forced_logits(model, markov):
    head = tiny_head(model, markov=markov, draft_vocab=50)
    torch.manual_seed(5)
    hidden, anchors = torch.randn(7, BLOCK, 48), torch.randint(96, (7,))
    tokens, sure = head.draft_greedily(hidden, anchors)
    previous = torch.cat([anchors[:, None], tokens[:, :-1]], dim=1)
    logits = head.logits(hidden, previous)
    assert torch.equal(head.draft_ids[logits.argmax(dim=-1)], tokens)
    torch.testing.assert_close(sure, head.confidence(hidden, previous))


@pytest.mark.parametrize(
    "change, words",
    (
        ({"kind": "medusa"}, "kind"),
        ({"target_layer_ids": (0, 3)}, "target_layer_ids"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"context": "target", "target_layer_ids": (0,)}, "one target layer for each"),
        ({"draft_vocab_size": 61}, "draft_vocab_size"),
        ({"num_heads": 3}, "divisible"),
        ({"markov_rank": 0}, "confidence_with_markov"),
        ({"block_size": 0}, "block_size"),
        ({"colour": 1}, "unknown keys"),
    ),
)
def test_a_wrong_configuration_is_refused_in_one_line(change, words):
    with pytest.raises(ValueError, match=words) as error:
        head_config(SHAPE | change)
    assert "\n" not in str(error.value)
