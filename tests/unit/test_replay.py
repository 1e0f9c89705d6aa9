"""Replay: a record under "shadow" replayed under a policy is what the engine does under that policy."""

from __future__ import annotations

import json
import math
import random

import pytest

from dspark.bench.profile import Profile, learned
from dspark.engine.recording import costs as recorded_costs
from dspark.model.runner import build_runner
from dspark.observe.profile import ProfileLog
from dspark.params import SamplingParams
from dspark.plan.cost import CostTable
from dspark.plan.gains import Gains
from dspark.plan.replay import (
    Answer,
    Chance,
    Costs,
    answer_from_dict,
    best_possible,
    costs_from_dict,
    policy_replay,
    replay,
)
from tests.fakes import ScriptedDrafter, make_engine, make_speculator, random_prompts, run
from tests.tiny_models import tiny_model

VOCAB = 96
PROMPTS = random_prompts(8, vocab_size=VOCAB, seed=5)
STEEP = CostTable([(1, 1.0), (4, 1.3), (8, 2.4)])
DRAFT = CostTable([(1, 0.2)])


@pytest.fixture(scope="module")
def runner():
    return build_runner(tiny_model("qwen2", vocab_size=VOCAB), path="torch")


@pytest.fixture(scope="module")
def guess(runner):
    """Right but at every fifth position of some answers and every second of the others."""
    params = SamplingParams(temperature=0, max_tokens=40)
    answers = {tuple(p): run(make_engine(runner), [p], params)[0].output_token_ids for p in PROMPTS}

    def draft(row, limit):
        prompt = tuple(row.tokens[: row.num_prompt])
        every = 5 if PROMPTS.index(list(prompt)) % 2 else 2
        at = len(row.tokens) - row.num_prompt
        return [(token + (place % every == 0)) % VOCAB for place, token in enumerate(answers[prompt][at:], at)][:limit]

    return draft


class StoppingDrafter(ScriptedDrafter):
    """One that pays for each token: it stops after the token with which survival, as the row judges it, falls below the
    floor."""

    def propose(self, rows, limits, *, floors=None):
        drafts = super().propose(rows, limits)
        return [draft.prefix(self.length(row, draft, floor)) for row, draft, floor in zip(rows, drafts, floors)]

    def length(self, row, draft, floor):
        alive, before = 1.0, 1.0
        for j, claim in enumerate(draft.survival):
            alive *= row.judge(j, claim / before)
            before = claim
            if alive < floor:
                return j + 1
        return len(draft.survival)


def params():
    return SamplingParams(temperature=0, max_tokens=40, speculation={"task": "t"})


def recorded(runner, guess, path, *, draft_cost):
    made = make_speculator(ScriptedDrafter(guess, survival=0.75), policy="shadow", cost=STEEP, draft_cost=draft_cost)
    engine = make_engine(runner, speculator=made)
    log = ProfileLog(path, header={"costs": recorded_costs(made)})
    engine.row_sinks.append(log)
    for prompt in PROMPTS:
        run(engine, [prompt], params())
    log.close()
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    return costs_from_dict(head["costs"]), [answer_from_dict(line) for line in lines]


@pytest.mark.parametrize("policy", ("fixed", "confidence", "heuristic", "adaptive"))
@pytest.mark.parametrize("draft_cost", (None, DRAFT), ids=("free", "by token"))
def test_a_replay_does_what_the_engine_does(runner, guess, tmp_path, policy, draft_cost):
    costs, answers = recorded(runner, guess, tmp_path / "profile.jsonl", draft_cost=draft_cost)
    drafter = (StoppingDrafter if draft_cost else ScriptedDrafter)(guess, survival=0.75)
    made = make_speculator(drafter, policy=policy, cost=STEEP, draft_cost=draft_cost)
    engine = make_engine(runner, speculator=made)
    records = [run(engine, [prompt], params())[0].record for prompt in PROMPTS]
    under = policy_replay(policy, costs, max_tokens=6)
    outcomes = [under.run(answer) for answer in answers]
    for outcome, record in zip(outcomes, records):
        assert outcome.tokens == record.num_emitted - 1, "the first token is the prompt's"
        assert (outcome.steps, outcome.accepted) == (record.num_steps - 1, record.num_accepted)
        assert (outcome.drafted, outcome.verified) == (record.num_drafted, record.num_verified)


def answer(holds, *, num_tokens=40, source="x", claims=(0.9, 0.8, 0.7), **fields):
    drafts = {at: Chance(source=source, claims=claims, holds=holds) for at in range(1, num_tokens - 1)}
    return Answer(id="a", num_tokens=num_tokens, drafts=drafts, **fields)


def test_seconds_are_those_of_the_tables():
    costs = Costs(target=CostTable([(1, 1.0), (4, 1.5)]), draft=DRAFT, block_sources={"x": "alone"})
    outcome = policy_replay("fixed", costs, max_tokens=3).run(answer(3, num_tokens=13))
    assert outcome.steps == 3 and outcome.accepted == 9
    assert outcome.seconds == pytest.approx(3 * (1.5 + 0.2))
    assert outcome.speedup == pytest.approx(12 / outcome.seconds)


def test_adaptive_beats_each_fixed_length_on_mixed_traffic_and_never_loses_to_plain():
    costs = Costs(target=STEEP, draft=CostTable([(1, 0.3)]), block_sources={"x": "alone"})
    traffic = [answer(3 if i % 2 else 0, task="good" if i % 2 else "bad") for i in range(60)]
    adaptive = replay(traffic, policy_replay("adaptive", costs, max_tokens=3))
    fixed = [replay(traffic, policy_replay("fixed", costs, max_tokens=k)) for k in (1, 2, 3)]
    assert all(adaptive[""].seconds < outcome[""].seconds for outcome in fixed)
    assert adaptive["bad"].speedup > 0.98 > max(outcome["bad"].speedup for outcome in fixed)
    assert Gains().expected(0)[0] > 0, "a block is tried before anything is known"


def test_positions_without_a_draft_of_their_own_have_the_rest_of_the_one_before():
    drafts = {1: Chance(source="x", claims=(0.8, 0.4, 0.1), holds=2)}
    table = Answer(id="a", num_tokens=8, drafts=drafts).by_position()
    assert [chance and chance.holds for chance in table] == [None, 2, 1, 0, None, None, None, None]
    assert table[2].claims == pytest.approx([0.5, 0.125])


def cheapest(answer, costs, position=1):
    """By trying everything: least seconds from a position to the answer's end."""
    if position >= answer.num_tokens:
        return 0.0
    chance, room = answer.by_position()[position], answer.num_tokens - position - 1
    options = [costs.target.seconds(1) + cheapest(answer, costs, position + 1)]
    for k in range(1, min(room, len(chance.claims)) + 1 if chance is not None else 0):
        spent = costs.draft_seconds(chance.source, k) + costs.target.seconds(1 + k)
        options.append(spent + cheapest(answer, costs, position + 1 + min(k, chance.holds)))
    return min(options)


@pytest.mark.parametrize("kind", ("free", "block", "by token"))
def test_the_best_possible_is_the_least_of_all_choices_and_no_policy_beats_it(kind):
    costs = Costs(
        target=STEEP,
        draft=DRAFT,
        block_sources={"x": "alone"} if kind == "block" else {},
        token_sources=("x",) if kind == "by token" else (),
    )
    rng = random.Random(3)
    answers = []
    for num_tokens in range(1, 10):
        drafts = {
            at: Chance(source="x", claims=(0.9, 0.8, 0.7), holds=rng.randrange(4))
            for at in range(1, num_tokens - 1)
            if rng.random() < 0.8
        }
        answers.append(Answer(id="a", num_tokens=num_tokens, drafts=drafts))
        found = best_possible(answers[-1:], costs)
        assert found.seconds == pytest.approx(cheapest(answers[-1], costs))
        assert found.tokens == num_tokens - 1 == found.steps + found.accepted
        assert found.plain_seconds == pytest.approx(num_tokens - 1)
    for policy in ("fixed", "adaptive", "confidence", "heuristic"):
        under = replay(answers, policy_replay(policy, costs, max_tokens=3))[""]
        assert best_possible(answers, costs).seconds <= under.seconds + 1e-9


@pytest.mark.parametrize("value", ({}, {"id": 1}, {"steps": 3}, {"id": "a", "num_tokens": "x", "steps": []}))
def test_lines_that_are_no_answers_are_refused(value):
    with pytest.raises(ValueError, match="not an answer of a profile"):
        answer_from_dict(value)


@pytest.mark.parametrize("value", ({}, {"draft": None, "target": 3}, {"draft": 1, "target": [[1, 1.0]]}))
def test_costs_that_are_none_are_refused(value):
    with pytest.raises(ValueError, match="holds no costs"):
        costs_from_dict(value)


HEAD = {"target": [[1, 0.01], [8, 0.012]], "draft": None, "block_sources": {}, "token_sources": []}
STEP = {"at": 1, "text_kind": "prose", "source": "x", "claims": [0.9, 0.8], "holds": 2, "verified": 0, "accepted": 0}
LINE = {"id": "a", "task": "t", "prompt_class": "t", "num_tokens": 9, "seconds": 1.0, "steps": [STEP]}
BAD_STEPS = (
    {"claims": "ab"},
    {"claims": [math.nan]},
    {"claims": [-1, -2]},
    {"claims": [1.5]},
    {"claims": [None]},
    {"holds": -5},
    {"holds": 3},
    {"holds": math.inf},
    {"at": -1},
    {"at": 9},
    {"at": True},
    {"source": None},
    {"source": ["x"]},
    {"text_kind": 1},
    {"verified": -1},
    {"accepted": "1"},
)
BAD_LINES = (
    {"num_tokens": -5},
    {"num_tokens": 10**12},
    {"num_tokens": math.inf},
    {"seconds": "x"},
    {"seconds": math.inf},
    {"steps": None},
    {"steps": [1]},
    {"id": 5},
    {"task": None},
    {"prompt_class": 1},
)


@pytest.mark.parametrize("value", (*BAD_LINES, *({"steps": [STEP | spoilt]} for spoilt in BAD_STEPS)), ids=str)
def test_answers_out_of_range_are_refused(value):
    assert answer_from_dict(LINE).drafts[1].holds == 2
    with pytest.raises(ValueError, match="not an answer of a profile"):
        answer_from_dict(LINE | value)


@pytest.mark.parametrize(
    "value",
    (
        {"target": [[1, math.nan]]},
        {"target": [[1, math.inf]]},
        {"target": [[1, 0]]},
        {"target": [["1", 0.1]]},
        {"target": [[1.5, 0.1]]},
        {"target": []},
        {"block_sources": {"x": "weird"}},
        {"block_sources": [["x", "alone"]]},
        {"token_sources": "suffix"},
        {"token_sources": [None]},
    ),
    ids=str,
)
def test_costs_out_of_range_are_refused(value):
    assert costs_from_dict(HEAD).target.points == [(1, 0.01), (8, 0.012)]
    with pytest.raises(ValueError, match="holds no costs"):
        costs_from_dict(HEAD | value)


def test_what_is_learned_from_a_record_has_named_tasks_only():
    costs = Costs(target=STEEP)
    answers = [answer(3, prompt_class="#0"), answer(0, prompt_class="t", task="t")]
    history = learned(Profile(info={}, costs=costs, answers=answers))
    assert set(history.acceptance.sighted["x"].classes) == {"", "t"}
