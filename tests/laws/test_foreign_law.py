"""Drafts by models with other tokenizers: the answer stays the target's, greedy, seeded and sampled, and what the draft
model reads is the text, byte by byte."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from dspark import LLM, SamplingParams
from dspark.config import EngineConfig, SpeculationConfig
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
        reading, settled = Reading(words), []
        for stop in sorted({start, *(rng.randrange(start, len(ids) + 1) for _ in range(6)), len(ids)}):
            reading.extend(ids[:stop], num_prompt=start)
            assert reading.tokens[: len(settled)] == settled, "what was settled was rewritten"
            settled = reading.tokens[: reading.num_settled]
        if trial % 2 == 0 and reading.whole and "\ufffd" not in ours.decode(ids[:start]):
            assert theirs.decode(reading.tokens) == ours.decode(ids)
            written = theirs.encode(ours.decode(ids[:start])) + words.write(ours.decode(ids[start:]))
            assert reading.tokens == written, "the text is not written as the draft's tokenizer writes it"


def test_a_long_text_is_settled_as_it_goes(tmp_path_factory):
    """So that neither rewriting nor what may be rewritten grows with the text, with spaces in it or none."""
    ours = Tokenizer(tiny_folder(tmp_path_factory.mktemp("a")))
    theirs = Tokenizer(tiny_folder(tmp_path_factory.mktemp("b"), merges=MERGES, shift=40))
    words = SharedVocabulary(ours, theirs, max_target=ours.num_tokens, max_draft=theirs.num_tokens)
    for text in ("hello quick abc 12 " * 40, "abcabc12" * 100):
        ids = ours.encode(text)
        reading = Reading(words)
        for stop in range(1, len(ids) + 1):
            reading.extend(ids[:stop], num_prompt=1)
            assert len(reading.tail) <= 97
        assert theirs.decode(reading.tokens) == text


def test_what_the_draft_wrote_is_told_byte_by_byte(tmp_path_factory):
    """And no token of the target's stands on more, or on fewer, of the draft's than its bytes come from."""
    ours = Tokenizer(tiny_folder(tmp_path_factory.mktemp("a"), merges=MERGES[:4], shift=5))
    theirs = Tokenizer(tiny_folder(tmp_path_factory.mktemp("b"), merges=MERGES[3:], shift=40, eos="<end>"))
    words = SharedVocabulary(ours, theirs, max_target=ours.num_tokens, max_draft=theirs.num_tokens)
    rng = random.Random(1)
    texts = 0
    for _ in range(300):
        own = theirs.encode("".join(rng.choices("hello é日 q abc12", k=8)), add_special_tokens=False)
        own = own if rng.random() < 0.7 else [*own[:3], *(rng.randrange(theirs.num_tokens) for _ in range(4))]
        told, stands = words.retell(own)
        raw = b"".join(map(ours.token_bytes, told))
        assert b"".join(map(theirs.token_bytes, own)).startswith(raw)
        assert stands == sorted(stands) and len(stands) == len(told) and all(1 <= s <= len(own) for s in stands)
        for count, stand in enumerate(stands, 1):
            size = len(b"".join(map(ours.token_bytes, told[:count])))
            assert len(b"".join(map(theirs.token_bytes, own[:stand]))) >= size
            assert len(b"".join(map(theirs.token_bytes, own[: stand - 1]))) < size
        texts += len(raw) == len(b"".join(map(theirs.token_bytes, own)))
    assert texts > 150


def test_a_cache_that_is_rewritten_drafts_as_a_fresh_one(target, tmp_path_factory):
    """Texts that grow by random pieces, their last words written anew each time, against a drafter that reads all."""
    from dspark.draft.base import DraftRow
    from dspark.draft.model import ModelDrafter
    from dspark.engine.build import build_cache

    llm = with_draft(target, str(tiny_folder(tmp_path_factory.mktemp("draft"), merges=MERGES, shift=9)))
    kept = llm.engine.speculator.drafter

    def fresh():
        cache, _ = build_cache(kept.runner, EngineConfig(), max_context=256)
        return ModelDrafter(
            kept.runner, cache, vocab_size=kept.vocab_size, num_valid_tokens=kept.num_valid_tokens, words=kept.words
        )

    rng, compared = random.Random(2), 0
    for seq_id, text in enumerate(["hello abcabc hell abc quick 12 1 2 hello qqq ab c " * 3, "heabchellabc12" * 6]):
        ids, length = target.tokenizer.encode(text), 5
        while length < len(ids):
            row = DraftRow(seq_id=seq_id, tokens=ids[:length], num_prompt=5, params=GREEDY)
            limit = rng.randrange(1, 6)
            (draft,) = kept.propose([row], [limit])
            kept.cache.check()
            (wanted,) = fresh().propose([row], [limit])
            assert (draft.tokens, len(draft.survival)) == (wanted.tokens, len(wanted.tokens))
            assert draft.survival == pytest.approx(wanted.survival, rel=1e-3)
            compared += len(draft.tokens)
            length += rng.randrange(1, 6)
    assert compared > 100


def test_too_little_in_common_is_refused(target, tmp_path_factory, monkeypatch):
    from dspark.engine import build

    monkeypatch.setattr(build, "LEAST_SHARED", 2.0)
    other = str(tiny_folder(tmp_path_factory.mktemp("draft"), shift=1))
    with pytest.raises(ValueError, match="too few to draft with"):
        with_draft(target, other)
