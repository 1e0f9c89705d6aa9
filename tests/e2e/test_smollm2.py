"""The real default model, from the command that users type: right text, same text with drafts, figures that add up."""

from __future__ import annotations

import json

import pytest
import torch

from dspark import LLM, SamplingParams
from dspark.cli import main
from dspark.config import SpeculationConfig

CHAT = [{"role": "user", "content": "Repeat after me, twice: the quick brown fox jumps over the lazy dog."}]
GREEDY = SamplingParams(temperature=0, max_tokens=48)


@pytest.fixture(scope="module")
def exact(smollm2):
    return LLM(str(smollm2), exact=True, max_num_seqs=4, max_model_len=1024, check=True)


@pytest.mark.parametrize("speculation", ({"method": "ngram"}, {"method": "suffix"}, {"method": "model"}))
def test_exact_mode_gives_the_tokens_of_plain_decoding(exact, smollm2, speculation):
    if speculation["method"] == "model":
        if exact.engine.runner.name != "native":
            pytest.skip("int4 drafts need the native path")
        speculation = {"method": "model", "model": str(smollm2), "quantization": "int4"}
    drafted = exact.variant(speculation=SpeculationConfig(**speculation))
    crowd = [CHAT, [{"role": "user", "content": "Name three colours."}], CHAT]
    plain = [exact.chat(chat, GREEDY)[0].outputs[0] for chat in crowd]
    for answer, reference in zip(drafted.chat(crowd, GREEDY), plain, strict=True):
        assert answer.outputs[0].token_ids == reference.token_ids
        assert answer.outputs[0].text == reference.text
    assert drafted.stats.record.num_accepted > 0


def test_greedy_text_is_that_of_transformers_in_float32(smollm2):
    from transformers import AutoModelForCausalLM

    llm = LLM(str(smollm2), draft="suffix", dtype="float32", max_model_len=1024, max_num_seqs=2)
    ids = llm.tokenizer.apply_chat_template(CHAT)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    prompt = torch.tensor([ids])
    reference = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=32)
    answer = llm.generate(ids, SamplingParams(temperature=0, max_tokens=32))[0].outputs[0]
    assert answer.token_ids == reference[0, len(ids) :].tolist()


def test_compare_on_the_command_line(smollm2, capsys):
    words = ["generate", "Say hi three times.", "--model", str(smollm2), "--max-tokens", "16", "--exact"]
    assert main([*words, "--compare", "--repeat", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["identical"] is True
