"""Constrained answers: legal to the last token, the same with every drafter, and sampled from the constrained law."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest
import torch
from scipy import stats

from dspark.draft.lookup import NgramDrafter, SuffixDrafter
from dspark.draft.model import ModelDrafter
from dspark.model.cache import KVCache
from dspark.model.runner import build_runner
from dspark.model.tokenizer import Tokenizer
from dspark.params import SamplingParams
from dspark.types import Sequence
from dspark.verify.grammar import GrammarCompiler
from tests.fakes import ScriptedDrafter, add, junk, make_engine
from tests.tiny_folder import tiny_folder
from tests.tiny_heads import tiny_head
from tests.tiny_models import tiny_model

VOCAB, EOS = 265, 256
TOO_UNLIKELY = 1e-4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(tiny_folder(tmp_path_factory.mktemp("t")))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer.hf, width=VOCAB, eos_token_ids=[EOS], token_bytes=tokenizer.token_bytes)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def runner(model):
    return build_runner(model, path="torch")


def drafter(name, tokenizer):
    if name in ("model", "small"):
        vocab_size = 120 if name == "small" else VOCAB
        draft = build_runner(tiny_model("llama", vocab_size=vocab_size, seed=1), path="torch")
        cache = KVCache(draft.layer_specs, num_pages=256, page_size=4, dtype=draft.cache_dtype)
        return ModelDrafter(draft, cache, vocab_size=VOCAB, num_valid_tokens=257)
    return {
        "none": lambda: None,
        "ngram": NgramDrafter,
        "suffix": SuffixDrafter,
        "junk": lambda: Masked(junk(vocab_size=257)),
        "likely": lambda: Masked(lambda row, limit: tokenizer.encode('{"a": [1, 22, true], "b": "x"}')[:limit]),
    }[name]()


class Masked(ScriptedDrafter):
    """Cut by the grammar, as drafters must."""

    def propose(self, rows, limits, **rest):
        from dspark.draft.draw import cut_illegal

        return [cut_illegal(row, draft) for row, draft in zip(rows, super().propose(rows, limits, **rest))]


HEADS = {"head": "dspark", "eagle3": "eagle3"}
GRAMMARS = (
    {"regex": r"(ab|a[0-9]{2}|é日){2,4}z?"},
    {"choice": ["yes", "yesterday", "no"]},
    {"json": {"type": "object", "properties": {"a": {"type": "array"}, "b": {"maxLength": 3, "type": "string"}}}},
    {"json": {"enum": [{"alpha": 1, "beta": [2, 3]}, {"alpha": 1, "gamma": None}]}, "disable_any_whitespace": True},
    {"grammar": 'start: "(" start ")" | "x"'},
    {"choice": ["yes", "no"], "after": "a"},
)


def check(text, fields):
    if "after" in fields:
        assert text.partition(fields["after"])[2] in fields["choice"]
    elif "regex" in fields:
        assert re.fullmatch(fields["regex"], text), text
    elif "choice" in fields:
        assert text in fields["choice"]
    elif "json" in fields:
        import jsonschema

        jsonschema.validate(json.loads(text), fields["json"])
    else:
        assert re.fullmatch(r"\(*x\)*", text) and text.count("(") == text.count(")")


TEXTS = ("say ", "ababab", '{"a": 1}{"a"', "((((", "yes no")


def answers(runner, compiler, tokenizer, drafts, *, head=None, max_drafts=8, grammars=GRAMMARS, **fields):
    """Every grammar with a prompt of its own, and as many free requests, in one crowd."""
    engine = make_engine(
        runner, drafter=drafts, head=head, max_drafts=max_drafts, eos=(EOS,), num_pages=400, max_tokens=50, max_seqs=6
    )
    seqs = []
    for i, grammar in enumerate((*grammars, *([None] * len(grammars)))):
        params = SamplingParams(max_tokens=40, structured_outputs=grammar, **fields)
        params = params if params.seed is None else SamplingParams(**{**vars(params), "seed": params.seed + i})
        matcher = None if grammar is None else compiler.matcher(params.structure)
        seqs.append(add(engine, tokenizer.encode(TEXTS[i % len(TEXTS)]), params, seq_id=i, grammar=matcher))
    for _ in range(3000):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work and not engine.cache.sequences
    return seqs


@pytest.fixture(scope="module")
def plain(runner, compiler, tokenizer):
    kinds = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 4}, {"temperature": 0.0, "presence_penalty": 0.8})
    return {
        json.dumps(kind): [s.output_token_ids for s in answers(runner, compiler, tokenizer, None, **kind)]
        for kind in kinds
    }


@pytest.mark.parametrize("name", ("none", "ngram", "suffix", "junk", "likely", "model", "small", "head", "eagle3"))
def test_constrained_text_is_that_of_plain_constrained_decoding(runner, model, compiler, plain, tokenizer, name):
    """With every drafter; "small" is a draft model that has no word for some of what the grammars ask."""
    for kind, expected in plain.items():
        head = tiny_head(model, kind=HEADS[name]) if name in HEADS else None
        drafts = None if head is not None else drafter(name, tokenizer)
        seqs = answers(runner, compiler, tokenizer, drafts, head=head, **json.loads(kind))
        assert [seq.output_token_ids for seq in seqs] == expected
        for seq, grammar in zip(seqs, GRAMMARS):
            assert seq.finish_reason in ("stop", "length")
            if seq.finish_reason == "stop":
                ids = [token for token in seq.output_token_ids if token != EOS]
                check(ids_to_bytes(tokenizer, ids).decode("utf-8"), grammar)
        assert sum(seq.finish_reason == "stop" for seq in seqs[: len(GRAMMARS)]) >= 2


def ids_to_bytes(tokenizer, ids):
    return b"".join(tokenizer.token_bytes(token) for token in ids)


@pytest.mark.parametrize("max_drafts", range(9))
def test_every_draft_length(runner, compiler, plain, tokenizer, max_drafts):
    seqs = answers(runner, compiler, tokenizer, drafter("likely", tokenizer), max_drafts=max_drafts, temperature=0.0)
    assert [seq.output_token_ids for seq in seqs] == plain[json.dumps({"temperature": 0.0})]


def test_forced_text_is_proposed_without_a_drafter(runner, compiler, tokenizer):
    """A lookup that has nothing to say, and a grammar with one long way to go."""
    word = {"regex": "abcdefghijklmnopqrst"}
    (seq, _) = answers(runner, compiler, tokenizer, drafter("suffix", tokenizer), grammars=(word,), temperature=0.0)
    assert tokenizer.decode(seq.output_token_ids) == "abcdefghijklmnopqrst"
    assert seq.finish_reason == "stop" and seq.record.num_steps <= 4


def test_min_tokens_yields_to_the_end_of_the_grammar(runner, compiler, tokenizer):
    for ignore in (False, True):
        fields = {"temperature": 0.0, "min_tokens": 30, "ignore_eos": ignore}
        (seq, _) = answers(
            runner, compiler, tokenizer, drafter("likely", tokenizer), grammars=({"regex": "ab?"},), **fields
        )
        assert tokenizer.decode(seq.output_token_ids) in ("a", "ab") and seq.finish_reason == "stop"


def test_random_regexes_hold_with_junk_drafts(runner, compiler, tokenizer):
    """Grammars made at random, alone and in company, with every draft length."""
    rng = random.Random(7)

    def piece(depth):
        kind = rng.randrange(5) if depth else 0
        inner = [piece(depth - 1) for _ in range(2)] if kind else []
        return [
            rng.choice(["a", "b", "[0-9]", "é", "[^x]", "日本"]),
            "".join(inner),
            f"({'|'.join(inner)})",
            f"({inner[0] if inner else ''}){{1,3}}",
            f"({inner[0] if inner else ''})?",
        ][kind]

    grammars = []
    while len(grammars) < 12:
        regex = "(q" + piece(3) + piece(2) + ")"
        grammars.append({"regex": regex})
    expected = answers(runner, compiler, tokenizer, None, grammars=grammars, temperature=0.0)
    for max_drafts in (1, 4, 7):
        seqs = answers(
            runner,
            compiler,
            tokenizer,
            drafter("junk", tokenizer),
            max_drafts=max_drafts,
            grammars=grammars,
            temperature=0.0,
        )
        assert [seq.output_token_ids for seq in seqs] == [seq.output_token_ids for seq in expected]
    for seq, grammar in zip(expected, grammars):
        if seq.finish_reason == "stop":
            text = ids_to_bytes(tokenizer, [t for t in seq.output_token_ids if t != EOS]).decode("utf-8")
            assert re.fullmatch(grammar["regex"], text), (text, grammar)


@pytest.mark.parametrize("name", ("none", "model", "likely", "head"))
def test_sampled_answers_have_the_constrained_law(runner, model, compiler, tokenizer, name):
    """Masked and rescaled at each token: the chance of a whole answer is the product of these."""
    grammar = {"regex": "(aa|ab|b[cd])(x|yy)?"}
    prompt = tokenizer.encode("go: ")
    law = constrained_law(model, compiler, grammar, prompt)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-4) and len(law) > 8
    head = tiny_head(model) if name == "head" else None
    drafts = None if head is not None else drafter(name, tokenizer)
    engine = make_engine(
        runner, drafter=drafts, head=head, max_drafts=4, eos=(EOS,), num_pages=600, max_seqs=50, max_tokens=400
    )
    found: Counter[tuple[int, ...]] = Counter()
    params = SamplingParams(temperature=1.0, max_tokens=12, structured_outputs=grammar)
    torch.manual_seed(0)
    for turn in range(16):
        seqs = [
            add(
                engine,
                prompt,
                SamplingParams(**{**vars(params), "seed": None}),
                seq_id=100 * turn + i,
                grammar=compiler.matcher(params.structure),
            )
            for i in range(50)
        ]
        while engine.has_work:
            engine.step()
        found.update(tuple(seq.output_token_ids) for seq in seqs)
    assert set(found) <= set(law)
    total = sum(found.values())
    common = [answer for answer, chance in law.items() if chance * total >= 5]
    observed = [found[answer] for answer in common]
    expected = [law[answer] * total for answer in common]
    if (rest := total - sum(expected)) > 5:
        observed.append(total - sum(observed))
        expected.append(rest)
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected))
    assert stats.chi2.sf(statistic, max(1, len(observed) - 1)) > TOO_UNLIKELY


def constrained_law(model, compiler, grammar, prompt):
    """By transformers' own forward and a matcher asked token by token."""
    params = SamplingParams(structured_outputs=grammar)
    law: dict[tuple[int, ...], float] = {}

    def go(output, chance):
        matcher = compiler.matcher(params.structure)
        for token in output:
            matcher.advance(token)
        if output and (output[-1] == EOS or matcher.ended):
            law[tuple(output)] = chance
            return
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, -1].float()
        allowed = matcher.allowed((), rows=1)[0]
        weights = logits.masked_fill(~allowed, float("-inf")).softmax(-1)
        for token in allowed.nonzero().squeeze(1).tolist():
            if float(weights[token]) * chance > 1e-7:
                go([*output, token], chance * float(weights[token]))

    go([], 1.0)
    return law


@pytest.mark.parametrize("fields", ({"temperature": 0.0}, {"temperature": 1.0, "seed": 1}))
@pytest.mark.parametrize("name", ("none", "likely", "model"))
def test_a_fault_of_the_grammar_ends_its_request_and_no_other(runner, compiler, tokenizer, name, fields):
    """A parser that gives up in the middle of an answer: llguidance's own state of error, which it never leaves."""
    engine = make_engine(runner, drafter=drafter(name, tokenizer), eos=(EOS,))
    params = SamplingParams(max_tokens=20, structured_outputs={"regex": "[a-z]{19}"}, **fields)
    matcher = compiler.matcher(params.structure)
    sick: Sequence = add(engine, tokenizer.encode(TEXTS[0]), params, seq_id=0, grammar=matcher)
    well = add(engine, tokenizer.encode(TEXTS[1]), SamplingParams(max_tokens=20, **fields), seq_id=1)
    for _ in range(2):
        engine.step()
    matcher.legal(())
    assert not matcher.inner.consume_token(tokenizer.encode("!")[0]) and matcher.fault
    while engine.has_work:
        engine.step()
    assert sick.finish_reason == "error" and sick.stop_reason == matcher.fault
    assert well.finish_reason in ("stop", "length")
