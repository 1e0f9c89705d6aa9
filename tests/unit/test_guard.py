"""GuardedPolicy: a broken policy of the user's own costs its requests their drafts, and nobody anything else."""

from __future__ import annotations

import warnings

import pytest

from dspark import LLM, SamplingParams
from dspark.plan.guard import GuardedPolicy
from dspark.plan.length import Features, FixedLength, Limit
from tests.tiny_folder import tiny_folder

PROMPT = "hello hello hello hello "


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = str(tiny_folder(tmp_path_factory.mktemp("m")))
    drafts = {"method": "model", "model": folder, "policy": "fixed", "num_speculative_tokens": 3}
    return LLM(folder, speculative_config=drafts, path="torch", dtype="float32")


def fixed(**methods):
    policy = FixedLength(4)
    for name, value in methods.items():
        setattr(policy, name, value)
    return policy


def fail(*_, **__):
    raise RuntimeError("of no use")


FAULTS = {
    "limit raises": {"limit": fail},
    "limit is no Limit": {"limit": lambda features: 3},
    "limit is a fraction": {"limit": lambda features: Limit(max_tokens=2.5)},
    "limit is negative": {"limit": lambda features: Limit(max_tokens=-1)},
    "limit is None": {"limit": lambda features: Limit(max_tokens=None)},
    "least is a fraction": {"limit": lambda features: Limit(max_tokens=2, least=0.5)},
    "keep raises": {"keep": fail},
    "keep is nan": {"keep": lambda survival: float("nan")},
    "keep is negative": {"keep": lambda survival: -1},
    "keep and forget raise": {"keep": fail, "forget": fail},
    "update raises": {"update": fail},
    "forget raises": {"forget": fail},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_policy_is_named_once_and_no_answer_changes(llm, fault):
    llm.add_policy(fault, fixed(**FAULTS[fault]))
    greedy = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    plain = llm.generate(PROMPT, SamplingParams(**greedy, speculation=False))[0].outputs[0].token_ids
    crowd = [SamplingParams(**greedy, speculation={"policy": fault}), SamplingParams(**greedy)]
    with pytest.warns(UserWarning, match=f"policy '{fault}' failed") as told:
        answers = llm.generate([PROMPT] * 2, crowd)
    assert len(told) == 1
    assert [answer.outputs[0].token_ids for answer in answers] == [plain, plain]
    assert answers[1].outputs[0].speculation.num_drafted > 0, "neighbours are drafted for"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = llm.generate(PROMPT, crowd[0])[0].outputs[0]
    assert again.token_ids == plain and again.speculation.num_drafted == 0
    assert not llm.engine.rows and not llm.engine.cache.sequences


def test_leaving_a_length_to_a_budget_that_is_not_there_is_such_a_fault():
    policy = GuardedPolicy("mine", fixed(keep=lambda survival: None), has_costs=False)
    with pytest.warns(UserWarning, match="has no budget .*'adaptive'"):
        assert policy.keep([0.5]) == 0
    assert GuardedPolicy("mine", fixed(keep=lambda survival: None), has_costs=True).keep([0.5]) is None


def test_a_sound_policy_is_asked_and_told_everything():
    told = []
    policy = fixed(update=lambda seq_id, **counts: told.append((seq_id, counts)), forget=told.append)
    guarded = GuardedPolicy("mine", policy, has_costs=False)
    assert guarded.limit(Features(seq_id=1, num_rows=1, step=0, room=9)) == Limit(max_tokens=4)
    assert guarded.keep([0.5, 0.2]) == 2
    guarded.update(1, num_verified=2, num_accepted=1)
    guarded.forget(1)
    assert told == [(1, {"num_verified": 2, "num_accepted": 1}), 1]


@pytest.mark.parametrize("policy", (None, FixedLength, 3, object()), ids=("none", "class", "number", "object"))
def test_what_is_no_policy_is_refused(llm, policy):
    with pytest.raises(ValueError, match="is no LengthPolicy"):
        llm.add_policy("no policy", policy)


@pytest.mark.parametrize("name", ("", 5, None, "x" * 200, "fixed"), ids=str)
def test_names_that_no_request_can_ask_for_are_refused(llm, name):
    with pytest.raises(ValueError):
        llm.add_policy(name, FixedLength(2))
