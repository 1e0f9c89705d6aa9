"""Drafts by models with other tokenizers: the answer stays the target's, greedy, seeded and sampled, and what the draft
model reads is the text, byte by byte."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from dspark import LLM, SamplingParams
from dspark.config import SpeculationConfig
from dspark.draft.vocab import Reading, SharedVocabulary
from dspark.model.tokenizer import Tokenizer
from tests.tiny_folder import tiny_folder

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "q"), ("Ã", "©"), ("a", "b"), ("ab", "c"), ("1", "2")]
VOCABULARIES = {
    "rotated": {"shift": 7},
    "another end": {"shift": 3, "eos": "<end>"},
    "merged": {"merges": MERGES},
    "merged and rotated": {"merges": MERGES, "shift": 100, "num_extra": 2, "eos": "<end>"},
}
PROMPTS = ["hello hello hello", "a", "the quick brown fox, the quick brown", "é日本 abcabc 12"]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
TOO_UNLIKELY = 1e-4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return LLM(str(tiny_folder(tmp_path_factory.mktemp("target"))), check=True)


@pytest.fixture(scope="module")
def merged_target(tmp_path_factory):
    """Whose own tokens are longer than its drafts'."""
    return LLM(str(tiny_folder(tmp_path_factory.mktemp("target"), merges=MERGES)), check=True)


@pytest.fixture(scope="module", params=VOCABULARIES)
def draft(request, tmp_path_factory):
    """The target's weights under another vocabulary, so that some drafts hold."""
    return str(tiny_folder(tmp_path_factory.mktemp("draft"), seed=0, **VOCABULARIES[request.param]))


def with_draft(target, draft, **settings):
    return target.variant(speculation=SpeculationConfig(method="model", model=draft, **settings))


@pytest.mark.parametrize("policy", ("fixed", "adaptive"))
def test_greedy_and_seeded_answers_are_plain_decodings(target, draft, policy):
    llm = with_draft(target, draft, policy=policy)
    for params in (
        GREEDY,
        SamplingParams(temperature=0.9, seed=3, max_tokens=30),
        SamplingParams(temperature=1.2, seed=4, top_p=0.8, repetition_penalty=1.2, n=2, max_tokens=30),
    ):
        wanted = [[c.token_ids for c in out.outputs] for out in target.generate(PROMPTS, params)]
        assert [[c.token_ids for c in out.outputs] for out in llm.generate(PROMPTS, params)] == wanted
    if policy == "fixed":
        assert llm.stats.record.num_verified > 100


def test_a_target_of_longer_tokens_is_drafted_for(merged_target, tmp_path_factory):
    for options in ({"shift": 9}, {"merges": MERGES[:2], "shift": 1}):
        draft = str(tiny_folder(tmp_path_factory.mktemp("draft"), seed=1, **options))
        llm = with_draft(merged_target, draft, policy="fixed")
        wanted = [out.outputs[0].token_ids for out in merged_target.generate(PROMPTS, GREEDY)]
        assert [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)] == wanted
        assert llm.stats.record.num_verified > 100


def test_some_drafts_hold(target, tmp_path_factory):
    """A twin that numbers its letters otherwise says the same: embeddings are moved with the ids."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny_folder(tmp_path_factory.mktemp("twin"), shift=7)
    model = AutoModelForCausalLM.from_pretrained(folder)
    twin = AutoModelForCausalLM.from_pretrained(target.target.name)
    ours, theirs = Tokenizer(target.target.name).vocabulary(), Tokenizer(folder).vocabulary()
    moved = {key: value.clone() for key, value in twin.state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = moved[name].clone()
        for token, index in ours.items():
            moved[name][theirs[token]] = rows[index]
    model.load_state_dict(moved)
    model.save_pretrained(folder)
    with torch.no_grad():
        llm = with_draft(target, str(folder), policy="fixed")
    wanted = [out.outputs[0].token_ids for out in target.generate(PROMPTS, GREEDY)]
    assert [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)] == wanted
    assert llm.stats.record.acceptance_rate > 0.95


@pytest.mark.parametrize("temperature", (0.7, 1.0))
def test_sampled_answers_have_the_targets_law(target, draft, temperature):
    """Two tokens of three likeliest each, 600 answers, against the products of plain decoding's probabilities."""
    llm = with_draft(target, draft, policy="fixed", num_speculative_tokens=3)
    settings = {"temperature": temperature, "top_k": 3}
    law: dict[tuple[int, int], float] = {}
    prompt = list(PROMPTS[0].encode())
    ids = target.generate(PROMPTS[0], GREEDY)[0].prompt_token_ids
    assert len(ids) == len(prompt)
    for first, p in _top(target, ids, temperature).items():
        for second, r in _top(target, [*ids, first], temperature).items():
            law[first, second] = p * r
    params = SamplingParams(n=100, max_tokens=2, ignore_eos=True, **settings)
    counts = dict.fromkeys(law, 0)
    for _ in range(6):
        for completion in llm.generate([ids], params)[0].outputs:
            counts[tuple(completion.token_ids)] += 1
    pairs = [(counts[key], 600 * p) for key, p in law.items()]
    rare = [pair for pair in pairs if pair[1] < 5]
    pairs = [pair for pair in pairs if pair[1] >= 5] + ([tuple(map(sum, zip(*rare)))] if rare else [])
    assert stats.chisquare([o for o, _ in pairs], [e for _, e in pairs]).pvalue > TOO_UNLIKELY
    assert llm.stats.record.num_verified > 100


def _top(llm, ids, temperature):
    """Law of the next token: the three likeliest, at a temperature."""
    import math

    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3, ignore_eos=True)
    entries = llm.generate([list(ids)], params)[0].outputs[0].logprobs[0]
    best = sorted(entries, key=lambda entry: entry.rank)[:3]
    weights = {entry.token_id: math.exp(entry.logprob / temperature) for entry in best}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def test_grammars_and_ends_hold(target, draft):
    llm = with_draft(target, draft, policy="fixed")
    for structure in ({"regex": "(hello|help|h\u00e9|\u65e5\u672c){3}"}, {"choice": ["\u65e5\u672c", "hello hello"]}):
        for settings in ({"temperature": 0}, {"temperature": 1, "seed": 5}):
            params = SamplingParams(max_tokens=60, structured_outputs=structure, **settings)
            wanted = target.generate(PROMPTS, [params] * len(PROMPTS))
            found = llm.generate(PROMPTS, [params] * len(PROMPTS))
            assert [o.outputs[0].text for o in found] == [o.outputs[0].text for o in wanted]
            assert [o.outputs[0].finish_reason for o in found] == [o.outputs[0].finish_reason for o in wanted]


def test_what_the_draft_reads_is_the_text(tmp_path_factory):
    ours = Tokenizer(tiny_folder(tmp_path_factory.mktemp("a"), merges=MERGES))
    theirs = Tokenizer(tiny_folder(tmp_path_factory.mktemp("b"), merges=MERGES[3:], shift=40, eos="<end>"))
    words = SharedVocabulary(ours, theirs, max_target=ours.num_tokens, max_draft=theirs.num_tokens)
    assert len(words) >= 256
    for mine, other in words.to_draft.items():
        assert ours.token_bytes(mine) == theirs.token_bytes(other)
    rng, text = random.Random(0), "hello é日本 abc 12 \n\t\U0001f600 hell"
    for trial in range(200):
        ids = ours.encode("".join(rng.choices(text, k=30)))
        if trial % 2:  # tokens that are no text together
            ids = [rng.randrange(256) for _ in range(30)]
        start = rng.randrange(1, 10)
        reading, before = Reading(words), []
        for stop in sorted({start, *(rng.randrange(start, len(ids) + 1) for _ in range(6)), len(ids)}):
            reading.extend(ids[:stop], num_prompt=start)
            assert reading.tokens[: len(before)] == before, "what was written was rewritten"
            before = list(reading.tokens)
        if trial % 2 == 0 and reading.whole and "\ufffd" not in ours.decode(ids[:start]):
            assert theirs.decode(reading.tokens) == ours.decode(ids)


def test_too_little_in_common_is_refused(target, tmp_path_factory, monkeypatch):
    from dspark.engine import build

    monkeypatch.setattr(build, "LEAST_SHARED", 2.0)
    other = str(tiny_folder(tmp_path_factory.mktemp("draft"), shift=1))
    with pytest.raises(ValueError, match="too few to draft with"):
        with_draft(target, other)
