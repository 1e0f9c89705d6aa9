"""The torch and general paths on a GPU: the same logits, the same text as on the CPU."""

from __future__ import annotations

import pytest
import torch

from dspark.draft.lookup import SuffixDrafter
from dspark.model.runner import build_runner
from dspark.params import SamplingParams
from tests.driver import Driver
from tests.fakes import ScriptedDrafter, make_engine, mostly_right, random_prompts, run
from tests.tiny_heads import tiny_head
from tests.tiny_models import FAMILIES, tiny_model

VOCAB = 96
PROMPTS = random_prompts(6, vocab_size=VOCAB)


@pytest.mark.parametrize("path", ("torch", "general"))
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_the_cpu(family, path):
    params = SamplingParams(temperature=0, max_tokens=24)
    cpu = build_runner(tiny_model(family, vocab_size=VOCAB), path="torch")
    expected = [seq.output_token_ids for seq in run(make_engine(cpu), PROMPTS, params)]
    answers = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)}
    gpu = build_runner(tiny_model(family, vocab_size=VOCAB), path=path, device="cuda")
    for drafter in (None, SuffixDrafter(), ScriptedDrafter(mostly_right(answers, vocab_size=VOCAB))):
        engine = make_engine(gpu, drafter=drafter, page_size=16, num_pages=64)
        assert [seq.output_token_ids for seq in run(engine, PROMPTS, params)] == expected


@pytest.mark.parametrize("family", ("llama", "qwen3"))
@pytest.mark.parametrize(
    "shape", ({}, {"context": "fused", "layers": (0, 1, 2), "draft_vocab": 60}, {"kind": "eagle3", "layers": (0, 1, 2)})
)
def test_heads_draft_on_the_gpu(family, shape):
    params = SamplingParams(temperature=0, max_tokens=24)
    cpu = build_runner(tiny_model(family, vocab_size=VOCAB), path="torch")
    expected = [seq.output_token_ids for seq in run(make_engine(cpu), PROMPTS, params)]
    gpu = build_runner(tiny_model(family, vocab_size=VOCAB), path="torch", device="cuda")
    head = tiny_head(tiny_model(family, vocab_size=VOCAB), **shape).to("cuda")
    engine = make_engine(gpu, head=head, page_size=16, num_pages=64)
    assert [seq.output_token_ids for seq in run(engine, PROMPTS, params)] == expected
    assert engine.totals.record.num_verified > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_close(family):
    model = tiny_model(family, vocab_size=VOCAB, dtype=torch.bfloat16)
    logits = {}
    for name, runner in (
        ("cpu", build_runner(tiny_model(family, vocab_size=VOCAB), path="torch")),
        ("cuda", build_runner(model, path="torch", device="cuda")),
    ):
        driver = Driver(runner, page_size=16, num_pages=16)
        driver.open(0)
        logits[name] = driver.step({0: PROMPTS[1]})[0].float().cpu()
    error = (logits["cuda"] - logits["cpu"]).abs().mean() / logits["cpu"].std()
    assert error < 0.05
