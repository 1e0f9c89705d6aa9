"""The server as clients see it: OpenAI's own client over loopback, plain HTTP for what no well-behaved client sends."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import jsonschema
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dspark import LLM, SamplingParams
from dspark.config import SpeculationConfig
from dspark.serve.tools import STYLES
from tests.server import serving
from tests.tiny_folder import tiny_folder
from tests.tool_cases import CASES

TEXT = "hello hello hello hello"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "hot": {"type": "boolean"}},
    "required": ["city", "hot"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
CHAT = [{"role": "user", "content": "hi there"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("served")))


@pytest.fixture(scope="module")
def alone(folder):
    """The same model without a server."""
    return LLM(folder, check=True)


@pytest.fixture(scope="module")
def server(alone):
    llm = alone.variant(speculation=SpeculationConfig(method="suffix"), max_num_seqs=8)
    with serving(llm, served_model_name=["tiny", "tiny-alias"]) as running:
        yield running
        running.settle()


# -- what is right


@pytest.mark.parametrize("settings", ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}))
def test_completions_are_those_of_the_engine_streamed_or_not(server, alone, settings):
    (expected,) = alone.generate(TEXT, SamplingParams(max_tokens=24, **settings))
    answer = server.client.completions.create(model="tiny", prompt=TEXT, max_tokens=24, **settings)
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(
        server.client.completions.create(
            model="tiny", prompt=TEXT, max_tokens=24, stream=True, stream_options={"include_usage": True}, **settings
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == answer.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == answer.choices[0].finish_reason
    assert chunks[-1].usage == answer.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert len({c.id for c in chunks}) == 1


@pytest.mark.parametrize("settings", ({"temperature": 0}, {"temperature": 0.8, "seed": 3}))
def test_chats_are_those_of_the_engine_streamed_or_not(server, alone, settings):
    (expected,) = alone.chat(CHAT, SamplingParams(max_tokens=20, **settings))
    answer = server.client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=20, **settings)
    assert answer.choices[0].message.content == expected.outputs[0].text
    stream = server.client.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=20, stream=True, **settings
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected.outputs[0].text
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]}]
    answer = server.client.chat.completions.create(model="tiny", messages=parts, max_tokens=20, **settings)
    assert answer.choices[0].message.content == expected.outputs[0].text


def test_several_answers_and_several_prompts_keep_their_places(server, alone):
    params = SamplingParams(n=3, temperature=0.9, seed=11, max_tokens=12)
    prompts = [TEXT, "a quick brown fox"]
    expected = [c.text for out in alone.generate(prompts, params) for c in out.outputs]
    ask = {"model": "tiny", "prompt": prompts, "n": 3, "temperature": 0.9, "seed": 11, "max_tokens": 12}
    answer = server.client.completions.create(**ask)
    assert [c.index for c in answer.choices] == list(range(6))
    assert [c.text for c in answer.choices] == expected
    texts = [""] * 6
    for chunk in server.client.completions.create(stream=True, **ask):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected
    ids = server.client.completions.create(**(ask | {"prompt": [list(TEXT.encode()), [97, 32]]}))
    assert len(ids.choices) == 6


def test_logprobs_are_the_engines_one_a_token(server, alone):
    (expected,) = alone.generate(TEXT, SamplingParams(temperature=0, max_tokens=10, logprobs=3))
    wanted = [entry[0].logprob for entry in expected.outputs[0].logprobs]
    answer = server.client.completions.create(model="tiny", prompt=TEXT, max_tokens=10, temperature=0, logprobs=3)
    found = answer.choices[0].logprobs
    assert found.token_logprobs == pytest.approx(wanted, abs=1e-5)
    assert len(found.tokens) == len(found.text_offset) == answer.usage.completion_tokens
    assert all(len(top) <= 4 for top in found.top_logprobs)
    streamed = server.client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=10, temperature=0, logprobs=3, stream=True
    )
    pieces = [c.choices[0].logprobs for c in streamed if c.choices and c.choices[0].logprobs]
    assert [x for piece in pieces for x in piece.token_logprobs] == found.token_logprobs
    assert [x for piece in pieces for x in piece.text_offset] == found.text_offset
    chat = server.client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
    for entry in chat.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 2 and entry.logprob == max(t.logprob for t in entry.top_logprobs)


def test_a_prompt_is_echoed_and_scored(server, alone):
    (expected,) = alone.generate(TEXT, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    answer = server.client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=0, temperature=0, logprobs=1, echo=True
    )
    choice = answer.choices[0]
    assert choice.text == TEXT and answer.usage.completion_tokens == 0
    assert choice.logprobs.token_logprobs[0] is None
    wanted = [entry[0].logprob for entry in expected.prompt_logprobs[1:]]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(wanted, abs=1e-4)
    assert "".join(choice.logprobs.tokens) == TEXT and choice.logprobs.text_offset == list(range(len(TEXT)))
    for stream in (False, True):
        answer = server.client.completions.create(
            model="tiny", prompt=TEXT, max_tokens=4, temperature=0, echo=True, stream=stream
        )
        text = "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text
        assert text.startswith(TEXT) and len(text) > len(TEXT)


def test_stops_cut_and_say_so(server, alone):
    (whole,) = alone.generate(TEXT, SamplingParams(temperature=0, max_tokens=30))
    text = whole.outputs[0].text
    word = text[8:11]
    answer = server.client.completions.create(model="tiny", prompt=TEXT, max_tokens=30, temperature=0, stop=[word])
    assert answer.choices[0].text == text[: text.index(word)]
    assert answer.choices[0].finish_reason == "stop"
    stream = server.client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=30, temperature=0, stop=word, stream=True
    )
    assert "".join(c.choices[0].text for c in stream) == answer.choices[0].text


def test_every_token_tells_where_it_came_from(server):
    ask = {"model": "tiny", "messages": CHAT, "max_tokens": 40, "temperature": 0, "token_sources": True}
    whole = server.post("/v1/chat/completions", ask | {"include_metrics": True}).json()
    told = whole["choices"][0]["token_sources"]
    assert "".join(t["text"] for t in told) == whole["choices"][0]["message"]["content"]
    assert len(told) == whole["usage"]["completion_tokens"]
    assert {t["source"] for t in told} <= {"target", "drafted", "corrected", "bonus"}
    metrics = whole["metrics"]["speculative_decoding"]
    assert sum(t["source"] == "drafted" for t in told) == metrics["num_accepted_draft_tokens"]
    steps = metrics["num_spec_steps"]
    assert sum(metrics["acceptance_histogram"]) == steps
    held = sum(i * count for i, count in enumerate(metrics["acceptance_histogram"]))
    assert held == metrics["num_accepted_draft_tokens"]
    assert metrics["mean_acceptance_length"] == pytest.approx(1 + held / steps if steps else 1)
    streamed = []
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=ask | {"stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    streamed += choice["token_sources"]
    assert [t["text"] for t in streamed] == [t["text"] for t in told]


@pytest.mark.parametrize("form", ("response_format", "guided_json", "structured_outputs"))
def test_structured_answers_validate(server, form):
    value = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        "guided_json": SCHEMA,
        "structured_outputs": {"json": SCHEMA},
    }[form]
    for settings in ({"temperature": 0}, {"temperature": 1, "seed": 2}):
        answer = server.client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=80, extra_body={form: value}, **settings
        )
        jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
        assert answer.choices[0].finish_reason == "stop"
    loose = server.client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=60, temperature=0, response_format={"type": "json_object"}
    )
    assert loose.choices[0].message.content.lstrip().startswith("{")
    choice = server.client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=20, extra_body={"guided_choice": ["red", "green"]}
    )
    assert choice.choices[0].text in ("red", "green")
    regex = server.client.completions.create(model="tiny", prompt=TEXT, extra_body={"guided_regex": "[0-9]{4}"})
    assert len(regex.choices[0].text) == 4 and regex.choices[0].text.isdecimal()


@pytest.mark.parametrize("style", STYLES)
def test_tools_are_called_streamed_or_not(alone, style):
    llm = alone.variant(speculation=SpeculationConfig(method="ngram"))
    with serving(llm, tool_call_parser=style) as running:
        name = running.service.names[0]
        named = {"type": "function", "function": {"name": "weather"}}
        ask = {"model": name, "messages": CHAT, "tools": [WEATHER, TIME], "temperature": 0, "max_tokens": 200}
        answer = running.client.chat.completions.create(tool_choice=named, **ask)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather" and call.id.startswith("call_")
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        found: dict[int, list[str]] = {}
        for chunk in running.client.chat.completions.create(tool_choice=named, stream=True, **ask):
            for piece in chunk.choices[0].delta.tool_calls or []:
                known = found.setdefault(piece.index, ["", ""])
                known[0] += piece.function.name or ""
                known[1] += piece.function.arguments or ""
        assert found == {0: ["weather", call.function.arguments]}
        # a conversation that holds the call and its result goes on
        history = [*CHAT, choice.message.model_dump(exclude_none=True)]
        history.append({"role": "tool", "tool_call_id": call.id, "content": "12 degrees"})
        more = running.client.chat.completions.create(**(ask | {"messages": history, "max_tokens": 4}))
        assert more.usage.completion_tokens == 4
        one = running.client.chat.completions.create(tool_choice="required", parallel_tool_calls=False, **ask)
        assert len(one.choices[0].message.tool_calls) == 1
        none = running.client.chat.completions.create(tool_choice="none", **(ask | {"max_tokens": 4}))
        assert none.choices[0].message.tool_calls is None
        running.settle()


@pytest.fixture(scope="module")
def tool_servers(alone):
    with ExitStack() as stack:
        yield {
            style: stack.enter_context(
                serving(alone.variant(speculation=SpeculationConfig(method="suffix")), tool_call_parser=style)
            )
            for style in STYLES
        }


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("case", CASES)
def test_twenty_kinds_of_calls_come_through_openais_client(tool_servers, case, style):
    running, tools = tool_servers[style], CASES[case]
    ask = {"model": running.service.names[0], "messages": CHAT, "tools": tools, "max_tokens": 300, "seed": 4}
    answer = running.client.chat.completions.create(tool_choice="required", parallel_tool_calls=False, **ask)
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    arguments = json.loads(call.function.arguments)
    assert isinstance(arguments, dict)
    jsonschema.validate(arguments, schemas[call.function.name])
    name, pieces = "", ""
    for chunk in running.client.chat.completions.create(
        tool_choice="required", parallel_tool_calls=False, stream=True, **ask
    ):
        for piece in chunk.choices[0].delta.tool_calls or []:
            name, pieces = name + (piece.function.name or ""), pieces + (piece.function.arguments or "")
    assert (name, pieces) == (call.function.name, call.function.arguments)


def test_reasoning_is_told_apart_and_structures_begin_behind_it(alone):
    llm = alone.variant(speculation=SpeculationConfig(method="suffix"))
    with serving(llm, reasoning_end="</think>") as running:
        ask = {"model": running.service.names[0], "messages": CHAT, "max_tokens": 30, "temperature": 0}
        answer = running.client.chat.completions.create(**ask)
        message = answer.choices[0].message
        assert message.content == "" and message.reasoning_content
        bias = {"logit_bias": {str(b): 100 for b in b"<"}, "max_tokens": 3}
        assert running.client.chat.completions.create(**(ask | bias)).usage.completion_tokens == 3


# -- what is wrong


@pytest.mark.parametrize(
    "path, body, status, says",
    [
        ("/v1/completions", {"prompt": "x", "colour": 1}, 400, "colour"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": ""}, 400, "empty"),
        ("/v1/completions", {"prompt": []}, 400, "prompt"),
        ("/v1/completions", {"prompt": [[1, 2], "x"]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [999999]}, 400, "token id"),
        ("/v1/completions", {"prompt": "x" * 5000}, 400, "context"),
        ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature"),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n="),
        ("/v1/completions", {"prompt": "x", "n": 100000}, 400, "answers"),
        ("/v1/completions", {"prompt": "x", "stop": [str(i) for i in range(10_000)]}, 400, "stop"),
        ("/v1/completions", {"prompt": "x", "stop": [""]}, 400, "empty"),
        ("/v1/completions", {"prompt": "x", "best_of": 4}, 400, "best_of"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/v1/completions", {"prompt": "x", "logprobs": 99}, 400, "logprobs"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"99999999": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream"),
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "other"),
        ("/v1/completions", {"prompt": "x", "speculation": {"speed": 9}}, 400, "speed"),
        ("/v1/completions", {"prompt": "x", "speculation": {"policy": "none such"}}, 400, "policy"),
        ("/v1/completions", {"prompt": "x", "guided_regex": "("}, 400, "regex"),
        ("/v1/completions", {"prompt": "x", "guided_json": {"type": "objekt"}}, 400, "objekt"),
        ("/v1/completions", {"prompt": "x", "guided_regex": "a", "guided_choice": ["a"]}, 400, "several"),
        ("/v1/completions", {"prompt": "x", "stream": True, "guided_regex": "("}, 400, "regex"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "content"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "role"),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}, 400, "logprobs"),
        ("/v1/chat/completions", {"messages": CHAT, "tool_choice": "required"}, 400, "tools"),
        ("/v1/chat/completions", {"messages": CHAT, "tools": [{"type": "hammer"}]}, 400, "tools"),
        ("/v1/chat/completions", {"messages": CHAT, "tools": [WEATHER, WEATHER]}, 400, "weather"),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "max_completion_tokens": 2}, 400, "max_"),
        ("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "json_schema"}}, 400, "json_schema"),
        ("/v1/chat/completions", {"messages": CHAT, "chat_template_kwargs": {"tokenize": False}}, 400, "tokenize"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "image_url",
        ),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/v1/embeddings", {"input": "x"}, 404, "/v1/embeddings"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(server, path, body, status, says):
    response = server.post(path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert says in error["message"] and error["type"] and "code" in error and "param" in error
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "body"),
        (b"\xff\xfe{}", "JSON"),
        (b'{"prompt": "\xc3\x28"}', "JSON"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}", "JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "JSON"),
    ],
)
def test_bodies_that_are_no_json_are_refused(server, content, says):
    response = server.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400 and says in response.json()["error"]["message"], response.text


def test_the_clients_errors_are_openais(server):
    with pytest.raises(openai.NotFoundError):
        server.client.completions.create(model="absent", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        server.client.completions.create(model="tiny", prompt="x", temperature=99e9)
    assert server.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert server.get("/v1/completions").status_code == 405
    response = server.post("/v1/completions", content=b"prompt=x", headers={"content-type": "text/plain"})
    assert response.status_code == 415


def test_a_body_that_is_too_large_or_too_slow_is_refused(alone):
    with serving(alone.variant(speculation=SpeculationConfig()), max_request_bytes=2048, body_timeout=0.3) as running:
        assert running.post("/v1/completions", {"prompt": "x" * 4000}).status_code == 413

        def drip():
            yield b'{"prompt": "'
            for _ in range(40):
                yield b"x" * 100

        headers = {"content-type": "application/json"}
        assert running.post("/v1/completions", content=drip(), headers=headers).status_code == 413
        with socket.create_connection(running.url.removeprefix("http://").split(":")) as raw:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 500\r\n\r\n{"
            )
            raw.settimeout(20)
            assert b" 408 " in raw.recv(4096)
        running.settle()


# -- load and faults


def test_a_full_queue_says_when_to_come_again(alone):
    llm = alone.variant(speculation=SpeculationConfig(), max_num_seqs=1, max_num_batched_tokens=64)
    with serving(llm, max_queue=1) as running:
        with ThreadPoolExecutor(8) as pool:
            ask = {"prompt": "x", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
            answers = list(pool.map(lambda _: running.post("/v1/completions", ask), range(8)))
        statuses = sorted(a.status_code for a in answers)
        assert statuses.count(200) >= 2 and set(statuses) == {200, 429}
        refused = next(a for a in answers if a.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1 and refused.json()["error"]["code"] == "queue_full"
        assert len({a.json()["choices"][0]["text"] for a in answers if a.status_code == 200}) == 1
        assert running.post("/v1/completions", {"prompt": "x", "n": 3}).status_code == 400
        running.settle()


def test_a_client_that_leaves_frees_its_row(server):
    ask = {"prompt": TEXT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    for stream in (True, False):
        emitted = server.service.metrics.counts.finished.get("abort", 0)
        body = json.dumps(ask | {"stream": stream}).encode()
        with socket.create_connection(server.url.removeprefix("http://").split(":")) as raw:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if stream:
                assert b"200 OK" in raw.recv(4096)
            else:
                while not server.service.llm.engine.rows:
                    time.sleep(0.001)
        server.settle()
        assert server.service.metrics.counts.finished.get("abort", 0) == emitted + 1


def test_an_answer_that_takes_too_long_is_given_up(alone):
    with serving(alone.variant(speculation=SpeculationConfig()), request_timeout=0.05) as running:
        ask = {"prompt": TEXT, "max_tokens": 450, "temperature": 0, "ignore_eos": True}
        assert running.post("/v1/completions", ask).status_code == 504
        with pytest.raises(openai.APIError, match="longer"):
            list(running.client.completions.create(model=running.service.names[0], stream=True, **_sdk(ask)))
        running.settle()


def test_a_slow_reader_loses_nothing_and_holds_up_nobody(server, alone):
    (expected,) = alone.generate(TEXT, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    ask = {"prompt": TEXT, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=ask, timeout=60) as response:
        lines = response.iter_lines()
        text = _text(next(lines))
        other = server.client.completions.create(model="tiny", prompt="a", max_tokens=5, temperature=0)
        assert other.usage.completion_tokens
        time.sleep(0.3)
        for line in lines:
            text += _text(line)
    assert text == expected.outputs[0].text


def test_a_fault_in_one_row_ends_that_row_only(alone, monkeypatch):
    llm = alone.variant(speculation=SpeculationConfig(method="suffix"), check=False)
    with serving(llm) as running:
        from dspark.engine.ends import StopWatcher

        push, name = StopWatcher.push, running.service.names[0]

        def broken(self, seq, token, *, may_stop):
            if seq.params.seed == 666 and seq.num_output > 3:
                raise RuntimeError("planted")
            return push(self, seq, token, may_stop=may_stop)

        monkeypatch.setattr(StopWatcher, "push", broken)
        with ThreadPoolExecutor(6) as pool:
            ask = {"prompt": TEXT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            seeds = [666, None, None, 666, None, None]
            answers = list(pool.map(lambda s: running.post("/v1/completions", ask | {"seed": s}), seeds))
        assert [a.status_code for a in answers] == [500 if seed else 200 for seed in seeds]
        assert "planted" in answers[0].json()["error"]["message"]
        (expected,) = alone.generate(TEXT, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        assert {a.json()["choices"][0]["text"] for a in answers if a.status_code == 200} == {expected.outputs[0].text}
        with pytest.raises(openai.APIError, match="planted"):
            list(running.client.completions.create(model=name, stream=True, seed=666, **_sdk(ask)))
        running.settle()


def test_a_step_that_fails_ends_what_ran_and_the_server_goes_on(alone, monkeypatch):
    with serving(alone.variant(speculation=SpeculationConfig(method="suffix"))) as running:
        engine = running.service.llm.engine
        forward, calls = engine.runner.forward, []

        def broken(*args, **kwargs):
            calls.append(1)
            if len(calls) == 5:
                raise RuntimeError("planted")
            return forward(*args, **kwargs)

        monkeypatch.setattr(engine.runner, "forward", broken)
        ask = {"prompt": TEXT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        assert running.post("/v1/completions", ask).status_code == 500
        assert running.post("/v1/completions", ask).status_code == 200
        running.settle()
        monkeypatch.setattr(engine.runner, "forward", lambda *a, **k: 1 / 0)
        statuses = [running.post("/v1/completions", ask).status_code for _ in range(4)]
        assert statuses == [500, 500, 503, 503]
        assert running.get("/health").status_code == 503


def test_draining_lets_answers_finish_and_then_cuts_them(alone):
    for grace, expected in ((60, 200), (0.05, 503)):
        with serving(alone.variant(speculation=SpeculationConfig()), shutdown_grace=grace) as running:
            ask = {"prompt": TEXT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
            with ThreadPoolExecutor(4) as pool:
                pending = [pool.submit(running.post, "/v1/completions", ask) for _ in range(4)]
                while running.service.num_open < 4:
                    time.sleep(0.001)
                running.server.should_exit = True
                answers = [each.result() for each in pending]
            assert [a.status_code for a in answers] == [expected] * 4, answers[0].text
            if expected == 503:
                assert answers[0].json()["error"]["code"] == "shutdown"


@pytest.mark.parametrize("grace", (60, 0.2))
def test_sigterm_under_load_ends_in_order(folder, grace):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dspark", "serve", folder, "--draft", "suffix", "--port", str(port)]
    command += ["--shutdown-grace", str(grace), "--log-format", "json"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
        reader.start()
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, process)
        twin = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert twin.returncode == 2 and "--port" in twin.stderr.splitlines()[-1]
        ask = {"prompt": "secret " + TEXT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        ends: list[str] = []

        def stream() -> None:
            with httpx.stream("POST", url + "/v1/completions", json=ask | {"stream": True}, timeout=60) as response:
                events = [line for line in response.iter_lines() if line]
            last = json.loads(events[-2][6:])
            ends.append(last["error"]["code"] if "error" in last else last["choices"][0]["finish_reason"])

        threads = [threading.Thread(target=stream) for _ in range(6)]
        for thread in threads:
            thread.start()
        while '"num_running"' not in httpx.get(url + "/live").text and not httpx.get(url + "/live").json()["running"]:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(90)
        assert process.wait(30) == 0
        reader.join(10)
        assert len(ends) == 6 and set(ends) <= ({"length"} if grace == 60 else {"length", "shutdown"})
        log = "".join(lines)
        assert "secret" not in log and "hello" not in log
        records = [json.loads(line) for line in lines if line.startswith("{")]
        told = [r for r in records if r["event"] == "request" and r["route"] == "/v1/completions"]
        assert len(told) == 6 and all(r["id"] and r["status"] == 200 for r in told)
    finally:
        process.kill()


# -- instruments


def test_what_operators_ask_is_answered(server):
    models = server.client.models.list().data
    assert [m.id for m in models] == ["tiny", "tiny-alias"]
    assert server.client.models.retrieve("tiny").id == "tiny"
    assert server.get("/v1/models/absent").status_code == 404
    assert server.get("/health").status_code == 200 and server.get("/version").json()["version"]
    ids = server.post("/tokenize", {"prompt": "abc", "return_token_strs": True}).json()
    assert ids["count"] == 3 and ids["token_strs"] == ["a", "b", "c"] and ids["max_model_len"] > 3
    assert server.post("/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": "abc"}
    chat = server.post("/tokenize", {"messages": CHAT}).json()
    assert server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"] == "<user>hi there<bot>"
    for path in ("/", "/page/page.js", "/page/page.css"):
        page = server.get(path)
        assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    assert server.get("/page/../schema.py").status_code == 404 and server.get("/page/none").status_code == 404


def test_metrics_count_what_was_delivered(alone):
    with serving(alone.variant(speculation=SpeculationConfig(method="suffix", policy="fixed"))) as running:
        usage = [
            running.post("/v1/completions", {"prompt": TEXT, "max_tokens": 30, "temperature": 0}).json()["usage"]
            for _ in range(3)
        ]
        running.post("/v1/completions", {"prompt": TEXT, "max_tokens": 0})
        running.settle()
        samples = {}
        for family in text_string_to_metric_families(running.get("/metrics").text):
            for sample in family.samples:
                extra = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                samples[(sample.name, *extra.values())] = sample.value
        assert samples["dspark:generation_tokens_total",] == sum(u["completion_tokens"] for u in usage)
        assert (
            samples["dspark:request_success_total", "length"] + samples.get(("dspark:request_success_total", "stop"), 0)
            == 3
        )
        assert samples["dspark:time_to_first_token_seconds_count",] == 3
        assert samples["dspark:http_responses_total", "/v1/completions", "200"] == 3
        assert samples["dspark:http_responses_total", "/v1/completions", "400"] == 1
        assert samples["dspark:num_requests_running",] == 0
        drafted = samples["dspark:spec_decode_num_draft_tokens_total",]
        verified = samples["dspark:spec_decode_num_verified_tokens_total",]
        accepted = samples["dspark:spec_decode_num_accepted_tokens_total",]
        assert drafted >= verified >= accepted > 0
        by_place = [v for k, v in samples.items() if k[0] == "dspark:spec_decode_num_accepted_tokens_per_pos_total"]
        assert sum(by_place) == accepted
        live = running.get("/live").json()
        assert live["totals"]["accepted"] == accepted and live["running"] == []
        assert sum(row["accepted"] for row in live["acceptance"]["by_drafter"]) == accepted


def test_a_key_is_asked_where_text_passes(alone):
    with serving(alone.variant(speculation=SpeculationConfig()), api_key=["one", "two"]) as running:
        for path in ("/v1/models", "/live"):
            assert running.get(path).status_code == 401
            assert running.get(path, headers={"authorization": "Bearer three"}).status_code == 401
            assert running.get(path, headers={"authorization": "Bearer two"}).status_code == 200
        assert running.post("/tokenize", {"prompt": "x"}).status_code == 401
        for path in ("/health", "/metrics", "/version", "/", "/page/page.js"):
            assert running.get(path).status_code == 200


def test_ids_are_the_clients_where_they_are_sane(server, caplog):
    logging.getLogger("dspark").propagate = True
    sent = server.get("/version", headers={"x-request-id": "abc-1"})
    assert sent.headers["x-request-id"] == "abc-1"
    assert server.get("/version", headers={"x-request-id": "a b" * 99}).headers["x-request-id"] != "a b" * 99


def test_other_pages_may_ask_only_where_they_are_named(alone):
    with serving(alone.variant(speculation=SpeculationConfig()), allowed_origins=["https://a.example"]) as running:
        for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
            response = running.get("/version", headers={"origin": origin})
            assert ("access-control-allow-origin" in response.headers) is allowed


def test_the_api_describes_itself(server):
    document = server.get("/openapi.json").json()
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat["$ref"].endswith("ChatRequest") and "ChatRequest" in document["components"]["schemas"]


def _sdk(ask):
    """OpenAI's client wants what it does not know in a field of its own."""
    return {k: v for k, v in ask.items() if k != "ignore_eos"} | {"extra_body": {"ignore_eos": True}}


def _text(line):
    return json.loads(line[6:])["choices"][0]["text"] if line.startswith("data: {") else ""


def _wait_for(url, process):
    end = time.monotonic() + float(os.environ.get("DSPARK_TEST_PATIENCE", "120"))
    while time.monotonic() < end:
        assert process.poll() is None, "the server ended"
        try:
            if httpx.get(url + "/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("the server did not start")
