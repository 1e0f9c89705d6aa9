"""LLM and AsyncLLM from a folder on disk: the paths that users take, whole."""

from __future__ import annotations

import asyncio
import warnings

import pytest
import torch
import transformers

from dspark import LLM, AsyncLLM, SamplingParams
from dspark.config import POLICIES, SpeculationConfig
from dspark.heads.checkpoint import save_head
from dspark.plan.length import FixedLength
from tests.tiny_folder import tiny_folder
from tests.tiny_heads import tiny_head

PROMPTS = ["hello hello hello", "a", "the quick brown fox, the quick brown"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def plain(folder):
    return LLM(folder, check=True)


@pytest.fixture(scope="module")
def answers(plain):
    return [out.outputs[0] for out in plain.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("method", ("none", "ngram", "suffix", "model"))
@pytest.mark.parametrize("policy", ("adaptive", "fixed", "confidence", "heuristic", "shadow"))
def test_every_drafter_gives_the_same_text(plain, folder, answers, method, policy):
    model = folder if method == "model" else None
    llm = plain.variant(speculation=SpeculationConfig(method=method, model=model, policy=policy))
    outputs = [out.outputs[0] for out in llm.generate(PROMPTS, GREEDY)]
    assert [(o.text, o.token_ids, o.finish_reason) for o in outputs] == [
        (o.text, o.token_ids, o.finish_reason) for o in answers
    ]
    assert llm.stats.num_output_tokens == sum(len(o.token_ids) for o in outputs)
    assert set(llm.stats.seconds) >= {"admit", "draft", "run", "verify", "commit"}
    if method == "model" and policy == "fixed":
        assert llm.stats.record.acceptance_rate > 0.9


def test_output_fields_add_up(plain):
    seen = []
    params = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=10, logprobs=2, prompt_logprobs=1)
    (out,) = plain.generate(PROMPTS[0], params, on_output=lambda o: seen.append(len(o.outputs[0].token_ids)))
    assert [c.index for c in out.outputs] == [0, 1, 2] and out.finished
    assert len({tuple(c.token_ids) for c in out.outputs}) > 1
    for c in out.outputs:
        assert len(c.logprobs) == len(c.token_ids) == c.speculation.num_emitted
        assert all(entry[0].token_id == token for entry, token in zip(c.logprobs, c.token_ids))
        assert c.text == plain.tokenizer.decode(c.token_ids)
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
    assert seen == sorted(seen) and seen[-1] == 10
    assert out.timings["arrival"] <= out.timings["first_token"] <= out.timings["finished"]


def test_chat_goes_through_the_template(plain):
    message = [{"role": "user", "content": "hi"}]
    (chat,) = plain.chat(message, GREEDY)
    (raw,) = plain.generate("<user>hi<bot>", GREEDY)
    assert chat.outputs[0].token_ids == raw.outputs[0].token_ids
    assert len(plain.chat([message, message], GREEDY)) == 2
    with pytest.raises(ValueError, match="no messages"):
        plain.chat([], GREEDY)


def test_refused_prompts_do_not_stop_the_others(plain, answers):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = plain.generate(["", PROMPTS[0], "x" * 600, [999_999]], GREEDY)
    assert "empty" in outputs[0].error and "context" in outputs[2].error and "outside" in outputs[3].error
    assert outputs[1].outputs[0].text == answers[0].text
    assert sum("refused" in str(w.message) for w in caught) == 3
    for bad in ("", "x" * 600):
        with pytest.raises(ValueError):
            plain.generate(bad, GREEDY)


@pytest.mark.parametrize(
    "fields,message",
    (
        ({"logit_bias": {9999: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [9999]}, "stop_token_ids"),
    ),
)
def test_fields_that_only_the_model_can_refuse(plain, fields, message):
    with pytest.raises(ValueError, match=message):
        plain.generate("a", SamplingParams(**fields))
    assert not plain.engine.has_work


def test_bad_words_and_bias_are_honoured_with_drafts(plain, folder):
    base = plain.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    letter = base.text[3]
    llm = plain.variant(speculation=SpeculationConfig(method="model", model=folder))
    params = SamplingParams(temperature=0, max_tokens=24, bad_words=[letter])
    a, b = (x.generate(PROMPTS[0], params)[0].outputs[0] for x in (plain, llm))
    assert a.token_ids == b.token_ids and letter not in a.text


def test_speculation_off_for_one_request(plain, folder):
    llm = plain.variant(speculation=SpeculationConfig(method="model", model=folder, policy="fixed"))
    on, off = llm.generate([PROMPTS[0]] * 2, [GREEDY, SamplingParams(temperature=0, max_tokens=24, speculation=False)])
    assert on.outputs[0].token_ids == off.outputs[0].token_ids
    assert on.outputs[0].speculation.num_drafted > 0 == off.outputs[0].speculation.num_drafted


def test_policies_by_request_and_of_ones_own(plain, answers):
    llm = plain.variant(speculation=SpeculationConfig(method="suffix", policy="fixed"))

    class OneToken(FixedLength):
        def __init__(self):
            super().__init__(1)

    llm.add_policy("one", OneToken())
    with pytest.raises(ValueError, match="there is a policy 'one'"):
        llm.add_policy("one", OneToken())
    controls = [{"policy": "one"}, {"policy": "heuristic"}, {"policy": "confidence", "max_tokens": 3}]
    params = [SamplingParams(temperature=0, max_tokens=24, speculation=control) for control in controls]
    outputs = [out.outputs[0] for out in llm.generate(PROMPTS, params)]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in answers]
    assert len(outputs[0].speculation.accepted_at) <= 1 and len(outputs[2].speculation.accepted_at) <= 3
    for policy, message in (("lucky", "not known here"), ("adaptive", "measures costs")):
        with pytest.raises(ValueError, match=message):
            llm.generate(PROMPTS[0], SamplingParams(speculation={"policy": policy}))


def test_an_engine_without_drafts_takes_requests_of_every_policy(plain, answers):
    for policy in POLICIES:
        params = SamplingParams(temperature=0, max_tokens=24, speculation={"policy": policy})
        assert plain.generate(PROMPTS[0], params)[0].outputs[0].token_ids == answers[0].token_ids


def test_history_is_saved_and_loaded(plain, answers, tmp_path):
    path = tmp_path / "history.json"
    llm = plain.variant(speculation=SpeculationConfig(method="suffix"))
    llm.generate(PROMPTS, [SamplingParams(temperature=0, max_tokens=24, speculation={"task": "t"})] * 3)
    llm.save_history(path)
    again = plain.variant(speculation=SpeculationConfig(method="suffix", history=str(path)))
    assert again.engine.speculator.history.as_dict() == llm.engine.speculator.history.as_dict()
    assert [out.outputs[0].token_ids for out in again.generate(PROMPTS, GREEDY)] == [o.token_ids for o in answers]
    with pytest.raises(ValueError, match="no such file"):
        plain.variant(speculation=SpeculationConfig(method="suffix", history=str(tmp_path / "absent.json")))


def test_padding_rows_are_never_emitted(plain):
    params = SamplingParams(temperature=5.0, max_tokens=200, seed=1, ignore_eos=True)
    ids = plain.generate("z", params)[0].outputs[0].token_ids
    assert max(ids) <= 256 and len(ids) == 200


def test_contradicting_settings_are_refused(folder):
    with pytest.raises(ValueError, match="both name a drafter"):
        LLM(folder, draft="ngram", speculative_config={"method": "suffix"})
    with pytest.raises(ValueError, match="unknown keys"):
        LLM(folder, speculative_config={"methud": "suffix"})
    with pytest.raises(ValueError, match="no draft to use them"):
        LLM(folder, speculative_config={"confidence_threshold": 0.2})
    with pytest.raises(ValueError, match="no draft to use them"):
        LLM(folder, num_speculative_tokens=3)
    with pytest.raises(ValueError, match="unknown keys"):
        LLM(folder, max_seqs=3)


def test_async_streams_cancel_and_close(folder, answers):
    async def everything() -> None:
        llm = AsyncLLM(folder, draft="suffix", check=True)

        async def one(prompt: str) -> str:
            text, last = "", None
            async for last in llm.generate(prompt, GREEDY):
                assert last.outputs[0].text.startswith(text)
                text = last.outputs[0].text
            assert last.finished
            return text

        assert await asyncio.gather(*map(one, PROMPTS)) == [a.text for a in answers]
        with pytest.raises(ValueError, match="empty"):
            await one("")
        async for _ in llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)):
            break  # a client that leaves
        for _ in range(200):
            if not llm.llm.engine.has_work:
                break
            await asyncio.sleep(0.02)
        assert not llm.llm.engine.has_work and not llm.llm.engine.cache.sequences
        running = asyncio.create_task(one("abc" * 5))
        await asyncio.sleep(0)
        llm.close()
        with pytest.raises(RuntimeError, match="stopped"):
            await llm.generate("a").__anext__()
        with pytest.raises((RuntimeError, ValueError)) if not running.done() else warnings.catch_warnings():
            await running

    asyncio.run(everything())


@pytest.mark.parametrize("prompt", ("\ud800abc", [1.5, 2], [None]))
def test_what_is_no_prompt_is_refused_and_the_async_engine_lives_on(plain, folder, prompt):
    with pytest.raises(ValueError, match="text"):
        plain.requests.make(prompt, GREEDY)

    async def refused_then_served() -> None:
        llm = AsyncLLM(folder)
        with pytest.raises(ValueError):
            await llm.generate(prompt, GREEDY).__anext__()
        served = [out async for out in llm.generate("a", GREEDY)]
        assert served[-1].finished
        llm.close()

    asyncio.run(refused_then_served())


def test_a_slow_reader_sees_each_output_as_it_was(folder):
    async def read_slowly() -> None:
        llm = AsyncLLM(folder)
        async for out in llm.generate("abc", SamplingParams(temperature=0, max_tokens=20, logprobs=1)):
            await asyncio.sleep(0.01)
            completion = out.outputs[0]
            assert len(completion.logprobs) == len(completion.token_ids) == completion.speculation.num_emitted
        llm.close()

    asyncio.run(read_slowly())


def test_a_draft_that_lacks_a_special_token_still_drafts(tmp_path_factory):
    target = str(tiny_folder(tmp_path_factory.mktemp("wide"), num_extra=2))
    draft = str(tiny_folder(tmp_path_factory.mktemp("narrow")))
    llm = LLM(target, speculative_config={"model": draft, "policy": "fixed"}, check=True)
    (drafted,) = llm.generate([1, 2, 266, 3], GREEDY)
    (plain,) = llm.variant(speculation=SpeculationConfig()).generate([1, 2, 266, 3], GREEDY)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.outputs[0].speculation.num_drafted > 0


def test_a_draft_with_windows_reads_long_prompts(tmp_path_factory):
    folder = str(tiny_folder(tmp_path_factory.mktemp("windows"), family="mistral"))
    llm = LLM(
        folder,
        speculative_config={"model": folder, "policy": "fixed"},
        max_num_seqs=1,
        max_num_batched_tokens=64,
        check=True,
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (answer,) = llm.generate([[5 + i % 50 for i in range(400)]], params)
    assert answer.outputs[0].speculation.acceptance_rate > 0.9


@pytest.mark.parametrize(
    "shape", ({}, {"confidence": False}, {"context": "fused", "layers": (0, 1)}, {"kind": "eagle3"})
)
@pytest.mark.parametrize("path", ("auto", "torch"))
def test_heads_in_bfloat16(folder, tmp_path, shape, path):
    """Every kind of head on a target in 16 bits, greedy and sampled, with measured costs: seeded texts stay."""
    layers = {"layers": (0, 1, 2)} if shape.get("kind") == "eagle3" else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    save_head(tiny_head(model, **shape, **layers), tmp_path, target_name="tiny", dtype="bfloat16")
    plain = LLM(folder, dtype="bfloat16", exact=True, path="auto" if path == "auto" else "torch")
    params = [GREEDY, SamplingParams(temperature=0.9, seed=4, max_tokens=20)]
    for method, policy in (("model", "adaptive"), ("auto", "adaptive"), ("auto", "fixed"), ("model", "fixed")):
        llm = plain.variant(speculation=SpeculationConfig(method=method, model=str(tmp_path), policy=policy))
        for one in params:
            expected = [out.outputs[0].token_ids for out in plain.generate(PROMPTS, one)]
            assert [out.outputs[0].token_ids for out in llm.generate(PROMPTS, one)] == expected
        llm.generate(PROMPTS, SamplingParams(temperature=0.9, max_tokens=12))  # not seeded: draws from the head's law
        assert llm.stats.record.num_drafted > 0 or policy == "adaptive"


def test_a_cache_of_a_few_pages_leaves_no_place_for_blocks(folder, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    save_head(tiny_head(model), tmp_path, target_name="tiny")
    llm = LLM(folder, draft=str(tmp_path), max_model_len=16, max_num_seqs=1, page_size=16)
    [out] = llm.generate(["abc"], SamplingParams(temperature=0, max_tokens=40))
    assert out.outputs[0].finish_reason == "length"
