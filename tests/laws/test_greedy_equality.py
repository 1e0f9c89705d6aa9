"""Greedy text is transformers' greedy text, for every family, drafter, draft length and batch."""

from __future__ import annotations

import pytest
import torch

from dspark.draft.lookup import NgramDrafter, SuffixDrafter
from dspark.draft.model import ModelDrafter
from dspark.model.cache import KVCache
from dspark.model.runner import build_runner
from dspark.params import SamplingParams
from tests.fakes import ScriptedDrafter, junk, make_engine, mostly_right, perfect, random_prompts, run, wrong_at
from tests.tiny_heads import tiny_head
from tests.tiny_models import FAMILIES, tiny_model

VOCAB = 96
NEW = 24


def paths() -> list[str]:
    from dspark.model.native import library

    return ["torch", "general"] + (["native"] if library() is not None else [])


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """A tiny model, prompts, and what transformers' generate answers."""
    torch.manual_seed(0)
    model = tiny_model(request.param, vocab_size=VOCAB)
    prompts = random_prompts(8, vocab_size=VOCAB)
    answers = {}
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers[tuple(prompt)] = out[0, len(prompt) :].tolist()
    runners = {path: build_runner(tiny_model(request.param, vocab_size=VOCAB), path=path) for path in paths()}
    return request.param, prompts, answers, runners


def drafters(name: str, answers, runner):
    if name == "model":
        # The draft is the same model in another life: perfect, but with a cache of its own to keep right.
        cache = KVCache(runner.layer_specs, num_pages=128, page_size=4, dtype=runner.cache_dtype)
        return ModelDrafter(runner, cache, vocab_size=VOCAB, num_valid_tokens=VOCAB, max_chunk=16)
    return {
        "none": lambda: None,
        "ngram": lambda: NgramDrafter(num_speculative_tokens=8),
        "suffix": lambda: SuffixDrafter(num_speculative_tokens=8),
        "perfect": lambda: ScriptedDrafter(perfect(answers)),
        "always_wrong": lambda: ScriptedDrafter(wrong_at(answers, 0, vocab_size=VOCAB)),
        "wrong_at_2": lambda: ScriptedDrafter(wrong_at(answers, 2, vocab_size=VOCAB)),
        "junk": lambda: ScriptedDrafter(junk(vocab_size=VOCAB)),
        "mostly_right": lambda: ScriptedDrafter(mostly_right(answers, vocab_size=VOCAB)),
    }[name]()


NAMES = ("none", "ngram", "suffix", "model", "perfect", "always_wrong", "wrong_at_2", "junk", "mostly_right")
HEADS = {
    "target": {},
    "fused": {"context": "fused", "layers": (0, 1, 2), "draft_vocab": 60},
    "eagle3": {"kind": "eagle3", "layers": (0, 1, 2), "draft_vocab": 60},
    "dflash": {"context": "fused", "layers": (1, 2), "rank": 0, "feature": False, "confidence": False},
}


@pytest.mark.parametrize("path", ("torch", "general", "native"))
@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_gives_transformers_text(family, path, name):
    _, prompts, answers, runners = family
    if path not in runners:
        pytest.skip("no C++ compiler for the native path")
    params = SamplingParams(temperature=0, max_tokens=NEW)
    for batch in (prompts[:1], prompts):
        engine = make_engine(runners[path], drafter=drafters(name, answers, runners[path]))
        seqs = run(engine, batch, params)
        for seq in seqs:
            assert seq.output_token_ids == answers[tuple(seq.request.prompt_token_ids)]
        if name in ("perfect", "model"):
            assert engine.totals.record.num_accepted > 0.8 * engine.totals.record.num_verified
        if name == "always_wrong":
            assert engine.totals.record.num_accepted == 0 < engine.totals.record.num_verified


@pytest.mark.parametrize("path", ("torch", "general", "native"))
@pytest.mark.parametrize("name", HEADS)
def test_every_head_gives_transformers_text(family, path, name):
    kind, prompts, answers, runners = family
    if path not in runners:
        pytest.skip("no C++ compiler for the native path")
    if name == "target" and kind in ("mistral", "gemma3"):
        pytest.skip("this family's layers cannot start a head")
    head = tiny_head(tiny_model(kind, vocab_size=VOCAB), **HEADS[name])
    for batch in (prompts[:1], prompts):
        engine = make_engine(runners[path], head=head)
        seqs = run(engine, batch, SamplingParams(temperature=0, max_tokens=NEW))
        assert [seq.output_token_ids for seq in seqs] == [answers[tuple(p)] for p in batch]
        assert engine.totals.record.num_verified > 0


@pytest.mark.parametrize("k", range(0, 9))
def test_every_draft_length(family, k):
    _, prompts, answers, runners = family
    engine = make_engine(
        runners["torch"], drafter=ScriptedDrafter(mostly_right(answers, vocab_size=VOCAB, seed=k)), max_drafts=k
    )
    seqs = run(engine, prompts, SamplingParams(temperature=0, max_tokens=NEW))
    assert [seq.output_token_ids for seq in seqs] == [answers[tuple(p)] for p in prompts]


def test_small_cache_preempts_and_small_budget_chunks(family):
    _, prompts, answers, runners = family
    drafter = ScriptedDrafter(mostly_right(answers, vocab_size=VOCAB))
    engine = make_engine(runners["torch"], drafter=drafter, num_pages=24, max_tokens=9, max_seqs=4)
    seqs = run(engine, prompts, SamplingParams(temperature=0, max_tokens=NEW))
    assert [seq.output_token_ids for seq in seqs] == [answers[tuple(p)] for p in prompts]
    if 0 in engine.cache.windows:  # where every layer has a window, pages come back by themselves
        assert engine.totals.num_preempted > 0


@pytest.mark.parametrize("path", ("torch", "native"))
@pytest.mark.parametrize("name", HEADS)
def test_a_draft_that_foresees_the_end_ends_the_answer(path, name):
    """Every token of the answers once as the end: an accepted draft may be the last token, and other rows go on."""
    if path not in paths():
        pytest.skip("no C++ compiler for the native path")
    runner = build_runner(tiny_model("llama", vocab_size=VOCAB), path=path)
    head = tiny_head(tiny_model("llama", vocab_size=VOCAB), **HEADS[name])
    prompts = random_prompts(6, vocab_size=VOCAB)
    params = SamplingParams(temperature=0, max_tokens=NEW)
    plain = [seq.output_token_ids for seq in run(make_engine(runner), prompts, params)]
    for end in sorted({token for answer in plain for token in answer})[:12]:
        expected = [answer[: answer.index(end) + 1] if end in answer else answer for answer in plain]
        engine = make_engine(runner, head=head, eos=(end,))
        drafter = engine.speculator.drafter
        propose = drafter.propose

        def foresee(rows, limits, _propose=propose, _plain=plain, **options):
            drafts = _propose(rows, limits, **options)  # the head's own work, then the truth in its place
            for row, limit, draft in zip(rows, limits, drafts):
                answer = _plain[prompts.index(row.tokens[: row.num_prompt])]
                draft.tokens = answer[len(row.tokens) - row.num_prompt :][: min(limit, 4)]
                draft.survival = [0.9] * len(draft.tokens)
            return drafts

        drafter.propose = foresee
        assert [seq.output_token_ids for seq in run(engine, prompts, params)] == expected
