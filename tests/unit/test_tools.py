"""Tool calls: twenty cases written by structure, by hand and in pieces of any size, for every style."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from dspark import LLM, SamplingParams
from dspark.serve.parts import Parts
from dspark.serve.tools import STYLES, ToolCallStream, closed, parse_tool_calls, read_tools, tool_structure
from tests.tiny_folder import tiny_folder
from tests.tool_cases import CASES, tool


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(str(tiny_folder(tmp_path_factory.mktemp("m"))), draft="suffix", check=True)


def check(call, tools):
    """A call is of a tool, with arguments that are valid under its schema."""
    schemas = {found.name: found.parameters for found in read_tools(tools)}
    assert call.whole
    jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("case", CASES)
def test_a_required_call_is_one_of_the_tools_whatever_the_model_says(llm, case, style):
    """By a model with random weights, at temperature 1: only the structure makes a call of it."""
    tools = CASES[case]
    structure = tool_structure(tools, "required", style=style, parallel=False)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=300, structured_outputs=structure)
    [output] = llm.generate("call: ", params)
    answer = output.outputs[0]
    assert answer.finish_reason == "stop", answer.text
    content, [call] = parse_tool_calls(answer.text, style)
    assert content == ""
    check(call, tools)
    named = {"type": "function", "function": {"name": read_tools(tools)[-1].name}}
    only = SamplingParams(
        temperature=1.0, max_tokens=300, structured_outputs=tool_structure(tools, named, style=style), seed=1
    )
    _, [call] = parse_tool_calls(llm.generate("call: ", only)[0].outputs[0].text, style)
    assert call.name == named["function"]["name"]


def written(style, calls):
    form = STYLES[style]
    each = [f"{form.begin}{name}{form.middle}{json.dumps(arguments)}{form.end}" for name, arguments in calls]
    return form.first + form.between.join(each) + form.last


TEXTS = {
    "hermes": [
        ("Sure, I look.\n", written("hermes", [("a", {"x": [1, {"y": "}"}]})]), ""),
        ("", written("hermes", [("a", {}), ("b", {"s": 'q " </tool_call> \\'})]), ""),
        ("", written("hermes", [("a", {"é": "日"})]), " and then some text <tool"),
        ("", '<tool_call>{ "name" : "a" , "arguments" : {"x" : 1} } </tool_call>', ""),
    ],
    "llama3": [
        ("", written("llama3", [("a", {"x": 1}), ("b", {})]), ""),
        ("", '<|python_tag|>{"name": "a", "parameters": {"x": {"y": []}}}', ""),
        ("Well: ", written("llama3", [("a", {"x": 1})]), ""),
    ],
    "mistral": [
        ("", written("mistral", [("a", {"x": 1}), ("b", {"l": [[], {}]})]), ""),
        ("", '[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]', ""),
        ("Hm. ", '[TOOL_CALLS][{"name": "a", "arguments": {"x": 1}}]', ""),
    ],
}


@pytest.mark.parametrize("style", STYLES)
def test_pieces_of_any_size_give_the_same_calls_and_take_nothing_back(style):
    rng = random.Random(3)
    for before, calls, after in TEXTS[style]:
        text = before + calls + after
        content, found = parse_tool_calls(text, style)
        assert content == before.rstrip() + after and found and all(call.whole for call in found)
        assert [call.name for call in found] == ["a", "b"][: len(found)]
        for _ in range(30):
            stream, place, told = ToolCallStream(style), 0, ("", [])
            while place < len(text):
                size = rng.randint(1, 8)
                stream.push(text[place : place + size])
                place += size
                now = (stream.content, [(call.name, call.arguments) for call in stream.calls])
                assert now[0].startswith(told[0]) and len(now[1]) >= len(told[1])
                for (name, arguments), (same, longer) in zip(told[1], now[1]):
                    assert name == same and longer.startswith(arguments)
                told = now
            stream.finish()
            assert (stream.content, stream.calls) == (content, found)


@pytest.mark.parametrize(
    ("style", "text"),
    (
        ("hermes", "no call at all, 1 < 2"),
        ("hermes", "<tool_call> is how a call begins"),
        ("hermes", '<tool_call>\n{"nome": "a"}\n</tool_call>'),
        ("llama3", '{"name": "Ann", "age": 3}'),
        ("llama3", "a { brace"),
        ("mistral", "[1, 2]"),
        ("mistral", '[{"name": "Ann"}]'),
    ),
)
def test_what_only_looks_like_a_call_is_content(style, text):
    assert parse_tool_calls(text, style) == (text, [])


def test_a_call_that_was_cut_is_not_whole():
    content, [call] = parse_tool_calls('<tool_call>\n{"name": "a", "arguments": {"x": "12', "hermes")
    assert content == "" and call.arguments == '{"x": "12' and not call.whole
    _, [call] = parse_tool_calls('<tool_call>\n{"name": "a", "arguments": {"x": 1}', "hermes")
    assert call.whole and json.loads(call.arguments) == {"x": 1}, "its end was a stop string"


@pytest.mark.parametrize("style", ("hermes", "llama3"))
def test_under_auto_free_text_stays_free_and_calls_are_calls(llm, style):
    tools = CASES["several functions"]
    structure = tool_structure(tools, "auto", style=style)
    matcher = llm.requests.grammars.matcher(structure)
    encode = llm.tokenizer.encode
    good = encode("Let me see. " + written(style, [("other", {"y": 3})]))
    assert matcher.legal(good) == len(good)
    for wrong in (written(style, [("another", {"y": 3})]), written(style, [("other", {"y": 30})])):
        tokens = encode("Let me see. " + wrong)
        assert len(encode("Let me see. ")) < matcher.legal(tokens) < len(tokens)
    assert tool_structure(tools, "none", style=style) is None


@pytest.mark.parametrize(
    ("tools", "choice", "style", "message"),
    (
        ([{"type": "function"}], "auto", "hermes", r"tools\[0\] is no function"),
        ([tool("a b", {})], "auto", "hermes", "name 'a b'"),
        ([tool("a", {}), tool("a", {})], "auto", "hermes", "already"),
        ([tool("a", {})], "must", "hermes", "auto, none, required"),
        ([tool("a", {})], {"type": "function", "function": {"name": "b"}}, "hermes", "'b'"),
        ([], "required", "hermes", "no tools"),
        ([tool("a", {})], "auto", "qwen9", "hermes, llama3, mistral"),
    ),
)
def test_bad_tools_are_refused_by_name(tools, choice, style, message):
    with pytest.raises(ValueError, match=message):
        tool_structure(tools, choice, style=style)


@pytest.mark.parametrize("style", STYLES)
def test_parts_send_each_character_once_in_any_pieces(style):
    """Whole or streamed, cut or complete, with or without reasoning: deltas join to what the message says."""
    rng = random.Random(4)
    for before, calls, after in TEXTS[style]:
        for cut in (None, len(before) + len(calls) - 3, len(before) + len(calls) // 2, 1):
            for reasoning in (None, "</think>"):
                text = (before + calls + after)[:cut]
                if reasoning is not None:
                    text = "so < </thin it is" + reasoning + text
                whole = Parts(style=style, reasoning_end=reasoning)
                whole.push(text)
                whole.finish()
                message = whole.message()
                parts, place, found = Parts(style=style, reasoning_end=reasoning), 0, {"content": "", "reasoning": ""}
                arguments = {}
                while place <= len(text):
                    size = rng.randint(1, 6)
                    parts.push(text[place : place + size])
                    place += size
                    if place > len(text):
                        parts.finish()
                    delta = parts.delta()
                    found["content"] += delta.get("content", "")
                    found["reasoning"] += delta.get("reasoning_content", "")
                    for call in delta.get("tool_calls", []):
                        known = arguments.setdefault(call["index"], ["", ""])
                        known[0] += call["function"].get("name", "")
                        known[1] += call["function"]["arguments"]
                assert found["content"] == (message["content"] or "")
                assert found["reasoning"] == message.get("reasoning_content", "")
                told = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", [])]
                assert [arguments[i] for i in sorted(arguments)] == told
                if cut is None:
                    assert told and all(json.loads(call[1]) is not None for call in told)


def test_arguments_that_no_function_knows_are_not_invented():
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": inner, "b": {"type": "array", "items": inner}}}
    shut = {**inner, "additionalProperties": False}
    assert closed(schema) == {
        "type": "object",
        "properties": {"a": shut, "b": {"type": "array", "items": shut}},
        "additionalProperties": False,
    }
    for open_one in (
        {**inner, "additionalProperties": True},
        {**inner, "patternProperties": {"y": {}}},
        {**inner, "allOf": [inner]},
        {"type": "object"},
        True,
    ):
        assert closed(open_one) == open_one
