"""Sampled answers of dspark.integrations.hf have the law of model.generate, whatever drafts, and can be repeated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dspark.integrations import hf
from tests.fakes import random_prompts
from tests.tiny_models import tiny_model

VOCAB = 96
PAD = 0
SUFFIX = {"method": "suffix", "policy": "fixed"}
[PROMPT] = random_prompts(1, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama", vocab_size=VOCAB)


LAWS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top_k": {"top_k": 4},
    "top_p": {"top_k": 0, "top_p": 0.6},
    "both": {"top_k": 9, "top_p": 0.8, "temperature": 1.3},
    "min_p": {"top_k": 20, "min_p": 0.1},
    "penalty": {"top_k": 6, "repetition_penalty": 1.5},
    "defaults": {},
}
NUM_DRAWS = 400
CRITICAL = 4.0
"""Standard deviations of a chi-square from its mean, which a right law exceeds about once in ten thousand."""


def relative(model: Any) -> Any:
    """The same model but for noise: often right, and often not."""
    found = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for parameter in found.parameters():
        parameter.add_(0.02 * float(parameter.std()) * torch.randn(parameter.shape, generator=generator))
    return found


@pytest.mark.parametrize("law", LAWS)
def test_sampled_tokens_have_transformers_law(llama: Any, law: str) -> None:
    """The second token, given the first: it is drafted by another model, so accepted and corrected draws are in it."""
    prompt = torch.tensor([PROMPT])
    settings = {"do_sample": True, "max_new_tokens": 3, "eos_token_id": None, "pad_token_id": PAD, **LAWS[law]}
    how = {"model": relative(llama), "policy": "fixed", "num_speculative_tokens": 4}
    draft: dict[str, Any] = {"draft": how, "engine": {"max_num_seqs": 64}}
    torch.manual_seed(5)
    got = hf.generate(llama, prompt, **settings, num_return_sequences=NUM_DRAWS, **draft)
    assert got.shape == (NUM_DRAWS, prompt.shape[1] + 3)
    record = hf.engine_of(llama, **draft).stats.record
    assert 0 < record.num_accepted < record.num_verified, "drafts must be accepted, and rejected"
    scores = llama.generate(
        prompt, **{**settings, "max_new_tokens": 1}, output_scores=True, return_dict_in_generate=True
    )
    _check_counts(got[:, prompt.shape[1]], scores.scores[0][0].softmax(-1))
    common = int(got[:, prompt.shape[1]].mode().values)
    longer = torch.cat([prompt, torch.tensor([[common]])], dim=1)
    then = llama.generate(longer, **{**settings, "max_new_tokens": 1}, output_scores=True, return_dict_in_generate=True)
    chosen = got[got[:, prompt.shape[1]] == common][:, -2]
    _check_counts(chosen, then.scores[0][0].softmax(-1))
    with pytest.raises(AssertionError):  # the negative control: another law is seen
        _check_counts(got[:, prompt.shape[1]], then.scores[0][0].softmax(-1))


def _check_counts(tokens: torch.Tensor, law: torch.Tensor) -> None:
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    assert bool((counts[law == 0] == 0).all()), "a token without probability was drawn"
    expected = law.double() * len(tokens)
    large = expected >= 5
    pairs = [(counts[large], expected[large])]
    if bool((~large).any()) and float(expected[~large].sum()) > 0:
        pairs.append((counts[~large].sum()[None], expected[~large].sum()[None]))
    statistic = sum(float(((seen - mean) ** 2 / mean).sum()) for seen, mean in pairs)
    freedom = max(1, sum(len(seen) for seen, _ in pairs) - 1)
    assert statistic <= freedom + CRITICAL * (2 * freedom) ** 0.5, (statistic, freedom)


def test_seeds(llama: Any) -> None:
    """Repeatable by `seed` and by torch.manual_seed, whatever drafts by `seed`; rows of one prompt differ."""
    batch = {"input_ids": torch.tensor([PROMPT] * 3)}
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": PAD}
    one = hf.generate(llama, **batch, **settings, seed=11, draft=None)
    assert torch.equal(one, hf.generate(llama, **batch, **settings, seed=11, draft=SUFFIX))
    assert not torch.equal(one, hf.generate(llama, **batch, **settings, seed=12, draft=None))
    assert not torch.equal(one[0], one[1])
    torch.manual_seed(1)
    first = hf.generate(llama, **batch, **settings, draft=SUFFIX)
    torch.manual_seed(1)
    assert torch.equal(first, hf.generate(llama, **batch, **settings, draft=SUFFIX))
    assert not torch.equal(first, hf.generate(llama, **batch, **settings, draft=SUFFIX))
