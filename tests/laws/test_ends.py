"""Ends inside a block: the earliest event wins, the reason is right, and nothing after it is emitted.

Every pair of ends at every offset is run with a perfect drafter and without one; both must tell the same story.
"""

from __future__ import annotations

import itertools

import pytest

from dspark.engine.ends import StopWatcher, append_token
from dspark.model.runner import build_runner
from dspark.params import SamplingParams
from dspark.types import Request, Sequence
from tests.fakes import LetterStream, ScriptedDrafter, make_engine, perfect, run
from tests.tiny_models import tiny_model

PROMPT = [5, 17, 40]
VOCAB = 96
KINDS = list(itertools.combinations_with_replacement(("eos", "stop_token", "stop_string", "length"), 2))


@pytest.fixture(scope="module")
def tiny():
    runner = build_runner(tiny_model("llama", vocab_size=VOCAB), path="torch")
    (seq,) = run(make_engine(runner), [PROMPT], SamplingParams(temperature=0, max_tokens=40))
    return runner, seq.output_token_ids


def answer(runner, truth, params, *, eos=(), drafts: bool):
    drafter = ScriptedDrafter(perfect({tuple(PROMPT): truth})) if drafts else None
    (seq,) = run(make_engine(runner, drafter=drafter, eos=eos), [PROMPT], params)
    return seq


def ends_at(truth, offset: int) -> dict[str, dict]:
    """One setting for each kind of end that happens exactly at the token with this offset."""
    token = truth[offset]
    letters = "".join(chr(97 + t % 26) for t in truth[: offset + 1])
    return {
        "eos": {"eos": (token,)},
        "stop_token": {"stop_token_ids": [token]},
        "stop_string": {"stop": [letters[-2:] if offset else letters[-1:]]},
        "length": {"max_tokens": offset + 1},
    }


def expected_offset(truth, options) -> int:
    """Where plain reading of the answer ends, token by token, written without the engine."""
    text = ""
    for i, token in enumerate(truth):
        text += chr(97 + token % 26)
        if token in options.get("eos", ()) or token in options.get("stop_token_ids", ()):
            return i
        if any(word in text for word in options.get("stop", ())) or i + 1 == options.get("max_tokens", 40):
            return i
    return len(truth) - 1


@pytest.mark.parametrize("first,second", KINDS)
def test_every_pair_at_every_offset(tiny, first, second):
    runner, truth = tiny
    for a, b in itertools.product((0, 1, 3, 4, 7, 8), repeat=2):
        options = ends_at(truth, a)[first] | ends_at(truth, b)[second]
        fields = {"max_tokens": 40, "temperature": 0} | {k: v for k, v in options.items() if k != "eos"}
        plain, drafted = (
            answer(runner, truth, SamplingParams(**fields), eos=options.get("eos", ()), drafts=drafts)
            for drafts in (False, True)
        )
        assert drafted.output_token_ids == plain.output_token_ids == truth[: expected_offset(truth, options) + 1]
        assert (drafted.finish_reason, drafted.stop_reason) == (plain.finish_reason, plain.stop_reason)
        assert drafted.text == plain.text
        assert drafted.record.num_emitted == len(drafted.output_token_ids)


def test_a_stop_exactly_at_the_budget_is_a_stop(tiny):
    runner, truth = tiny
    for drafts in (False, True):
        params = SamplingParams(temperature=0, max_tokens=4, stop_token_ids=[truth[3]])
        if truth[3] not in truth[:3]:
            assert answer(runner, truth, params, drafts=drafts).finish_reason == "stop"


@pytest.mark.parametrize("budget", range(1, 13))
def test_budgets(tiny, budget):
    runner, truth = tiny
    params = SamplingParams(temperature=0, max_tokens=budget, logprobs=1)
    seq = answer(runner, truth, params, drafts=True)
    assert seq.output_token_ids == truth[:budget]
    assert len(seq.logprobs) == seq.record.num_emitted == budget
    assert seq.finish_reason == "length"
    assert seq.record.num_drafted <= max(0, budget - 1), "a draft beyond the budget is work for nothing"


def test_min_tokens_hold_back_every_stop(tiny):
    runner, truth = tiny
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=6, stop=["".join(chr(97 + truth[1] % 26))])
    plain, drafted = (answer(runner, truth, params, drafts=drafts) for drafts in (False, True))
    assert drafted.output_token_ids == plain.output_token_ids and len(plain.output_token_ids) >= 6


def test_context_is_never_overrun(tiny):
    runner, _ = tiny
    engine = make_engine(runner, num_pages=5, page_size=4)
    (seq,) = run(engine, [PROMPT], SamplingParams(temperature=0, max_tokens=None))
    assert len(seq.tokens) == 20 and seq.finish_reason == "length"


def sequence(params: SamplingParams) -> Sequence:
    request = Request(id="", prompt_token_ids=[0], params=params)
    return Sequence(id=0, request=request, index=0, tokens=[0], num_prompt=1)


def watch(text: str, stop: list[str], *, include: bool = False) -> tuple[str, str | int | None]:
    seq = sequence(SamplingParams(max_tokens=len(text), stop=stop))
    watcher = StopWatcher(LetterStream(), stop=stop, include_stop=include)
    for letter in text:
        if append_token(seq, ord(letter) - 97, watcher=watcher, eos_token_ids=(), max_context=10_000):
            break
    return seq.text, seq.stop_reason


@pytest.mark.parametrize(
    "text,stop,expected",
    [
        ("abcabd", ["abd"], ("abc", "abd")),
        ("aabaac", ["aac"], ("aab", "aac")),
        ("abcd", ["cd", "bcd"], ("a", "bcd")),
        ("abab", ["x"], ("abab", None)),
        ("abx", ["abxy"], ("abx", None)),
    ],
)
def test_stop_strings(text, stop, expected):
    assert watch(text, stop) == expected
    kept, reason = watch(text, stop, include=True)
    assert kept == expected[0] + (reason or "")


def test_a_stop_string_may_begin_before_min_tokens_and_end_after():
    seq = sequence(SamplingParams(max_tokens=9, stop=["bc"], min_tokens=3))
    watcher = StopWatcher(LetterStream(), stop=["bc"], include_stop=False)
    ended = [append_token(seq, ord(x) - 97, watcher=watcher, eos_token_ids=(), max_context=99) for x in "abc"]
    assert ended == [False, False, True] and (seq.text, seq.stop_reason) == ("a", "bc")


class HoldingStream:
    """Holds everything back until the end, as runs of byte tokens are."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int) -> str:
        self.held += chr(97 + token_id)
        return ""

    def flush(self) -> str:
        return self.held


@pytest.mark.parametrize("eos,reason", (((2,), "stop"), ((), "stop")))
def test_a_stop_string_that_the_stream_held_back_is_found_at_the_end(eos, reason):
    seq = sequence(SamplingParams(max_tokens=3, stop=["b"]))
    watcher = StopWatcher(HoldingStream(), stop=["b"], include_stop=False)
    for token in (0, 1, 2):
        append_token(seq, token, watcher=watcher, eos_token_ids=eos, max_context=99)
    assert (seq.text, seq.finish_reason, seq.stop_reason) == ("a", reason, "b")
