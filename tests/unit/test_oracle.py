"""The near-tie oracle: what it excuses, what it does not, and how it asks the target."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from dspark.quality.oracle import LogitMargin, classify, first_difference, tie_bound
from dspark.types import TokenLogprob


class ScriptedLogits:
    """An LLM that answers logprob questions from given logits, and remembers what it was asked."""

    def __init__(self, logits: dict[int, float], error: str | None = None) -> None:
        self.logits = logits
        self.error = error
        self.prompts: list[list[int]] = []
        self.params: list = []

    def generate(self, prompts, params):
        self.prompts += prompts
        self.params.append(params)
        norm = math.log(sum(math.exp(z) for z in self.logits.values()))
        ranked = sorted(self.logits, key=lambda token: -self.logits[token])[: params.logprobs]
        entries = [TokenLogprob(token_id=t, logprob=self.logits[t] - norm, rank=r + 1) for r, t in enumerate(ranked)]
        return [SimpleNamespace(error=self.error, outputs=[SimpleNamespace(logprobs=[entries])])]


def judge(plain, other, *, logits, bound=0.5, prompt=(9, 9)):
    return classify(prompt, plain, other, margin=LogitMargin(ScriptedLogits(logits)), bound=bound)


def test_equal_answers_need_no_look_at_the_target():
    llm = ScriptedLogits({})
    finding = classify([1], [2, 3], [2, 3], margin=LogitMargin(llm), bound=0.5)
    assert finding.verdict == "identical" and finding.position is None and llm.prompts == []


@pytest.mark.parametrize(("gap", "verdict"), [(0.0, "tie"), (0.49, "tie"), (0.51, "fault"), (7.0, "fault")])
def test_a_difference_is_a_tie_only_under_the_bound(gap, verdict):
    finding = judge([1, 2, 5], [1, 3, 6], logits={2: 10.0, 3: 10.0 - gap, 4: 0.0})
    assert finding.verdict == verdict
    assert (finding.position, finding.plain, finding.other) == (1, 2, 3)
    assert finding.margin == pytest.approx(gap)


def test_two_tokens_close_to_each_other_but_far_from_the_best_are_a_fault():
    finding = judge([2], [3], logits={1: 20.0, 2: 10.0, 3: 10.0})
    assert finding.verdict == "fault" and finding.margin == pytest.approx(10.0)


def test_only_the_first_difference_is_judged_on_its_common_prefix():
    llm = ScriptedLogits({2: 1.0, 3: 1.0})
    classify([7, 8], [1, 2, 4], [1, 3, 99], margin=LogitMargin(llm), bound=0.5)
    assert llm.prompts == [[7, 8, 1]]
    (params,) = llm.params
    assert params.temperature == 0 and params.max_tokens == 1 and not params.control.enabled and params.logprobs >= 2


def test_the_same_prefix_is_asked_once():
    llm = ScriptedLogits({2: 1.0, 3: 1.0, 4: 0.9})
    margin = LogitMargin(llm)
    assert margin([5], 2, 3) == pytest.approx(0) and margin([5], 2, 4) == pytest.approx(0.1)
    assert len(llm.prompts) == 1


def test_a_token_that_is_not_among_the_likely_ones_is_a_fault():
    logits = dict.fromkeys(range(20), 0.0) | {99: -1.0}
    finding = judge([0], [99], logits=logits)
    assert finding.verdict == "fault" and finding.margin == math.inf and "inf" in finding.text


@pytest.mark.parametrize(("plain", "other"), [([1, 2], [1]), ([1], [1, 2]), ([], [1])])
def test_an_answer_that_is_cut_short_is_a_fault(plain, other):
    finding = judge(plain, other, logits={1: 0.0, 2: 0.0})
    assert finding.verdict == "fault" and finding.margin is None and finding.position == min(len(plain), len(other))
    assert "ends" in finding.text


def test_exact_mode_excuses_nothing():
    assert tie_bound("bfloat16", exact=True) == 0.0
    assert judge([1], [2], logits={1: 1.0, 2: 1.0}, bound=0.0).verdict == "fault"


def test_bounds_follow_the_precision():
    assert tie_bound("float32") < tie_bound("torch.bfloat16") < tie_bound("bfloat16", quantization="int8")
    with pytest.raises(ValueError, match="float8"):
        tie_bound("float8")


def test_a_refused_prefix_is_told():
    margin = LogitMargin(ScriptedLogits({1: 0.0}, error="too long"))
    with pytest.raises(ValueError, match="too long"):
        margin([1, 2], 1, 2)


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
