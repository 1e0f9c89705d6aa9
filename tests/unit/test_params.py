"""SamplingParams: what passes the door, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.params import MAX_LOGPROBS, MAX_STOP_STRINGS, SamplingParams

REFUSED: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", True),
    ("n", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "10"),
    ("min_tokens", -1),
    ("min_tokens", 129),  # above the default max_tokens
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", None),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.nan),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", {1: math.nan}),
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("bad_words", [1]),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", ["a"] * (MAX_STOP_STRINGS + 1)),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("seed", 1.5),
    ("seed", True),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("prompt_logprobs", MAX_LOGPROBS + 1),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: repr(value)[:30])
def test_refused_by_name_in_one_line(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", None), ("top_k", -1), ("top_k", 0), ("top_p", 1), ("min_p", 1.0), ("temperature", 0), ("seed", -3)]
    + [("presence_penalty", -2), ("frequency_penalty", 2), ("logprobs", 0), ("logprobs", MAX_LOGPROBS)],
)
def test_edges_that_are_allowed(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_lists_become_tuples_that_no_caller_can_change() -> None:
    words, bias = ["a"], {3: 1.0}
    params = SamplingParams(stop="end", bad_words=words, stop_token_ids=[1], logit_bias=bias)
    words.append("b")
    bias[4] = 2.0
    assert (params.stop, params.bad_words, params.stop_token_ids, params.logit_bias) == (
        ("end",),
        ("a",),
        (1,),
        {3: 1.0},
    )


def test_what_depends_on_history() -> None:
    assert SamplingParams().plain and not SamplingParams().needs_history
    for field in (
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"bad_words": ["x"]},
        {"min_tokens": 1},
    ):
        assert SamplingParams(**field).needs_history and not SamplingParams(**field).plain
    biased = SamplingParams(logit_bias={1: 1.0})
    assert not biased.plain and not biased.needs_history
    assert SamplingParams(temperature=0).greedy and not SamplingParams(temperature=1e-3).greedy


def test_from_dict_names_unknown_keys() -> None:
    assert SamplingParams.from_dict({"top_k": 3}) == SamplingParams(top_k=3)
    with pytest.raises(ValueError, match="tempo"):
        SamplingParams.from_dict({"tempo": 1})


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
)


@given(
    field=st.sampled_from(sorted({name for name, _ in REFUSED} - {"logit_bias", "bad_words", "stop"})), value=scalars
)
def test_no_scalar_raises_anything_but_value_error(field: str, value: Any) -> None:
    if field == "stop_token_ids" and not isinstance(value, list):
        return
    try:
        SamplingParams(**{field: value})
    except ValueError as error:
        assert field in str(error)


@pytest.mark.parametrize(
    "fields",
    (
        {"temperature": 1e39},
        {"temperature": 10**400},
        {"logit_bias": {5: 1e39}},
        {"repetition_penalty": 1e-40},
        {"top_k": 10**20},
        {"n": 10**6},
    ),
)
def test_numbers_that_no_float32_holds_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        SamplingParams(**fields)


@pytest.mark.parametrize("value", ({1: 2, "a": 3}, {"task": "#0"}))
def test_controls_of_mixed_keys_and_tasks_named_as_found_classes_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="speculation"):
        SamplingParams(speculation=value)
