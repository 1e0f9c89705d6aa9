"""Structured answers through LLM and AsyncLLM, with floors and priorities beside them: the paths that users take."""

from __future__ import annotations

import asyncio
import json
import time

import jsonschema
import pytest

from dspark import LLM, AsyncLLM, SamplingParams
from dspark.verify.grammar import GrammarCompiler
from tests.tiny_folder import tiny_folder

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
PROMPTS = ["a cat of 7", "a dog", "{}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, draft="suffix", check=True)


def params(structure, **fields):
    return SamplingParams(**{"temperature": 0, "max_tokens": 120, "structured_outputs": structure, **fields})


def test_answers_validate_in_a_batch_with_free_ones(llm):
    tight = {"json": SCHEMA, "disable_any_whitespace": True}
    many = [params(tight), params(tight, temperature=1.0, n=3, seed=1), params(None, max_tokens=9)]
    outputs = llm.generate(PROMPTS, many)
    assert [len(output.outputs) for output in outputs] == [1, 3, 1]
    for answer in [answer for output in outputs[:2] for answer in output.outputs]:
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), SCHEMA)
    [again] = llm.generate(PROMPTS[:1], [params(tight)])
    assert again.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert again.outputs[0].speculation.num_steps < len(again.outputs[0].token_ids), "forced, or seen before"


def test_a_refused_structure_is_that_requests_error_alone(llm):
    with pytest.raises(ValueError, match="structured_outputs.json cannot be followed"):
        llm.generate(PROMPTS[0], params({"json": {"type": "strin"}}))
    with pytest.warns(UserWarning, match="refused"):
        refused, fine = llm.generate(PROMPTS[:2], [params({"regex": "("}), params({"choice": ["yes"]})])
    assert "structured_outputs.regex" in refused.error and fine.outputs[0].text == "yes"


def test_requests_of_one_schema_are_of_one_class(llm):
    seen = []
    llm.engine.row_sinks.append(lambda step: seen.append(step.seq.prompt_class))
    try:
        llm.generate(PROMPTS[:2], [params({"json": SCHEMA}, max_tokens=4)] * 2)
        llm.generate(PROMPTS[0], params({"json": SCHEMA}, max_tokens=4, speculation={"task": "mine"}))
    finally:
        llm.engine.row_sinks.pop()
    assert set(seen[:2]) == {params({"json": SCHEMA}).structure.name} and seen[-1] == "mine"


def test_compiling_keeps_nobody_waiting(folder, monkeypatch):
    compile_ = GrammarCompiler._compile

    def slow(self, wanted):
        time.sleep(1.0)
        return compile_(self, wanted)

    async def everything() -> None:
        server = AsyncLLM(folder, draft="suffix", check=True)
        server.llm.generate("warm", params({"choice": ["x"]}))
        monkeypatch.setattr(GrammarCompiler, "_compile", slow)
        times = []

        async def stream() -> None:
            async for _ in server.generate("b", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)):
                times.append(time.perf_counter())

        async def structured() -> str:
            outputs = [output async for output in server.generate("a", params({"choice": ["yes", "no"]}))]
            return outputs[-1].outputs[0].text

        _, text = await asyncio.gather(stream(), structured())
        assert text in ("yes", "no")
        assert max(b - a for a, b in zip(times, times[1:])) < 0.9
        with pytest.raises(ValueError, match="cannot be followed"):
            await server.generate("a", params({"regex": "("})).__anext__()
        server.close()

    asyncio.run(everything())


def test_a_floor_has_passes_measured_where_they_are_not(folder):
    plain = LLM(folder, check=True)
    assert plain.engine.scheduler.admission.cost is None
    asked = SamplingParams(temperature=0, max_tokens=12, min_tokens_per_second=5.0)
    [floored, free] = plain.generate(PROMPTS[:2], [asked, SamplingParams(temperature=0, max_tokens=12)])
    assert plain.engine.scheduler.admission.cost is plain.engine.speculator.cost is not None
    alone = LLM(folder).generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=12))
    assert [out.outputs[0].token_ids for out in (floored, free)] == [out.outputs[0].token_ids for out in alone]


@pytest.mark.parametrize("priority", (1.5, True, "high", 10**9))
def test_what_is_no_priority_is_refused(llm, priority):
    with pytest.raises(ValueError, match="priority"):
        llm.generate(PROMPTS[0], params(None, max_tokens=2), priority=[priority])
    with pytest.raises(ValueError, match="2 priorities for 1 prompts"):
        llm.generate(PROMPTS[0], params(None, max_tokens=2), priority=[1, 2])


def test_the_urgent_go_first(folder):
    server = LLM(folder, max_num_seqs=1, check=True)
    order = []
    asked = params(None, max_tokens=3)
    server.generate(PROMPTS, asked, priority=[2, 1, 0], on_output=lambda output: order.append(output.request_id))
    assert list(dict.fromkeys(order)) == ["request-4", "request-2", "request-0"]
    with pytest.raises(ValueError, match="objective"):
        LLM(folder, objective="speed")
