"""Processors, laws, noise and reported log-probabilities, each against a reference written apart."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import sampling_reference as reference
from dspark.law import NUM_CANDIDATES, probabilities, raw_logprobs
from dspark.noise import RACE_BLOCK, STREAM_DRAFT, STREAM_DRAW, Noise
from dspark.params import SamplingParams
from dspark.sampling import Processors, RowSampler, packed_laws, packed_process

VOCAB, NUM_VALID = 12, 10
PROMPT, OUTPUT = [1, 4, 4, 7], [2, 4, 2]
DRAFTS = [2, 9, 4, 9]
BAD_WORDS = [[5], [2, 3], [4, 2, 9], [9, 4, 9]]


def sampler_of(params: SamplingParams, **kwargs: Any) -> RowSampler:
    rules = Processors.build(
        params,
        vocab_size=VOCAB,
        num_valid_tokens=NUM_VALID,
        eos_token_ids=[0],
        bad_words_ids=BAD_WORDS if params.bad_words else [],
    )
    return RowSampler(params, rules, tokens=[*PROMPT, *OUTPUT], num_prompt=len(PROMPT), **kwargs)


def rows_of(num: int, *, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed)) * 2


FIELDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": -0.4},
    "bias": {"logit_bias": {0: 2.5, 9: -100.0}},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [8]},
    "bad_words": {"bad_words": ["x"]},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {3: 1.0},
        "min_tokens": 6,
        "bad_words": ["x"],
    },
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_row_of_a_block_sees_the_drafts_before_it(name: str) -> None:
    params = SamplingParams(**FIELDS[name])
    logits = rows_of(len(DRAFTS) + 1)
    given_logits = logits.clone()
    got = sampler_of(params).process(logits, [*PROMPT, *OUTPUT], DRAFTS)
    for i, row in enumerate(logits):
        expected = reference.processed(
            row.tolist(),
            params,
            prompt=PROMPT,
            output=[*OUTPUT, *DRAFTS[:i]],
            end_ids=[0, *params.stop_token_ids],
            bad_words=BAD_WORDS if params.bad_words else [],
            num_valid=NUM_VALID,
        )
        torch.testing.assert_close(got[i], torch.tensor(expected))
    assert torch.equal(logits, given_logits)


@pytest.mark.parametrize("name", FIELDS)
def test_rejected_drafts_leave_no_trace_and_committed_tokens_do(name: str) -> None:
    params = SamplingParams(**FIELDS[name])
    used, text = sampler_of(params), [*PROMPT, *OUTPUT]
    logits = rows_of(3)
    used.process(rows_of(5), text, DRAFTS)
    for token in DRAFTS[:2]:
        used.advance(token)
        text.append(token)
    fresh = sampler_of(params)
    fresh.rebuild(text, num_prompt=len(PROMPT))
    expected = fresh.process(logits, text, [6, 1])
    assert torch.equal(used.process(logits, text, [6, 1]), expected)
    # One row and the drafts so far: what a drafter passes.
    for i in range(3):
        assert torch.equal(used.process(logits[i : i + 1], text, [6, 1][:i])[0], expected[i])


def test_a_history_of_another_length_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        sampler_of(SamplingParams()).process(rows_of(1), PROMPT)


def test_idle_processors_pass_the_logits_themselves() -> None:
    params, logits = SamplingParams(), rows_of(2)
    rules = Processors.build(params, vocab_size=VOCAB)
    sampler = RowSampler(params, rules, tokens=PROMPT, num_prompt=4)
    assert sampler.process(logits, PROMPT, [1]) is logits
    assert packed_process([sampler], logits, tokens_before=[PROMPT], drafts=[[1]]) is logits


@pytest.mark.parametrize("width", [8, 15])
def test_a_drafters_logits_may_be_padded_differently(width: int) -> None:
    params = SamplingParams(**(FIELDS["all"] | {"logit_bias": {9: 1.0}}))
    logits = rows_of(1, vocab=15)
    text = [*PROMPT, *OUTPUT]
    got = sampler_of(params).process(logits[:, :width], text)
    expected = sampler_of(params).process(logits[:, :VOCAB], text)
    shared = min(width, VOCAB)
    assert torch.equal(got[:, :shared], expected[:, :shared])
    assert bool((got[:, NUM_VALID:] == -math.inf).all())


def test_a_grammar_outranks_min_tokens_and_bad_words_when_nothing_else_is_left() -> None:
    params = SamplingParams(min_tokens=9, bad_words=["x"])
    sampler, text = sampler_of(params), [*PROMPT, *OUTPUT]
    allowed = torch.zeros(2, VOCAB, dtype=torch.bool)
    allowed[0, [0, 5]] = True  # only the end and a bad word
    allowed[1, [0, 1]] = True
    left = sampler.process(rows_of(2), text, [6], allowed=allowed) > -math.inf
    assert left.nonzero().tolist() == [[0, 0], [0, 5], [1, 1]]


def test_packed_rows_equal_rows_alone() -> None:
    names = ["nothing", "all", "repetition"]
    settings_: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 3, "min_p": 0.01},
    ]
    params = [SamplingParams(**FIELDS[name], **more) for name, more in zip(names, settings_, strict=True)]
    samplers = [sampler_of(one) for one in params]
    drafts, text = [[], [2, 9], [4]], [*PROMPT, *OUTPUT]
    logits = rows_of(6)
    laws = packed_laws(samplers, logits, tokens_before=[text] * 3, drafts=drafts)
    alone = [s.law(rows, text, d) for s, rows, d in zip(samplers, logits.split([1, 3, 2]), drafts, strict=True)]
    assert torch.equal(laws, torch.cat(alone))


@pytest.mark.parametrize(
    ("kwargs", "bad_words", "message"),
    [
        ({"logit_bias": {NUM_VALID: 1.0}}, [], "logit_bias holds token id 10"),
        ({"stop_token_ids": [99]}, [], "stop_token_ids holds token id 99"),
        ({}, [[1, 12]], "bad_words holds token id 12"),
        ({}, [[]], "word without tokens"),
    ],
)
def test_ids_out_of_the_vocabulary_are_refused(
    kwargs: dict[str, Any], bad_words: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Processors.build(
            SamplingParams(**kwargs), vocab_size=VOCAB, num_valid_tokens=NUM_VALID, bad_words_ids=bad_words
        )


def laws_of(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    return probabilities(
        logits,
        temperature=[one.temperature for one in params],
        top_k=[one.top_k for one in params],
        top_p=[one.top_p for one in params],
        min_p=[one.min_p for one in params],
    )


def assert_same_law(got: torch.Tensor, logits: torch.Tensor, params: SamplingParams) -> None:
    """Equal to the reference, whose cuts may lie anywhere within a float32 rounding of what was asked."""
    differences = []
    for nudge in (0.0, -1e-6, 1e-6):
        top_p = params.top_p if params.top_p == 1 else params.top_p * (1 + nudge)
        nudged = dataclasses.replace(params, top_p=top_p, min_p=min(1.0, params.min_p * (1 + nudge)))
        expected = torch.tensor(reference.law(logits.tolist(), nudged), dtype=torch.float64)
        differences.append(float((got.double() - expected).abs().max()))
    assert min(differences) < 1e-6, differences


cuts = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 100]),
    top_p=st.sampled_from([1e-9, 0.13, 0.51, 0.87, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.43, 1.0]),
)
values = st.sampled_from([-math.inf, -3.7, -1.0, -0.9, 0.0, 0.25, 1.0, 2.0])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(cuts, st.lists(values, min_size=7, max_size=7)), min_size=1, max_size=5))
def test_laws_of_mixed_rows_with_ties(rows: list[tuple[SamplingParams, list[float]]]) -> None:
    rows = [(one, [0.5, *logits]) for one, logits in rows]  # a finite logit in each row
    logits = torch.tensor([row for _, row in rows])
    laws = laws_of(logits, [one for one, _ in rows])
    for law, row, (one, _) in zip(laws, logits, rows, strict=True):
        assert_same_law(law, row, one)


LARGE = 10_000


@pytest.mark.parametrize("heat", [0.05, 1.0, 30.0])
def test_laws_of_large_rows_at_every_width_of_search(heat: float) -> None:
    """The first candidates settle peaked rows, flat rows need a full sort; bfloat16 makes ties."""
    cut: list[dict[str, Any]] = [
        {"top_p": 0.95},
        {"top_k": NUM_CANDIDATES[0]},
        {"top_k": 50},
        {"top_k": 5000, "top_p": 0.9},
        {"min_p": 0.01},
        {"top_p": 0.3, "min_p": 0.2},
        {},
    ]
    params = [SamplingParams(temperature=heat, **one) for one in cut]
    logits = rows_of(len(cut), vocab=LARGE, seed=3).bfloat16().float()
    laws = laws_of(logits, params)
    for law, row, one in zip(laws, logits, params, strict=True):
        assert_same_law(law, row, one)
        assert float(law.sum()) == pytest.approx(1, abs=1e-5)
    for i, one in enumerate(params):
        assert torch.equal(laws_of(logits[i : i + 1], [one])[0], laws[i]), "a row feels its neighbours"


def test_ties_at_the_cuts() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert laws_of(logits, [SamplingParams(top_k=2)]).gt(0).tolist() == [[False, True, True, True, False]]
    assert laws_of(logits, [SamplingParams(top_p=0.4)]).gt(0).tolist() == [[False, True, True, False, False]]
    assert laws_of(logits, [SamplingParams(temperature=0)]).tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0]]
    wide = torch.zeros(1, LARGE)
    kept = laws_of(wide, [SamplingParams(top_p=0.00995)])[0].nonzero().squeeze(1).tolist()
    assert kept == list(range(100))
    many = torch.arange(LARGE, 0, -1).float().div(1000).floor()[None]  # blocks of equal logits, wider than a search
    params = SamplingParams(top_p=0.7)
    assert_same_law(laws_of(many, [params])[0], many[0], params)


def test_tiny_temperatures_and_rows_without_a_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert laws_of(logits, [SamplingParams(temperature=1e-44)]).tolist() == [[0.0, 0.5, 0.5, 0.0]]
    for broken in (math.nan, math.inf):
        with pytest.raises(AssertionError, match="NaN or infinity"):
            laws_of(torch.tensor([[1.0, broken]]), [SamplingParams()])
    with pytest.raises(AssertionError, match="leave no token"):
        laws_of(torch.full((1, 3), -math.inf), [SamplingParams()])


def test_uniform_numbers_are_uniform_along_positions_and_streams() -> None:
    for seed in (0, 1, -1, 2**70):
        noise = Noise.for_answer(seed)
        by_position = [noise.uniform(n, 1) for n in range(4000)]
        by_stream = [noise.uniform(7, n) for n in range(4000)]
        for numbers in (by_position, by_stream):
            assert 0 <= min(numbers) and max(numbers) < 1
            assert stats.kstest(numbers, "uniform").pvalue > 1e-3
            assert abs(stats.pearsonr(numbers[1:], numbers[:-1]).statistic) < 0.06
    assert len({Noise.for_answer(seed).uniform(0, 0) for seed in range(-500, 500)}) == 1000


def test_every_bit_of_the_hash_is_fair_and_moved_by_every_input() -> None:
    noise, ids = Noise.for_answer(3), torch.arange(20_000)
    for position in (0, 1, 12_345):
        assert stats.kstest(noise.gumbel(position, ids).numpy(), "gumbel_r").pvalue > 1e-3
        assert stats.kstest(noise.exponential(position, ids).numpy(), "expon").pvalue > 1e-3
    at_one_id = torch.cat([noise.gumbel(position, torch.tensor([17])) for position in range(4000)])
    assert stats.kstest(at_one_id.numpy(), "gumbel_r").pvalue > 1e-3
    here, there = noise.exponential(5, ids), noise.exponential(6, ids)
    other = Noise.for_answer(4).exponential(5, ids)
    for a, b in ((here, there), (here, other), (here[1:], here[:-1])):
        assert abs(stats.spearmanr(a.numpy(), b.numpy()).statistic) < 0.03


def test_noise_of_a_token_does_not_depend_on_its_company() -> None:
    noise, ids = Noise.for_answer(8), torch.arange(500)
    some = torch.tensor([3, 499, 20])
    assert torch.equal(noise.gumbel(4, some), noise.gumbel(4, ids)[some])
    assert Noise.for_answer(8) == noise and Noise.for_answer(8, index=1) != noise
    assert noise.coupled and not Noise.for_answer(None).coupled
    assert Noise.for_answer(None) != Noise.for_answer(None)


@pytest.mark.parametrize("coupled", [False, True])
def test_draws_have_the_law_they_are_given(coupled: bool) -> None:
    weights = torch.tensor([0.0, 3.0, 0.5, 0.0, 1.5, 0.0])
    noise = Noise(seed=11, coupled=coupled)
    counts = torch.bincount(torch.tensor([noise.draw(weights, n) for n in range(4000)]), minlength=6)
    assert counts[weights == 0].sum() == 0
    assert stats.chisquare(counts[weights > 0].numpy(), [2400, 400, 1200]).pvalue > 1e-3


def test_coupled_draws_are_gumbel_max_over_any_number_of_blocks() -> None:
    noise = Noise(seed=2, coupled=True)
    p = rows_of(1, vocab=2 * RACE_BLOCK + 5)[0].softmax(-1)
    ids = torch.arange(p.numel())
    for position in range(30):
        expected = int((p.double().log() + noise.gumbel(position, ids)).argmax())
        assert noise.draw(p, position) == expected == noise.draw(p * 7, position, STREAM_DRAFT)


def test_coupled_drafter_and_target_meet_as_often_as_the_theory_says() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.25, 0.25, 0.1, 0.4])
    meet = sum(1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(4)) for x in range(3))
    noise, num = Noise(seed=0, coupled=True), 4000
    met = sum(noise.draw(p, n) == noise.draw(q, n) for n in range(num))
    assert stats.binomtest(met, num, float(meet)).pvalue > 1e-3
    distance = float((p - q).abs().sum() / 2)
    assert float(meet) >= (1 - distance) / (1 + distance)


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.75, 1 - 2.0**-53])
def test_edges_of_the_inverse_transform(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noise, "uniform", lambda self, position, stream: fraction)
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0, 0.0])
    expected = {0.0: 1, 0.25: 3, 0.75: 4, 1 - 2.0**-53: 4}[fraction]
    assert Noise(seed=0, coupled=False).draw(weights, 0) == expected


def test_draws_refuse_laws_without_mass() -> None:
    for coupled in (False, True):
        for weights in (torch.zeros(3), torch.tensor([math.nan, 1.0])):
            with pytest.raises(AssertionError):
                Noise(seed=0, coupled=coupled).draw(weights, 0)


def test_draft_draws_are_fresh_every_time_unless_seeded() -> None:
    q = torch.full((64,), 1 / 64)
    sampler = sampler_of(SamplingParams(), noise=Noise(seed=1, coupled=False))
    again = sampler_of(SamplingParams(), noise=Noise(seed=1, coupled=False))
    first = [sampler.draw_draft(q, 10) for _ in range(8)]
    sampler.rebuild([*PROMPT, *OUTPUT], num_prompt=len(PROMPT))  # as after a preemption
    later = [sampler.draw_draft(q, 10) for _ in range(8)]
    assert len(set(first)) > 4 and first != later
    assert sampler.noise.draw(q, 10, STREAM_DRAW) == again.noise.draw(q, 10)  # drafting moves nothing of the verifier's
    assert [again.draw_draft(q, 10) for _ in range(16)] == first + later
    seeded = sampler_of(SamplingParams(seed=4))
    assert {seeded.draw_draft(q, 10) for _ in range(8)} == {seeded.noise.draw(q, 10)}


def test_logprobs_of_raw_logits() -> None:
    logits = rows_of(4, vocab=50)
    logits[3, 10:20] = 9.0  # ties at the top
    chosen = [int(logits[0].argmax()), 17, int(logits[2].topk(3).indices[2]), 15]
    table = torch.log_softmax(logits.double(), -1)
    for num in (0, 1, 3, 50):
        for row, pick, entries in zip(table, chosen, raw_logprobs(logits, chosen, num), strict=True):
            order = torch.sort(row, descending=True, stable=True).indices.tolist()
            assert entries[0].token_id == pick
            assert [e.token_id for e in entries[1:]] == [token for token in order[:num] if token != pick]
            for entry in entries:
                assert entry.rank == order.index(entry.token_id) + 1
                assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-5)
    assert raw_logprobs(logits, torch.tensor(chosen), 2) == raw_logprobs(logits, chosen, 2)
