"""A head drafts in the engine what training saw: at every depth, after every way a context can come about."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from dspark.draft.block import NativeBlocks, TorchBlocks, context_layers, native_chain
from dspark.draft.semi_ar import SemiAutoregressiveDrafter
from dspark.engine.heads import build_head_drafter
from dspark.heads.rope import rope_tables
from dspark.model.build import library, reason
from dspark.model.runner import build_runner
from dspark.params import SamplingParams
from dspark.train.answers import Example
from dspark.train.blocks import greedy_chains, make_blocks
from dspark.train.states import TargetStates
from tests.fakes import add, make_engine, random_prompts, run
from tests.tiny_heads import BLOCK, tiny_head, training_view
from tests.tiny_models import tiny_model

VOCAB = 96
PATHS = ("torch", "native")
HEADS = {
    "target": {},
    "target-gated": {"markov": "gated", "draft_vocab": 60},
    "target-rnn": {"markov": "rnn", "feature": False},
    "fused": {"context": "fused", "layers": (0, 1, 2)},
    "fused-dflash": {"context": "fused", "layers": (-1, 2), "rank": 0, "feature": False, "confidence": False},
}


def runner_on(model, path):
    if path == "native" and library() is None:
        pytest.skip(f"native path: {reason()}")
    return build_runner(model, path=path)


class Recorder(SemiAutoregressiveDrafter):
    """Keeps the final hidden states of every block it runs."""

    seen: list

    def _run(self, rows):
        logits, hidden = super()._run(rows)
        self.seen += [(list(row.tokens), hidden[i].clone()) for i, row in enumerate(rows)]
        return logits, hidden


def recorded(engine, head, runner):
    drafter = build_head_drafter(head, engine.cache, runner, num_valid_tokens=VOCAB, quantization=None, threads=None)
    drafter.__class__ = Recorder
    drafter.seen = []
    engine.speculator.drafter = drafter
    return drafter


def assert_as_in_training(head, runner, seen):
    assert seen
    for tokens, hidden in seen:
        padded = tokens + [0] * BLOCK
        expected = training_view(head, runner, padded, [len(tokens) - 1])[0]
        torch.testing.assert_close(hidden, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("family", ("llama", "qwen2", "qwen3"))
def test_blocks_after_prefix_hits_chunks_preemption_and_rejections(family, name, path):
    model = tiny_model(family, vocab_size=VOCAB)
    head = tiny_head(tiny_model(family, vocab_size=VOCAB), **HEADS[name])
    runner = runner_on(model, path)
    engine = make_engine(runner, head=head, num_pages=40, max_tokens=13, max_seqs=4, max_drafts=BLOCK)
    drafter = recorded(engine, head, runner)
    rng = random.Random(0)
    prompts = random_prompts(5, vocab_size=VOCAB)
    prompts += [prompts[0][:9] + [7, 8], prompts[0] + [5]]
    for i, prompt in enumerate(prompts):
        add(engine, prompt, SamplingParams(temperature=0, max_tokens=14), seq_id=i)
    while engine.has_work:
        engine.step()
        if rng.random() < 0.15 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])
    assert engine.totals.num_preempted > 0
    assert engine.totals.record.num_accepted < engine.totals.record.num_verified
    assert_as_in_training(head, runner, drafter.seen[:: max(1, len(drafter.seen) // 40)])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ("target", "fused"))
def test_depths_from_1_to_8000(name, path):
    """A draft at wrong positions decays with depth and nothing else shows it."""
    model = tiny_model("llama", vocab_size=VOCAB)
    model.config.max_position_embeddings = 8192
    head = tiny_head(model, **HEADS[name])
    runner = runner_on(model, path)
    engine = make_engine(runner, head=head, num_pages=2100, max_tokens=2048, max_drafts=BLOCK, prefix_reuse=False)
    drafter = recorded(engine, head, runner)
    rng = random.Random(1)
    for depth in (1, 2, 15, 16, 17, 255, 1000, 4097, 8000):
        run(engine, [[rng.randrange(2, VOCAB) for _ in range(depth)]], SamplingParams(temperature=0, max_tokens=3))
        tokens, hidden = drafter.seen[-1]
        assert len(tokens) >= depth  # a prompt whose last chunk is one token is drafted from at once
        expected = training_view(head, runner, tokens + [0] * BLOCK, [len(tokens) - 1])[0]
        torch.testing.assert_close(hidden, expected, atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "shape", ({"kind": "eagle3", "layers": (0, 1, 2)}, {"markov": "rnn"}), ids=("eagle3", "dspark")
)
def test_drafts_are_those_that_validation_counts(shape, path):
    """Tokens of every draft against train.blocks.greedy_chains over the whole text. Without prefix reuse: its
    page may end with the keys of another following token."""
    model = tiny_model("qwen2", vocab_size=VOCAB)
    head = tiny_head(tiny_model("qwen2", vocab_size=VOCAB), **shape)
    runner = runner_on(model, path)
    engine = make_engine(
        runner, head=head, num_pages=40, max_tokens=13, max_seqs=4, max_drafts=BLOCK, prefix_reuse=False
    )
    drafter, seen = engine.speculator.drafter, []
    propose = drafter.propose

    def recording(rows, limits, **options):
        drafts = propose(rows, limits, **options)
        seen.extend((list(row.tokens), draft.tokens) for row, draft in zip(rows, drafts))
        return drafts

    drafter.propose = recording
    rng = random.Random(3)
    for i, prompt in enumerate(random_prompts(6, vocab_size=VOCAB)):
        add(engine, prompt, SamplingParams(temperature=0, max_tokens=14), seq_id=i)
    while engine.has_work:
        engine.step()
        if rng.random() < 0.15 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])
    assert len(seen) > 30
    rope = rope_tables(head.config, head.config.max_positions)
    for tokens, drafted in seen[:: max(1, len(seen) // 40)]:
        example = Example(tokens=tuple(tokens) + (0,) * BLOCK, num_prompt=1, task="", temperature=0.0, held_out=False)
        states = TargetStates(runner, head.config)([example.tokens])
        blocks = make_blocks([example], [[len(tokens) - 1]], BLOCK)
        with torch.no_grad():
            expected = greedy_chains(head, blocks, states, rope)[0][0].tolist()
        assert drafted == expected[: len(drafted)]


@pytest.mark.parametrize("name", HEADS)
def test_the_native_chain_is_the_networks_own(name):
    if library() is None:
        pytest.skip(f"native path: {reason()}")
    head = tiny_head(tiny_model("qwen3", vocab_size=VOCAB), **HEADS[name])
    torch.manual_seed(2)
    hidden = torch.randn(5, BLOCK, 48)
    base = head.lm_head(hidden).detach().contiguous()
    anchors = torch.randint(VOCAB, (5,))
    expected, sure = head.draft_greedily(hidden, anchors, base=base)
    for threads in (1, 2, 3):
        chain = native_chain(head, threads=threads, exact_weights=True)
        limits = np.array([4, 4, 2, 1, 3], np.int32)
        tokens, confidence = chain(base, hidden, anchors.numpy().astype(np.int32), limits)
        for row, limit in enumerate(limits):
            assert tokens[row, :limit].tolist() == expected[row, :limit].tolist()
            if head.confidence_head is not None:
                np.testing.assert_allclose(confidence[row, :limit], sure[row, :limit].numpy(), atol=1e-4)


@pytest.mark.parametrize("name", ("target", "fused"))
def test_native_blocks_are_the_networks_own(name):
    if library() is None:
        pytest.skip(f"native path: {reason()}")
    model = tiny_model("qwen2", vocab_size=VOCAB)
    head = tiny_head(model, **HEADS[name])
    runner = build_runner(model, path="native")
    engine = make_engine(runner, head=head, max_drafts=BLOCK)
    layers = context_layers(head, runner.num_layers)
    native = NativeBlocks(head, engine.cache, layers, quantization=None, threads=2)
    plain = TorchBlocks(head, engine.cache, layers)
    prompts = random_prompts(3, vocab_size=VOCAB)
    for i, prompt in enumerate(prompts):
        add(engine, prompt, SamplingParams(temperature=0, max_tokens=30), seq_id=i)
    for _ in range(6):
        engine.step()
    rows = [engine.rows[i].seq for i in range(3)]
    for seq in rows:
        assert engine.cache.reserve(seq.id, seq.num_cached + BLOCK)
    anchors = np.array([seq.num_cached for seq in rows], np.int32)
    ids, tokens = [seq.id for seq in rows], [seq.tokens[-1] for seq in rows]
    features = torch.randn(3, 48) if head.config.anchor_feature else None
    for count in (1, 3, 2):  # inputs of a pass must not be left in the next one's
        given = ids[:count], anchors[:count], tokens[:count], None if features is None else features[:count]
        for a, b in zip(native(*given), plain(*given)):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)
