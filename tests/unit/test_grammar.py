"""Grammars: what they allow, what they refuse by name, and a matcher that is where its committed tokens say."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
import torch

from dspark.draft.base import DraftRow
from dspark.draft.lookup import SuffixDrafter
from dspark.model.tokenizer import Tokenizer
from dspark.params import SamplingParams, StructuredOutputs
from dspark.sampling import Processors, RowSampler
from dspark.verify.grammar import GrammarCompiler
from dspark.verify.skeleton import skeletons
from tests.tiny_folder import tiny_folder

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(tiny_folder(tmp_path_factory.mktemp("t")))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer.hf, width=265, eos_token_ids=[256], token_bytes=tokenizer.token_bytes)


def walk(matcher, tokenizer, rng, most=60):
    """A random legal answer, token by token; whether it ended."""
    tokens = []
    for _ in range(most):
        allowed = matcher.allowed((), rows=1)[0].nonzero().squeeze(1).tolist()
        assert allowed and max(allowed) < 257, "padding rows are no tokens"
        tokens.append(rng.choice(allowed))
        matcher.advance(tokens[-1])
        if matcher.ended:
            return tokens, True
    return tokens, False


VALUES = ["a", 3, None, {"b": [1, 2]}]
CASES = {
    "regex": ({"regex": "(ab|ac){1,3}[0-9]x?"}, lambda text: re.fullmatch("(ab|ac){1,3}[0-9]x?", text)),
    "choice": ({"choice": ["red", "re", 'a "b"']}, lambda text: text in ("red", "re", 'a "b"')),
    "lark": ({"grammar": 'start: "x" start | "y"'}, lambda text: re.fullmatch("x*y", text)),
    "gbnf": ({"grammar": 'root ::= "x" root | "y"'}, lambda text: re.fullmatch("x*y", text)),
    "json": (
        {"json": {"enum": ["a", 3, None, {"b": [1, 2]}]}},
        lambda text: json.loads(text) in ["a", 3, None, {"b": [1, 2]}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_legal_walk_that_ends_is_an_answer(compiler, tokenizer, name):
    fields, holds = CASES[name]
    ended = 0
    for seed in range(20):
        tokens, whole = walk(compiler.matcher(StructuredOutputs(**fields)), tokenizer, random.Random(seed))
        if whole:
            text = tokenizer.decode([token for token in tokens if token != 256])
            assert holds(text), text
            ended += 1
    assert ended > 5


def test_a_schema_is_followed_by_walks_of_legal_tokens(compiler, tokenizer):
    import jsonschema

    text = '{"name": "x", "kind": "dog", "ages": [1, 22]}'
    matcher = compiler.matcher(StructuredOutputs(json=SCHEMA))
    tokens = tokenizer.encode(text)
    assert matcher.legal(tokens) == len(tokens)
    jsonschema.validate(json.loads(text), SCHEMA)
    bad = tokenizer.encode('{"name": "x", "kind": "cow"}')
    assert tokenizer.decode(bad[: matcher.legal(bad)]) == '{"name": "x", "kind": "c'
    assert compiler.matcher(StructuredOutputs(json_object=True)).legal(tokens) == len(tokens)
    tight = compiler.matcher(StructuredOutputs(json=SCHEMA, disable_any_whitespace=True))
    assert tight.legal(tokens) < len(tokens)
    spelled = tight.forced((), 99)
    assert tokenizer.decode(spelled) == '{"name":"' and tight.forced(spelled, 99) == []
    assert tight.forced((), 3) == spelled[:3]


def test_questions_about_drafts_leave_the_state_as_it_is(compiler, tokenizer):
    """After any walk, with any drafts asked about, a matcher says what a fresh one behind the same tokens says."""
    wanted = StructuredOutputs(json=SCHEMA)
    for seed in range(12):
        rng = random.Random(seed)
        text = tokenizer.encode('{"kind": "cat", "name": "\\u00e9é日", "ages": []}'.replace("kind", "name", seed % 2))
        text = text[: compiler.matcher(wanted).legal(text)]
        matcher, fresh = compiler.matcher(wanted), compiler.matcher(wanted)
        for place, token in enumerate(text):
            ahead = text[place : place + rng.randrange(9)]
            junk = [rng.randrange(257) for _ in range(rng.randrange(4))]
            for asked in rng.sample([ahead, junk, [*ahead, *junk], []], 3):
                legal = matcher.legal(asked)
                assert legal == fresh.legal(asked)
                rows = rng.randint(1, legal + 1)
                found = matcher.allowed(asked[:legal], rows=rows)
                for row in range(rows):
                    behind = asked[: legal + 1 - rows + row]
                    other = compiler.matcher(wanted)
                    for committed in [*text[:place], *behind]:
                        other.advance(committed)
                    assert torch.equal(found[row], other.allowed((), rows=1)[0])
                matcher.forced(asked[:legal], 5)
            matcher.advance(token)
            fresh = compiler.matcher(wanted)
            for committed in text[: place + 1]:
                fresh.advance(committed)
            assert not matcher.ended or place == len(text) - 1


def test_free_text_until_a_tag(compiler, tokenizer):
    tag = {"structures": [{"begin": "<f>", "schema": {"enum": [1]}, "end": "</f>"}], "triggers": ["<f>"]}
    matcher = compiler.matcher(StructuredOutputs(structural_tag=tag))
    good, bad = (tokenizer.encode(text) for text in ("hello <f>1</f> more", "hello <f>2"))
    assert matcher.legal(good) == len(good)
    assert matcher.legal(bad) == len(bad) - 1


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        (
            {"json": {"type": "object", "unevaluatedProperties": False, "patternProperties": {"(": {}}}},
            "cannot be followed",
        ),
        ({"json": {"type": "strin"}}, "cannot be followed"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "cannot be followed"),
        ({"regex": "(ab"}, "cannot be followed"),
        ({"grammar": "start: other"}, "cannot be followed"),
        ({"grammar": 'start: "a" |\n  ???'}, "cannot be followed"),
        ({"grammar": 'root ::= "a" ('}, "cannot be followed"),
        ({"json": json.dumps({"enum": ["x" * 2**20]})}, "characters"),
    ),
)
def test_what_cannot_be_followed_is_refused_by_name(compiler, fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        compiler.matcher(StructuredOutputs(**fields))
    assert next(iter(fields)) in str(caught.value) and len(str(caught.value)) < 900


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({}, "exactly one"),
        ({"regex": "a", "json": {}}, "exactly one"),
        ({"regex": ""}, "not empty"),
        ({"choice": []}, "list of texts"),
        ({"choice": "abc"}, "list of texts"),
        ({"json": "{"}, "no JSON"),
        ({"json": 3}, "JSON as a text"),
        ({"json_object": False}, "true"),
        ({"structural_tag": {"structures": []}}, "triggers"),
        (
            {"structural_tag": {"structures": [{"begin": "<a>", "schema": {}}], "triggers": ["<b>"]}},
            "start with a trigger",
        ),
        ({"jsn": {}}, "unknown keys"),
        ({"json": {"enum": [{1, 2}]}}, "a set has no place in JSON"),
        ({"json": nested(100_000)}, "cannot be written as JSON"),
    ),
)
def test_bad_settings_are_one_clear_error(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=fields)


def test_compiled_grammars_are_kept_and_told_apart(compiler):
    one = StructuredOutputs(json={"type": "integer"})
    same, tight = (
        StructuredOutputs(json='{"type": "integer"}'),
        StructuredOutputs(json=one.json, disable_any_whitespace=True),
    )
    assert compiler.compile(one) is compiler.compile(same) is not compiler.compile(tight)
    assert one.name == same.name != tight.name and one.name.startswith("json:")


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    (
        ({"json": {"enum": [1, 2]}}, "1", "3"),
        ({"json": {"const": {"a": 1}}, "disable_any_whitespace": True}, '{"a":1}', '{"a": 1}'),
        ({"regex": "a/b+"}, "a/bb", "a/c"),
        ({"choice": ["yes", "no"]}, "no", "nil"),
    ),
)
@pytest.mark.parametrize("marker", ("</think>", "***", "<|end|>"))
def test_a_structure_begins_right_behind_a_marker(tmp_path, fields, good, bad, marker):
    """A text, some of whose signs mean something in a regex, or a token that no text spells; before it all is free."""
    tokenizer = Tokenizer(tiny_folder(tmp_path))
    tokenizer.hf.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    compiler = GrammarCompiler(tokenizer.hf, width=265, eos_token_ids=[256], token_bytes=tokenizer.token_bytes)
    wanted = StructuredOutputs(**fields, after=marker)
    free = tokenizer.encode('Let me think: {"a" </thin **\n 7 ')
    end = tokenizer.encode(marker)
    matcher = compiler.matcher(wanted)
    for text, legal in ((good, len(good)), (bad, None)):
        tokens = [*free, *end, *tokenizer.encode(text)]
        found = matcher.legal(tokens)
        assert found == len(tokens) if legal is not None else len(free) + len(end) <= found < len(tokens)
    assert wanted.name != StructuredOutputs(**fields).name
    with pytest.raises(ValueError, match="into the grammar itself"):
        StructuredOutputs(grammar='start: "a"', after=marker)


@pytest.mark.parametrize("regex", ("((a{1,500}){1,500}){1,500}b", "(a|b)*a(a|b){300}c", "(a|aa|aaa)*(a|aa)*b"))
def test_a_regex_that_would_explode_is_followed_or_refused(compiler, tokenizer, regex):
    """As it is compiled, not in the middle of an answer."""
    try:
        matcher = compiler.matcher(StructuredOutputs(regex=regex))
    except ValueError:
        return
    tokens = tokenizer.encode("aabaab" * 5 if "b)*" in regex else "a" * 30)
    assert matcher.legal(tokens) == 30 and matcher.fault is None


def test_an_unknown_format_is_a_remark_and_a_known_one_is_held_to(compiler, tokenizer):
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": "vendor-path"}}}
    tokens = tokenizer.encode('{"format": "anything"}')
    assert compiler.matcher(StructuredOutputs(json=schema)).legal(tokens) == len(tokens)
    dated = compiler.matcher(StructuredOutputs(json={"type": "string", "format": "date"}))
    good, bad = tokenizer.encode('"2026-11-30"'), tokenizer.encode('"soon"')
    assert dated.legal(good) == len(good) and dated.legal(bad) == 1


class Slow:
    """A tokenizer with no tokenizer.json behind it."""

    bos_token_id, all_special_ids = None, [256]

    def __init__(self, hf):
        self.hf = hf

    def __len__(self):
        return len(self.hf)

    def encode(self, text, *, add_special_tokens=False):
        return self.hf.encode(text, add_special_tokens=add_special_tokens)


def test_a_tokenizer_without_a_file_of_its_own_is_known_by_its_bytes(compiler, tokenizer):
    slow = GrammarCompiler(Slow(tokenizer.hf), width=265, eos_token_ids=[256], token_bytes=tokenizer.token_bytes)
    wanted = StructuredOutputs(regex="a(b|é日)c")
    ours, other = compiler.matcher(wanted), slow.matcher(wanted)
    tokens = tokenizer.encode("aé日c")
    for place in range(len(tokens) + 1):
        assert torch.equal(ours.allowed(tokens[:place], rows=1), other.allowed(tokens[:place], rows=1))


def test_a_recursive_schema_is_followed(compiler, tokenizer):
    tree = {"$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"}
    tokens = tokenizer.encode('{"t": {"t": {"t": {}}}}')
    assert compiler.matcher(StructuredOutputs(json=tree)).legal(tokens) == len(tokens)


def test_a_schema_has_a_skeleton_in_the_order_of_its_properties():
    schema = {
        "$defs": {"when/at": {"type": "object", "properties": {"day": {"type": "integer"}}}},
        "type": "object",
        "properties": {
            "kind": {"enum": ["cat", "dog"]},
            "on": {"$ref": "#/$defs/when~1at"},
            "tags": {"type": "array", "items": {"type": ["string", "null"]}},
            "any": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
    }
    line, indented = skeletons(schema)
    assert line == '{"kind": "cat", "on": {"day": 0}, "tags": [""], "any": true}'
    assert json.loads(indented) == json.loads(line) and '\n  "on": {\n    "day": 0' in indented
    tree = {"properties": {"t": {"$ref": "#"}, "far": {"$ref": "http://x"}}}
    assert skeletons(tree) and not skeletons({}) and not skeletons(True) and not skeletons({"type": "string"})
    assert not skeletons({"properties": {"x" * 9000: {}}})


def test_lookups_know_the_shape_of_a_schema_that_no_prompt_shows(compiler, tokenizer):
    drafter = SuffixDrafter()
    matcher = compiler.matcher(StructuredOutputs(json=SCHEMA))
    text = tokenizer.encode('Hi! {"name": "Tom", "kin')
    begun = text[4:]
    params = SamplingParams(temperature=0, structured_outputs={"json": SCHEMA})
    processors = Processors.build(params, vocab_size=265, eos_token_ids=[256])
    sampler = RowSampler(params, processors, tokens=text[:4], num_prompt=4, grammar=matcher)
    for token in begun:
        sampler.advance(token)
    row = DraftRow(seq_id=0, tokens=text, num_prompt=4, params=params, sampler=sampler)
    [draft] = drafter.propose([row], [12])
    assert tokenizer.decode(draft.tokens).startswith('d": "cat"')
    assert matcher.legal(draft.tokens) == len(draft.tokens)
    num_kept = len(drafter.answers)
    drafter.propose([replace(row, seq_id=1)], [12])
    assert len(drafter.answers) == num_kept == 2, "once for each grammar"
