"""Whatever is sent to a route of the OpenAPI document, the server does not fail, and leaves nothing behind.
DSPARK_FUZZ_CASES says how many cases (all routes together); a run of thousands is for releases."""

from __future__ import annotations

import json
import os
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dspark import LLM
from tests.server import serving
from tests.tiny_folder import tiny_folder

schemathesis = pytest.importorskip("schemathesis")
CASES = int(os.environ.get("DSPARK_FUZZ_CASES", "120"))


def test_no_case_is_a_server_error(tmp_path):
    llm = LLM(str(tiny_folder(tmp_path)), draft="suffix", max_model_len=64)
    statuses: dict[int, int] = {}
    with serving(llm) as running:
        schema = schemathesis.openapi.from_url(running.url + "/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) >= 9
        modes = list(schemathesis.GenerationMode)
        weights = [4 if operation.method == "post" else 1 for operation in operations]
        for operation, weight in zip(operations, weights):
            for mode in modes:
                count = max(1, CASES * weight // (sum(weights) * len(modes)))
                _try(operation, mode, count, statuses)
        running.settle()
    assert sum(statuses.values()) >= CASES // 2 and statuses.get(200, 0) > 0 and statuses.get(400, 0) > 0
    print(statuses)  # seen with pytest -s


def _try(operation, mode, count, statuses):
    health = list(HealthCheck)

    @settings(max_examples=count, deadline=None, suppress_health_check=health, phases=[Phase.generate], database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case):
        response = case.call(timeout=60)
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        assert response.status_code < 500, (response.status_code, response.text[:500], str(case.body)[:500])

    try:
        one()
    except Exception as error:
        # A route without parameters has nothing that could be wrong: no negative case of it can be made.
        if "Unsatisfiable" not in type(error).__name__ and "negative" not in str(error).lower():
            raise


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
SHARED: dict[str, list[Any]] = {
    "n": [1, 2, 3],
    "temperature": [0, 0.7, 1.5],
    "top_p": [0.2, 1],
    "top_k": [0, 1, 5],
    "min_p": [0, 0.3],
    "frequency_penalty": [-1, 0.5],
    "presence_penalty": [1],
    "repetition_penalty": [1.3],
    "logit_bias": [{"97": 5}, {"256": -100}],
    "stop": ["a", ["b", "cc"], ["\u00e9"]],
    "stop_token_ids": [[97], [256]],
    "include_stop_str_in_output": [True],
    "min_tokens": [0, 3, 12],
    "ignore_eos": [True],
    "bad_words": [["a"], ["ab", "c"]],
    "skip_special_tokens": [False],
    "priority": [-3, 5],
    "guided_choice": [["red", "green", "\u65e5\u672c"]],
    "guided_regex": ["[ab]{2,5}"],
    "guided_json": [SCHEMA],
    "response_format": [{"type": "json_object"}, {"type": "text"}],
    "speculation": [False, {"max_tokens": 2}, {"task": "t", "policy": "fixed"}],
    "include_metrics": [True],
    "token_sources": [True],
    "min_tokens_per_second": [5.0],
}
OF_CHATS: dict[str, list[Any]] = {
    "logprobs": [True],
    "top_logprobs": [0, 3],
    "tools": [[TOOL]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": [False],
}
OF_TEXTS: dict[str, list[Any]] = {"logprobs": [0, 2], "echo": [True], "add_special_tokens": [False]}
TEXTS = st.one_of(st.text(max_size=12, alphabet=st.characters(codec="utf-8")), st.sampled_from(["aaaa", "hello hello"]))


@st.composite
def requests(draw):
    """(path, body): fields and values that are right by themselves, and wrong with one another at times."""
    is_chat = draw(st.booleans())
    pools = SHARED | (OF_CHATS if is_chat else OF_TEXTS)
    names = draw(st.lists(st.sampled_from(sorted(pools)), unique=True, max_size=5))
    body = {name: draw(st.sampled_from(pools[name])) for name in names}
    body |= {"seed": 7, "max_tokens": draw(st.integers(1, 24))}
    text = draw(TEXTS)
    if is_chat:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", body | {"prompt": draw(st.sampled_from([text, [text, "b"], [97, 98]]))}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    llm = LLM(str(tiny_folder(tmp_path_factory.mktemp("m"))), draft="suffix", max_model_len=96, max_num_seqs=8)
    with serving(llm) as server:
        yield server
        server.settle()


@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(asked=requests())
def test_streams_say_what_whole_answers_say(running, asked):
    path, body = asked
    whole = running.post(path, body)
    assert whole.status_code in (200, 400), whole.text
    with httpx.stream(
        "POST", running.url + path, json=body | {"stream": True, "stream_options": {"include_usage": True}}, timeout=60
    ) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        assert response.status_code == whole.status_code
    if whole.status_code != 200:
        assert whole.json()["error"]["message"]
        return
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    choices = [Joined() for _ in whole.json()["choices"]]
    for event in events:
        for choice in event["choices"]:
            choices[choice["index"]].add(choice)
    usage, told = events[-1]["usage"], whole.json()["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == told[name]
    for joined, choice in zip(choices, whole.json()["choices"]):
        joined.check(choice)
        if choice["logprobs"] is not None and not body.get("echo"):
            assert usage["completion_tokens"] == sum(_num_logprobs(c) for c in whole.json()["choices"])
    assert ("metrics" in events[-1]) == ("metrics" in whole.json()) == ("include_metrics" in body)


class Joined:
    """The pieces of one choice."""

    def __init__(self):
        self.text, self.calls, self.reason = "", {}, None
        self.logprobs, self.sources = [], []

    def add(self, choice):
        assert self.reason is None, "a piece came behind the end"
        self.reason = choice["finish_reason"]
        if "delta" in choice:
            self.text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                known = self.calls.setdefault(call["index"], ["", ""])
                known[0] += call["function"].get("name", "")
                known[1] += call["function"]["arguments"]
            self.logprobs += (choice["logprobs"] or {}).get("content", [])
        else:
            self.text += choice["text"]
            logprobs = choice["logprobs"] or {"tokens": [], "token_logprobs": [], "text_offset": []}
            self.logprobs += list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"]))
        self.sources += choice.get("token_sources", [])

    def check(self, choice):
        assert self.reason == choice["finish_reason"]
        logprobs = choice["logprobs"]
        if "message" in choice:
            message = choice["message"]
            assert self.text == (message["content"] or "")
            calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", [])]
            assert [self.calls[i] for i in sorted(self.calls)] == calls
            assert [x["token"] for x in self.logprobs] == [x["token"] for x in (logprobs or {}).get("content", [])]
        else:
            assert self.text == choice["text"]
            if logprobs is not None:
                whole = list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"]))
                assert [(t, o) for t, _, o in self.logprobs] == [(t, o) for t, _, o in whole]
        assert [s["text"] for s in self.sources] == [s["text"] for s in choice.get("token_sources", [])]


def _num_logprobs(choice):
    return len(choice["logprobs"]["content" if "message" in choice else "tokens"])
