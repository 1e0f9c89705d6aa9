"""Each request's own policy, length and class, in one crowd; the sinks that tell what was decided."""

from __future__ import annotations

import json

import pytest

from dspark.draft.lookup import SuffixDrafter
from dspark.engine.recording import costs
from dspark.model.runner import build_runner
from dspark.observe.profile import ProfileLog
from dspark.params import RequestSpeculation, SamplingParams
from dspark.plan.cost import CostTable
from dspark.plan.replay import answer_from_dict, costs_from_dict
from tests.fakes import (
    ScriptedDrafter,
    add,
    junk,
    make_engine,
    make_speculator,
    mostly_right,
    perfect,
    random_prompts,
    run,
)
from tests.tiny_models import tiny_model

VOCAB = 96
PROMPTS = random_prompts(6, vocab_size=VOCAB, seed=3)
FLAT = CostTable([(1, 1.0), (64, 1.2)])


@pytest.fixture(scope="module")
def runner():
    return build_runner(tiny_model("qwen2", vocab_size=VOCAB), path="torch")


@pytest.fixture(scope="module")
def answers(runner):
    params = SamplingParams(temperature=0, max_tokens=24)
    return {tuple(p): run(make_engine(runner), [p], params)[0].output_token_ids for p in PROMPTS}


def params(speculation=True, **fields):
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "speculation": speculation, **fields})


CROWD = [
    True,
    {"policy": "fixed", "max_tokens": 2},
    {"policy": "confidence"},
    {"policy": "heuristic", "task": "chat"},
    {"policy": "shadow"},
    False,
]


@pytest.mark.parametrize("guess", ("right", "junk", "mixed"))
def test_requests_under_different_policies_share_a_batch(runner, answers, guess):
    made = {"right": perfect(answers), "junk": junk(vocab_size=VOCAB), "mixed": mostly_right(answers, vocab_size=VOCAB)}
    engine = make_engine(runner, speculator=make_speculator(ScriptedDrafter(made[guess], survival=0.8), cost=FLAT))
    seqs = run(engine, PROMPTS, [params(control) for control in CROWD])
    assert [seq.output_token_ids for seq in seqs] == [answers[tuple(p)] for p in PROMPTS]
    records = [seq.record for seq in seqs]
    assert len(records[1].accepted_at) <= 2
    assert records[4].num_drafted > 0 == records[4].num_verified
    assert records[5].num_drafted == 0
    if guess == "right":
        assert all(record.num_accepted > 0 for record in records[:4])
    assert seqs[3].prompt_class == "chat" and seqs[0].prompt_class.startswith("#") and seqs[5].prompt_class == ""
    assert not engine.speculator.history.acceptance.requests and not engine.speculator.history.gains["alone"].class_of


def test_drafts_that_never_hold_are_no_longer_verified_and_are_tried_again(runner):
    dear = CostTable([(1, 1.0), (2, 1.5), (64, 40.0)])
    drafter = ScriptedDrafter(junk(vocab_size=VOCAB), survival=0.9)
    engine = make_engine(runner, speculator=make_speculator(drafter, cost=dear), num_pages=512)
    (seq,) = run(engine, [PROMPTS[0]], params(max_tokens=400))
    verified = seq.record.num_verified
    assert 5 < verified < 60, "a few at first, then one in many steps"


def test_a_task_teaches_the_next_request_of_it(runner, answers):
    """The same drafter is right about "easy" prompts and wrong about "hard" ones: a new request starts accordingly."""
    easy = {key: text for i, (key, text) in enumerate(answers.items()) if i < 3}
    right, wrong = perfect(easy), junk(vocab_size=VOCAB)
    drafter = ScriptedDrafter(
        lambda row, n: right(row, n) if tuple(row.tokens[: row.num_prompt]) in easy else wrong(row, n)
    )
    engine = make_engine(runner, speculator=make_speculator(drafter, cost=FLAT, draft_cost=CostTable([(1, 0.4)])))
    shares = {"easy": [0, 0], "hard": [0, 0]}

    def count(step):
        if step.position:
            shares[step.seq.prompt_class][0] += bool(step.tokens)
            shares[step.seq.prompt_class][1] += 1

    for turn in range(8):
        if turn == 4:
            engine.row_sinks.append(count)
        for i, prompt in enumerate(PROMPTS):
            run(engine, [prompt], params({"task": "easy" if i < 3 else "hard"}))
    foreseen = {}
    for task in shares:
        engine.speculator.history.begin(-1, task=task)
        foreseen[task] = engine.speculator.history.acceptance.foresee(-1, drafter.name, 1)[0]
    assert foreseen["easy"] > 0.9 > 0.41 > foreseen["hard"], "0.4 is what a draft must be accepted to pay"
    assert shares["easy"][0] > 0.75 * shares["easy"][1], "all but the ends of answers"
    assert shares["hard"][0] < 0.05 * shares["hard"][1]


def test_row_steps_add_up_and_name_the_policy(runner, answers):
    engine = make_engine(runner, speculator=make_speculator(SuffixDrafter(), cost=FLAT))
    steps = []
    engine.row_sinks.append(steps.append)
    seqs = run(engine, PROMPTS, [params(control) for control in CROWD])
    for seq, control in zip(seqs, CROWD):
        own = [step for step in steps if step.seq is seq]
        assert sum(step.emitted for step in own) == seq.num_output
        assert sum(len(step.tokens) for step in own) == seq.record.num_drafted
        assert sum(step.accepted for step in own) == seq.record.num_accepted
        assert [step.position for step in own] == [sum(s.emitted for s in own[:i]) for i in range(len(own))]
        assert {step.policy for step in own} == {"adaptive" if isinstance(control, bool) else control["policy"]}
        assert all(len(step.survival) == len(step.claims) == len(step.tokens) <= step.limit for step in own)


def test_a_profile_tells_what_would_have_held(runner, answers, tmp_path):
    """Under "shadow" nothing is verified, and the record says at each position what a perfect drafter would bring."""
    made = make_speculator(
        ScriptedDrafter(perfect(answers), survival=0.8), cost=FLAT, policy="shadow", draft_cost=CostTable([(1, 0.1)])
    )
    engine = make_engine(runner, speculator=made, max_tokens=512)
    path = tmp_path / "profile.jsonl"
    log = ProfileLog(path, header={"costs": costs(made)})
    engine.row_sinks.append(log)
    run(engine, PROMPTS, params({"task": "t"}))
    left = add(engine, PROMPTS[0], params(), seq_id=99)
    engine.step()
    engine.abort(left.id)
    assert not log.open and len(path.read_text().splitlines()) == len(PROMPTS) + 2, "written when they end, and at once"
    log.close()
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert costs_from_dict(head["costs"]).target.points == FLAT.points
    assert costs_from_dict(head["costs"]).token_sources == ("scripted",)
    assert len(lines) == len(PROMPTS) + 1 and lines[-1]["finish_reason"] == "abort", "what was begun is not lost"
    for line in lines[:-1]:
        answer = answer_from_dict(line)
        assert answer.task == "t" and answer.num_tokens == 24
        assert sorted(answer.drafts) == list(range(1, 23)), "a draft at each position but the first and the last"
        assert all(chance.holds == min(6, 23 - at) for at, chance in answer.drafts.items())
        assert all(step["verified"] == 0 for step in line["steps"])


@pytest.mark.parametrize(
    "value",
    (3, "on", {"tempo": 1}, {"enabled": 1}, {"max_tokens": -1}, {"max_tokens": 1.5}, {"task": ""}, {"policy": 7}),
    ids=str,
)
def test_controls_are_refused_by_name(value):
    with pytest.raises(ValueError, match="speculation") as caught:
        SamplingParams(speculation=value)
    assert "\n" not in str(caught.value)


def test_controls_are_read_in_every_spelling():
    assert SamplingParams().control == RequestSpeculation()
    assert not SamplingParams(speculation=False).control.enabled
    control = RequestSpeculation(max_tokens=3, task="a", policy="fixed")
    assert SamplingParams(speculation=control).control is control
    assert SamplingParams(speculation={"max_tokens": 3, "task": "a", "policy": "fixed"}).control == control


def test_costs_follow_the_steps_but_not_those_with_prompt_chunks(runner, answers):
    made = make_speculator(
        ScriptedDrafter(perfect(answers), survival=0.8), cost=FLAT, draft_cost=CostTable([(1, 0.1)]), paced=True
    )
    engine = make_engine(runner, speculator=made)
    add(engine, PROMPTS[0], params(), seq_id=0)
    engine.step()
    assert made.cost.ratio == made.draft_cost.ratio == 1.0
    engine.step()
    assert made.cost.ratio < 1.0 == made.draft_cost.ratio, "a row's first draft may have to read the prompt"
    engine.step()
    ratios = made.cost.ratio, made.draft_cost.ratio
    assert ratios[0] < 1 and ratios[1] < 1, "a tiny model takes less than a second"
    add(engine, PROMPTS[1], params(), seq_id=1)
    engine.step()
    assert (made.cost.ratio, made.draft_cost.ratio) == ratios
