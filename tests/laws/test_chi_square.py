"""Sampled runs of the whole road (processors, law, draws, verdicts) against the target's law at positions 1 to K+1.
The reference shares no code with it, and drafts that lie about their law must fail the same test."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy import stats

import sampling_reference as reference
from dspark.params import SamplingParams
from dspark.plan.budget import choose
from dspark.sampling import Noise, Processors, RowSampler
from dspark.types import Draft
from dspark.verify.rejection import accept

VOCAB, NUM_VALID, NUM_DRAFTS = 6, 5, 3
LENGTH = NUM_DRAFTS + 1
PROMPT = [3, 1, 3]
NUM_RUNS = 800
END_IDS = [4]
BAD_WORDS = [[2], [0, 1], [1, 0, 3]]
TOO_UNLIKELY = 1e-4
"""Of the p-value over one combination: seeds are fixed, so the test passes or fails for good."""

COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "all cuts": {"temperature": 1.4, "top_k": 4, "top_p": 0.8, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.8},
    "presence and frequency": {"presence_penalty": 0.9, "frequency_penalty": -0.7},
    "logit_bias": {"logit_bias": {0: 1.5, 4: -2.0}},
    "min_tokens": {"min_tokens": 3},
    "bad_words": {"bad_words": ["stand for BAD_WORDS"]},
    "everything": {
        "temperature": 0.8,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {1: 0.8},
        "min_tokens": 2,
        "bad_words": ["stand for BAD_WORDS"],
    },
}


def target_logits(text: Sequence[int]) -> list[float]:
    rng = random.Random(f"target {text[-2:]}")
    return [rng.gauss(0, 1.5) for _ in range(VOCAB)]


def draft_logits(text: Sequence[int]) -> list[float]:
    rng = random.Random(f"draft {text[-1:]}")
    return [logit + rng.gauss(0, 1.0) for logit in target_logits(text)]


def make_sampler(params: SamplingParams, noise: Noise) -> RowSampler:
    rules = Processors.build(
        params,
        vocab_size=VOCAB,
        num_valid_tokens=NUM_VALID,
        eos_token_ids=END_IDS,
        bad_words_ids=BAD_WORDS if params.bad_words else [],
    )
    return RowSampler(params, rules, tokens=PROMPT, num_prompt=len(PROMPT), noise=noise)


class Decoder:
    """Speculative decoding of many answers to one prompt. Laws are remembered by what they depend on."""

    def __init__(self, params: SamplingParams, *, kind: str, report: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.params, self.kind, self.report = params, kind, report
        self.laws: dict[tuple[Any, ...], torch.Tensor] = {}
        self.num_accepted = self.num_verified = 0

    def law(self, sampler: RowSampler, text: list[int], drafts: list[int], *, of_draft: bool) -> torch.Tensor:
        key = (of_draft, tuple(text), tuple(drafts))
        if key not in self.laws:
            logits = draft_logits if of_draft else target_logits
            first = len(drafts) if of_draft else 0
            rows = [logits([*text, *drafts[:i]]) for i in range(first, len(drafts) + 1)]
            self.laws[key] = sampler.law(torch.tensor(rows), text, drafts)
        return self.laws[key]

    def draft(self, sampler: RowSampler, text: list[int]) -> Draft:
        tokens: list[int] = []
        if self.kind == "deterministic":
            while len(tokens) < NUM_DRAFTS:
                tokens.append(int(self.law(sampler, text, tokens, of_draft=True)[0].argmax()))
            return Draft(tokens=tokens)
        rows = []
        while len(tokens) < NUM_DRAFTS:
            q = self.law(sampler, text, tokens, of_draft=True)[0]
            tokens.append(sampler.draw_draft(q, len(text) + len(tokens)))
            rows.append(self.report(q))
        return Draft(tokens=tokens, q=torch.stack(rows))

    def begin(self) -> None:
        """Another answer."""

    def keep(self, draft: Draft) -> Draft:
        """What of it is verified."""
        return draft

    def answer(self, noise: Noise) -> list[int]:
        self.begin()
        sampler, text = make_sampler(self.params, noise), list(PROMPT)
        while len(text) < len(PROMPT) + LENGTH:
            draft = self.keep(self.draft(sampler, text))
            p = self.law(sampler, text, draft.tokens, of_draft=False)
            decision = accept(p, draft, sampler.noise, position=len(text))
            self.num_verified += len(draft.tokens)
            self.num_accepted += decision.num_accepted
            for token in decision.tokens:
                text.append(token)
                sampler.advance(token)
        return text[len(PROMPT) :][:LENGTH]


def exact_marginals(params: SamplingParams) -> list[list[float]]:
    """The law of the token at each position, by the reference alone."""
    marginals = [[0.0] * VOCAB for _ in range(LENGTH)]
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for position in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, chance in texts.items():
            logits = reference.processed(
                target_logits([*PROMPT, *text]),
                params,
                prompt=PROMPT,
                output=text,
                end_ids=END_IDS,
                bad_words=BAD_WORDS if params.bad_words else [],
                num_valid=NUM_VALID,
            )
            for token, weight in enumerate(reference.law(logits, params)):
                if weight > 0:
                    marginals[position][token] += chance * weight
                    longer[(*text, token)] = chance * weight
        texts = longer
    return marginals


def p_value(params: SamplingParams, decoder: Decoder, *, coupled: bool) -> float:
    """Of the worst position, corrected for their number. A token of probability 0 makes it 0."""
    noises = [Noise.for_answer(n) if coupled else Noise(seed=n, coupled=False) for n in range(NUM_RUNS)]
    answers = [decoder.answer(noise) for noise in noises]
    worst = 1.0
    for position, law in enumerate(exact_marginals(params)):
        counts = Counter(answer[position] for answer in answers)
        if any(law[token] == 0 for token in counts):
            return 0.0
        expected = [NUM_RUNS * chance for chance in law if chance > 0]
        observed = [counts[token] for token, chance in enumerate(law) if chance > 0]
        statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
        if len(expected) > 1:
            worst = min(worst, float(stats.chi2.sf(statistic, len(expected) - 1)))
    return min(1.0, worst * LENGTH)


def same(q: torch.Tensor) -> torch.Tensor:
    return q


@pytest.mark.parametrize("mode", ["sampled", "deterministic", "seeded"])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_emitted_tokens_have_the_targets_law(name: str, mode: str) -> None:
    params = SamplingParams(**COMBINATIONS[name], seed=0 if mode == "seeded" else None)
    decoder = Decoder(params, kind="deterministic" if mode == "deterministic" else "sampled", report=same)
    assert p_value(params, decoder, coupled=mode == "seeded") > TOO_UNLIKELY
    assert 0.1 < decoder.num_accepted / decoder.num_verified < 0.95  # both branches were walked


def flattened(q: torch.Tensor) -> torch.Tensor:
    return q.clamp_min(1e-3).sqrt() / q.clamp_min(1e-3).sqrt().sum()


def uniform(q: torch.Tensor) -> torch.Tensor:
    return torch.full_like(q, 1 / q.numel())


@pytest.mark.parametrize("lie", [flattened, uniform])
def test_a_wrong_draft_law_is_found(lie: Callable[[torch.Tensor], torch.Tensor]) -> None:
    params = SamplingParams(temperature=0.8)
    assert p_value(params, Decoder(params, kind="sampled", report=lie), coupled=False) < 1e-6


def test_a_wrong_draft_law_cannot_hurt_a_seeded_request() -> None:
    params = SamplingParams(temperature=0.8, seed=0)
    assert p_value(params, Decoder(params, kind="sampled", report=uniform), coupled=True) > TOO_UNLIKELY


@pytest.mark.parametrize("field", ["top_k", "min_tokens", "bad_words", "repetition", "logit_bias"])
def test_a_field_that_is_ignored_is_found(field: str) -> None:
    asked, served = SamplingParams(**COMBINATIONS[field]), SamplingParams()
    assert p_value(asked, Decoder(served, kind="sampled", report=same), coupled=False) < 1e-6


@pytest.mark.parametrize("name", ["plain", "all cuts", "everything"])
def test_a_seeded_answer_is_the_same_with_any_drafter(name: str) -> None:
    params = SamplingParams(**COMBINATIONS[name], seed=5)
    rng = random.Random(name)
    for seed in range(20):
        noise, texts = Noise.for_answer(seed), []
        for size_limit in (0, 0, 1, 2, 5):
            sampler, text = make_sampler(params, noise), list(PROMPT)
            while len(text) < 20:
                tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(0, size_limit))]
                rows = torch.tensor([target_logits([*text, *tokens[:i]]) for i in range(len(tokens) + 1)])
                p = sampler.law(rows, text, tokens)
                for token in accept(p, Draft(tokens=tokens), noise, position=len(text)).tokens:
                    text.append(token)
                    sampler.advance(token)
            texts.append(text[:20])
        assert all(text == texts[0] for text in texts)


def test_answers_differ_between_seeds_and_between_samples_of_a_request() -> None:
    params = SamplingParams(seed=1)
    decoder = Decoder(params, kind="sampled", report=same)
    seeds = {tuple(decoder.answer(Noise.for_answer(seed))) for seed in range(20)}
    samples = {tuple(decoder.answer(Noise.for_answer(1, index=index))) for index in range(20)}
    fresh = {tuple(decoder.answer(Noise.for_answer(None))) for _ in range(40)}
    assert min(len(seeds), len(samples), len(fresh)) > 5


LUCKY = (0, 3)


class ScheduledDecoder(Decoder):
    """What is verified the budget decides, over this row and a neighbour that drafts beside it, on a curve with a cliff
    and up to the capacity that the step before found. A claim knows the tokens before its own, and hangs on the last of
    them as much as it can: a plan that looks ahead decides by it whether that very token is verified."""

    def __init__(self, *args: Any, search_all: bool, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.search_all = search_all
        self.past: list[list[float]] = []

    def draft(self, sampler: RowSampler, text: list[int]) -> Draft:
        """Uniform over the valid words: far from the target, so that a bias shows."""
        q = torch.tensor([1 / NUM_VALID] * NUM_VALID + [0.0] * (VOCAB - NUM_VALID))
        tokens = [sampler.draw_draft(q, len(text) + j) for j in range(NUM_DRAFTS)]
        return Draft(tokens=tokens, q=torch.stack([q] * NUM_DRAFTS))

    def survival(self, draft: Draft) -> list[float]:
        found = [0.5]
        for token in draft.tokens[:-1]:
            found.append(found[-1] * (0.95 if token in LUCKY else 0.01))
        return found

    def begin(self) -> None:
        self.past = []
        self.beside = make_sampler(self.params, Noise(seed=10_000 + len(self.laws), coupled=False))

    def keep(self, draft: Draft) -> Draft:
        cost = lambda rows: {2: 1.0, 3: 1.6, 4: 1.65, 5: 1.7, 6: 1.75, 7: 2.6, 8: 2.65}[rows]  # noqa: E731
        rows = [self.survival(draft), self.survival(self.draft(self.beside, list(PROMPT)))]
        capacity = sum(choose(self.past, cost, 6, search_all=True)) if self.past else 0
        self.past = rows
        return draft.prefix(choose(rows, cost, 6, search_all=self.search_all, capacity=capacity)[0])


def scheduled(search_all: bool) -> ScheduledDecoder:
    params = SamplingParams(temperature=0.8)
    return ScheduledDecoder(params, kind="sampled", report=same, search_all=search_all)


def test_emitted_tokens_have_the_targets_law_under_the_scheduler() -> None:
    decoder = scheduled(search_all=False)
    assert p_value(decoder.params, decoder, coupled=False) > TOO_UNLIKELY
    assert 0 < decoder.num_accepted < decoder.num_verified < NUM_RUNS * LENGTH * NUM_DRAFTS


def test_a_scheduler_that_looks_ahead_is_found() -> None:
    decoder = scheduled(search_all=True)
    assert p_value(decoder.params, decoder, coupled=False) < 1e-6
