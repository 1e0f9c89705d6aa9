"""The real default model, from the command that users type: right text, same text with drafts, figures that add up."""

from __future__ import annotations

import json

import jsonschema
import pytest
import torch

from dspark import LLM, SamplingParams
from dspark.cli import main
from dspark.config import SpeculationConfig
from dspark.engine.heads import packaged_head

CHAT = [{"role": "user", "content": "Repeat after me, twice: the quick brown fox jumps over the lazy dog."}]
GREEDY = SamplingParams(temperature=0, max_tokens=48)


@pytest.fixture(scope="module")
def exact(smollm2):
    return LLM(str(smollm2), exact=True, max_num_seqs=4, max_model_len=1024, check=True)


@pytest.mark.parametrize("speculation", [{"method": name} for name in ("ngram", "suffix", "model", "dspark", "auto")])
def test_exact_mode_gives_the_tokens_of_plain_decoding(exact, smollm2, speculation):
    if speculation["method"] == "model":
        if exact.engine.runner.name != "native":
            pytest.skip("int4 drafts need the native path")
        speculation = {"method": "model", "model": str(smollm2), "quantization": "int4"}
    if speculation["method"] not in ("ngram", "suffix"):
        speculation = {**speculation, "policy": "fixed"}  # whether networks pay is the machine's affair
    drafted = exact.variant(speculation=SpeculationConfig(**speculation))
    crowd = [CHAT, [{"role": "user", "content": "Name three colours."}], CHAT]
    plain = [exact.chat(chat, GREEDY)[0].outputs[0] for chat in crowd]
    for answer, reference in zip(drafted.chat(crowd, GREEDY), plain, strict=True):
        assert answer.outputs[0].token_ids == reference.token_ids
        assert answer.outputs[0].text == reference.text
    assert drafted.stats.record.num_accepted > 0


def test_the_packaged_head_earns_its_place(exact):
    """Whole blocks, on a sum: more than a token and a half a pass; and seeded text stays."""
    whole = SpeculationConfig(method="dspark", policy="fixed", num_speculative_tokens=7)
    drafted = exact.variant(speculation=whole)
    sums = "Tom has 12 apples. He gives 5 to Ann and buys 9 more. How many apples does Tom have now?"
    chat = [{"role": "user", "content": sums}]
    answer = drafted.chat(chat, SamplingParams(temperature=0, max_tokens=96))[0].outputs[0]
    assert answer.speculation.mean_accepted_length > 1.5
    seeded = SamplingParams(temperature=0.7, seed=3, max_tokens=32)
    texts = [llm.chat(chat, seeded)[0].outputs[0].token_ids for llm in (exact, drafted)]
    assert texts[0] == texts[1]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "chess", "rain"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("method", ("suffix", "dspark", "auto", "model"))
def test_answers_under_a_schema_are_valid_and_those_of_plain_decoding(exact, smollm2, method):
    """Greedy and seeded, beside a free request; with drafts fewer passes."""
    if method == "model" and exact.engine.runner.name != "native":
        pytest.skip("int4 drafts need the native path")
    model = {"model": str(smollm2), "quantization": "int4"} if method == "model" else {}
    policy = "adaptive" if method == "suffix" else "fixed"  # whether networks pay is the machine's affair
    drafted = exact.variant(speculation=SpeculationConfig(method=method, policy=policy, **model))
    chat = [{"role": "user", "content": "Describe a person as JSON with name, age and likes."}]
    bound = {"max_tokens": 80, "structured_outputs": {"json": SCHEMA}}
    params = [SamplingParams(temperature=0, **bound), SamplingParams(temperature=0.8, seed=5, **bound), GREEDY]
    plain = exact.chat([chat] * 3, params)
    for answer, reference in zip(drafted.chat([chat] * 3, params), plain, strict=True):
        assert answer.outputs[0].token_ids == reference.outputs[0].token_ids
    for answer in plain[:2]:
        if answer.outputs[0].finish_reason == "stop":
            jsonschema.validate(json.loads(answer.outputs[0].text), SCHEMA)
    assert any(answer.outputs[0].finish_reason == "stop" for answer in plain[:2])
    assert drafted.stats.record.num_accepted > 0


def test_the_packaged_head_says_where_it_comes_from():
    folder = packaged_head("smollm2-135m")
    assert folder is not None and sum(file.stat().st_size for file in folder.iterdir()) < 40e6
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["recipe"]["target"] == "smollm2-135m" and not provenance["git"]["dirty"]
    assert "Apache-2.0" in (folder / "README.md").read_text()
    report = json.loads((folder / "report.json").read_text())
    assert report["calibration"]["ece"][1] <= 0.02


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
