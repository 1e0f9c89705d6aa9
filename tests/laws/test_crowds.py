"""A row does not feel its neighbours: alone, in any company, in any order, after preemption, with every drafter."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from dspark.draft.lookup import SuffixDrafter
from dspark.draft.model import ModelDrafter
from dspark.model.cache import KVCache
from dspark.model.runner import build_runner
from dspark.params import SamplingParams
from dspark.plan.admit import MAX_REST, Admission
from dspark.plan.cost import CostTable
from dspark.plan.pace import Pace
from tests.fakes import ScriptedDrafter, add, junk, make_engine, make_speculator, random_prompts, run
from tests.tiny_heads import tiny_head
from tests.tiny_models import tiny_model

VOCAB = 96
PROMPTS = random_prompts(6, vocab_size=VOCAB, seed=3)


@pytest.fixture(scope="module")
def runner():
    return build_runner(tiny_model("qwen2", vocab_size=VOCAB), path="torch")


def drafter(name, runner):
    if name == "model":
        draft = build_runner(tiny_model("qwen2", vocab_size=VOCAB, seed=1), path="torch")
        cache = KVCache(draft.layer_specs, num_pages=128, page_size=4, dtype=draft.cache_dtype)
        return ModelDrafter(draft, cache, vocab_size=VOCAB, num_valid_tokens=VOCAB)
    return {"none": lambda: None, "suffix": SuffixDrafter, "junk": lambda: ScriptedDrafter(junk(vocab_size=VOCAB))}[
        name
    ]()


@pytest.mark.parametrize("name", ("none", "suffix", "model", "junk", "head"))
@pytest.mark.parametrize(
    "fields",
    (
        {"temperature": 0.9, "seed": 7},
        {"temperature": 1.0, "seed": 8, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.7, "seed": 9, "top_k": 8, "frequency_penalty": 0.5, "min_tokens": 4},
        {"temperature": 0.0, "presence_penalty": 0.7},
    ),
)
def test_seeded_tokens_are_the_same_with_every_drafter_and_company(runner, name, fields):
    params = SamplingParams(max_tokens=16, **fields)
    alone = [run(make_engine(runner, eos=(1,)), [p], params)[0].output_token_ids for p in PROMPTS]
    for order in (list(range(6)), [3, 1, 5, 0, 4, 2]):
        head = tiny_head(tiny_model("qwen2", vocab_size=VOCAB)) if name == "head" else None
        guess = None if name == "head" else drafter(name, runner)
        engine = make_engine(runner, drafter=guess, head=head, eos=(1,), num_pages=30, max_tokens=11, max_seqs=4)
        seqs = run(engine, [PROMPTS[i] for i in order], params)
        assert [seq.output_token_ids for seq in seqs] == [alone[i] for i in order]


STEEP = CostTable([(1, 1.0), (64, 30.0)])


@pytest.mark.parametrize("name", ("suffix", "model"))
@pytest.mark.parametrize("objective", ("throughput", "latency"))
@pytest.mark.parametrize("temperature", (0.0, 0.9))
@pytest.mark.parametrize("num_pages", (60, 24))
def test_plans_over_all_rows_floors_and_priorities_change_no_text(runner, name, objective, temperature, num_pages):
    """Joint lengths, weights, rows that sit out and prompts that wait move work between rows, and nothing else. Whoever
    has begun to answer goes on within MAX_REST steps."""
    rng = random.Random(5)
    plain = [SamplingParams(max_tokens=24, temperature=temperature, seed=3 + i) for i in range(6)]
    alone = [run(make_engine(runner, eos=(1,)), [p], q)[0].output_token_ids for p, q in zip(PROMPTS, plain)]
    draft_cost = CostTable([(1, 0.05), (8, 0.2)]) if name == "model" else None
    plans = make_speculator(drafter(name, runner), cost=STEEP, draft_cost=draft_cost)
    admission = Admission(
        pace=Pace(objective=objective), cost=plans.cost, expected=(lambda seq_id: seq_id % 3) if draft_cost else None
    )
    engine = make_engine(
        runner, speculator=plans, admission=admission, eos=(1,), num_pages=num_pages, max_tokens=40, max_seqs=4
    )
    now, rested = [0.0], 0
    engine.scheduler.clock = lambda: now[0]
    for turn in range(3):
        order = rng.sample(range(6), 6)
        seqs = {}
        for place, i in enumerate(order):
            asked = replace(plain[i], min_tokens_per_second=rng.choice((None, 2.0, 900.0)))
            seqs[i] = add(engine, PROMPTS[i], asked, seq_id=10 * turn + place, priority=rng.choice((0, 0, 3)))
        waits = dict.fromkeys(seqs, 0)
        while engine.has_work:
            before = {i: seq.num_output for i, seq in seqs.items()}
            running = {i for i, seq in seqs.items() if seq in engine.scheduler.running and seq.num_pending == 1}
            engine.step()
            now[0] += 0.05
            for i, seq in seqs.items():
                still = i in running and seq.num_output == before[i] and seq in engine.scheduler.running
                waits[i] = waits[i] + 1 if still else 0
                rested += still
            assert max(waits.values()) < MAX_REST
        assert [seqs[i].output_token_ids for i in range(6)] == alone
    assert rested > 0 and not admission.pace.rows and not admission.overtaken


def test_unseeded_answers_differ(runner):
    params = SamplingParams(max_tokens=16, temperature=1.0)
    answers = {tuple(seq.output_token_ids) for seq in run(make_engine(runner), [PROMPTS[0]] * 8, params)}
    assert len(answers) > 1


@pytest.mark.parametrize("seed", range(6))
def test_aborts_and_preemptions_at_random_steps_hurt_nobody(runner, seed):
    rng = random.Random(seed)
    params = SamplingParams(temperature=0, max_tokens=20)
    alone = [run(make_engine(runner), [p], params)[0].output_token_ids for p in PROMPTS]
    engine = make_engine(runner, drafter=drafter("junk", runner), num_pages=40, max_tokens=13, max_seqs=5)
    seqs = [add(engine, p, params, seq_id=i) for i, p in enumerate(PROMPTS)]
    aborted = set()
    while engine.has_work:
        engine.step()
        if rng.random() < 0.1 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        if rng.random() < 0.05 and engine.rows:
            victim = rng.choice(list(engine.rows))
            engine.abort(victim)
            aborted.add(victim)
    engine.cache.check()
    assert not engine.cache.sequences
    for i, seq in enumerate(seqs):
        if i in aborted:
            assert seq.finish_reason == "abort" and seq.output_token_ids == alone[i][: seq.num_output]
        else:
            assert seq.output_token_ids == alone[i]


def test_prefix_reuse_of_every_remainder(runner):
    """Cold and cached prompts give the same tokens, whatever is left over of the last page."""
    params = SamplingParams(temperature=0, max_tokens=6)
    base = [2 + (i * 7) % 90 for i in range(40)]
    for length in range(8, 25):
        cold = run(make_engine(runner, prefix_reuse=False), [base[:length]], params)[0]
        engine = make_engine(runner, drafter=drafter("junk", runner))
        run(engine, [base], params)
        warm = run(engine, [base[:length]], params)[0]
        assert warm.output_token_ids == cold.output_token_ids
        assert warm.num_prefix_hits == (length - 1) // 4 * 4 and cold.num_prefix_hits == 0


def test_logprobs_are_those_of_plain_decoding(runner):
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=3, prompt_logprobs=2)
    plain = run(make_engine(runner), PROMPTS, params)
    drafted = run(make_engine(runner, drafter=drafter("model", runner), max_tokens=10), PROMPTS, params)
    for a, b in zip(plain, drafted, strict=True):
        assert a.output_token_ids == b.output_token_ids
        for rows in ((a.logprobs, b.logprobs), (a.prompt_logprobs[1:], b.prompt_logprobs[1:])):
            for x, y in zip(*rows, strict=True):
                assert [e.token_id for e in x] == [e.token_id for e in y] and [e.rank for e in x] == [e.rank for e in y]
                torch.testing.assert_close(
                    torch.tensor([e.logprob for e in x]), torch.tensor([e.logprob for e in y]), atol=1e-3, rtol=1e-3
                )
        assert b.prompt_logprobs[0] is None and len(b.prompt_logprobs) == b.num_prompt


def test_a_short_draft_context_only_ends_the_drafts(runner):
    draft = build_runner(tiny_model("qwen2", vocab_size=VOCAB), path="torch", max_context=24)
    cache = KVCache(draft.layer_specs, num_pages=64, page_size=4, dtype=draft.cache_dtype)
    engine = make_engine(runner, drafter=ModelDrafter(draft, cache, vocab_size=VOCAB, num_valid_tokens=VOCAB))
    params = SamplingParams(temperature=0, max_tokens=40)
    plain = run(make_engine(runner), [[4, 5, 6]], params)[0]
    seq = run(engine, [[4, 5, 6]], params)[0]
    assert seq.output_token_ids == plain.output_token_ids
    assert 0 < seq.record.num_drafted <= 24


def test_a_draft_cache_that_is_too_small_only_ends_the_drafts(runner):
    cache = KVCache(runner.layer_specs, num_pages=6, page_size=4, dtype=runner.cache_dtype)
    engine = make_engine(runner, drafter=ModelDrafter(runner, cache, vocab_size=VOCAB, num_valid_tokens=VOCAB))
    params = SamplingParams(temperature=0, max_tokens=20)
    plain = run(make_engine(runner), PROMPTS, params)
    drafted = run(engine, PROMPTS, params)
    assert [s.output_token_ids for s in drafted] == [s.output_token_ids for s in plain]
    cache.check()
    assert not cache.sequences


def test_a_long_prompt_does_not_stall_those_who_decode(runner):
    """Chunked prefill: every decoding row advances in every step, whoever came first."""
    engine = make_engine(runner, max_tokens=8, max_seqs=3)
    params = SamplingParams(temperature=0, max_tokens=30)
    add(engine, [3] * 60, params, seq_id=0)
    short = [add(engine, [5, 6], params, seq_id=1), add(engine, [7], params, seq_id=2)]
    for _ in range(30):
        before = [seq.num_output for seq in short]
        ready = [seq.num_cached > 0 for seq in short]
        engine.step()
        for seq, count, was_ready in zip(short, before, ready, strict=True):
            if was_ready and seq.id in engine.rows:
                assert seq.num_output > count
    while engine.has_work:
        engine.step()
