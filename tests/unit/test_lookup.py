"""Tests of the lookup drafters: equality with slow references, bounded memory, honest survival."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.draft.acceptance import AcceptanceTable, Guess
from dspark.draft.answer_store import AnswerStore
from dspark.draft.base import DraftRow, registry
from dspark.draft.lookup import NgramDrafter, SuffixDrafter, index_orders, most_frequent_path
from dspark.draft.occurrences import OccurrenceIndex
from dspark.params import SamplingParams
from dspark.types import Draft

GREEDY = SamplingParams(temperature=0.0)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def row(tokens: Sequence[int], *, seq_id: int = 0, num_prompt: int = 1, params: SamplingParams = GREEDY) -> DraftRow:
    return DraftRow(seq_id=seq_id, tokens=list(tokens), num_prompt=num_prompt, params=params)


def guess(drafter: NgramDrafter | SuffixDrafter, one: DraftRow, limit: int = 50) -> Draft:
    return drafter.propose([one], [limit])[0]


def finish(drafter: SuffixDrafter, answer: Sequence[int], *, seq_id: int, prompt: Sequence[int] = (9,)) -> None:
    drafter.observe([row([*prompt, *answer], seq_id=seq_id, num_prompt=len(prompt))], [None])
    drafter.forget(seq_id)


# --- slow references ------------------------------------------------------------------------------------------------


def read_on(text: Sequence[int], position: int, num_tokens: int, *, periodic: bool) -> list[int]:
    out: list[int] = []
    while len(out) < num_tokens:
        at = position + len(out)
        if at < len(text):
            out.append(text[at])
        elif periodic:
            out.append(out[at - len(text)])
        else:
            break
    return out


def ngram_reference(text: Sequence[int], low: int, high: int, k: int, which: str) -> list[int]:
    for n in range(min(high, len(text) - 1), low - 1, -1):
        ends = [i for i in range(n, len(text)) if text[i - n : i] == text[len(text) - n :]]
        if ends:
            return read_on(text, ends[-1 if which == "last" else 0], k, periodic=which == "last")
    return []


def suffix_reference(
    corpus: Sequence[Sequence[int]], tail: Sequence[int], *, k: int, least: int, factor: float, floor: float, own: bool
) -> list[int]:
    """Scan everything for the longest match, then count one token at a time; the newest occurrence breaks ties."""
    for n in range(len(tail), least - 1, -1):
        places = [(t, i) for t in corpus for i in range(n, len(t)) if list(t[i - n : i]) == list(tail[len(tail) - n :])]
        if not places:
            continue
        reads = [read_on(t, i, min(k, int(factor * n)), periodic=own) for t, i in reversed(places)]
        out: list[int] = []
        prob = 1.0
        while True:
            nexts = [r[len(out)] for r in reads if len(r) > len(out) and r[: len(out)] == out]
            if not nexts:
                return out
            best = max(nexts, key=lambda token: (nexts.count(token), -nexts.index(token)))
            prob *= nexts.count(best) / len(nexts)
            if prob < floor:
                return out
            out.append(best)
    return []


@settings(max_examples=150, deadline=None)
@given(texts, st.integers(1, 3), st.integers(0, 3), st.integers(1, 9), st.sampled_from(["first", "last"]))
def test_ngram_equals_a_scan(text: list[int], low: int, extra: int, k: int, which: str) -> None:
    drafter = NgramDrafter(
        num_speculative_tokens=k, prompt_lookup_min=low, prompt_lookup_max=low + extra, occurrence=which
    )
    assert guess(drafter, row(text)).tokens == ngram_reference(text, low, low + extra, k, which)


def test_ngram_takes_the_occurrence_it_says() -> None:
    text = [1, 2, 7, 1, 2, 8, 1, 2]
    assert guess(NgramDrafter(num_speculative_tokens=2, occurrence="first"), row(text)).tokens == [7, 1]
    assert guess(NgramDrafter(num_speculative_tokens=2, occurrence="last"), row(text)).tokens == [8, 1]
    assert guess(NgramDrafter(num_speculative_tokens=6), row([5, 1, 2, 1, 2])).tokens == [1, 2, 1, 2, 1, 2]
    assert guess(NgramDrafter(num_speculative_tokens=6, occurrence="first"), row([5, 1, 2, 1, 2])).tokens == [1, 2]


@settings(max_examples=150, deadline=None)
@given(texts, st.integers(1, 3), st.integers(0, 9), st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.0, 0.4, 1.0]))
def test_suffix_equals_a_scan_of_its_own_text(
    text: list[int], least: int, more: int, factor: float, floor: float
) -> None:
    drafter = SuffixDrafter(
        num_speculative_tokens=12,
        max_depth=least + more,
        min_match=least,
        max_spec_factor=factor,
        min_token_prob=floor,
        max_cached_tokens=0,
        max_candidates=1000,
    )
    tail = text[-(least + more) :]
    expected = suffix_reference([text], tail, k=12, least=least, factor=factor, floor=floor, own=True)
    assert guess(drafter, row(text)).tokens == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(texts, max_size=5), texts)
def test_suffix_proposes_the_better_of_own_text_and_answers(answers: list[list[int]], text: list[int]) -> None:
    drafter = SuffixDrafter(num_speculative_tokens=12, max_depth=6, max_candidates=1000)
    for i, answer in enumerate(answers):
        finish(drafter, answer, seq_id=i + 1)
    draft = guess(drafter, row(text))
    rules = {"k": 12, "least": 1, "factor": 4.0, "floor": 0.1}
    own = suffix_reference([text], text[-6:], own=True, **rules)  # type: ignore[arg-type]
    others = suffix_reference(answers, text[-6:], own=False, **rules)  # type: ignore[arg-type]
    assert draft.tokens in (own, others)
    assert draft.tokens or not (own or others)


def test_suffix_prefers_the_source_that_promises_more() -> None:
    drafter = SuffixDrafter()
    finish(drafter, [1, 2, 3, 4, 5, 6], seq_id=1)
    assert guess(drafter, row([3, 9, 1, 2, 3], seq_id=2)).tokens == [4, 5, 6], "three matched tokens beat one"
    assert guess(drafter, row([1, 2, 3, 7, 7, 1, 2, 3], seq_id=3)).tokens[:2] == [7, 7], "more tokens at equal match"


def test_an_old_long_match_is_found_behind_many_recent_short_ones() -> None:
    text = [1, 2, 3, 7, *[3, 9] * 10, 1, 2, 3]
    assert guess(SuffixDrafter(max_candidates=2), row(text)).tokens[0] == 7


def test_most_frequent_path_counts_and_stops() -> None:
    reads = [(1, 2, 3), (1, 2, 4), (1, 5), (6,)]
    assert most_frequent_path(reads, min_prob=0.0) == ([1, 2, 3], [(3, 4), (2, 3), (1, 2)])
    assert most_frequent_path(reads, min_prob=0.5) == ([1, 2], [(3, 4), (2, 3)])
    assert most_frequent_path(reads, min_prob=0.76) == ([], [])
    assert most_frequent_path([(1, 2), (1, 2)], min_prob=1.0) == ([1, 2], [(2, 2), (2, 2)])


# --- state ----------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(texts, st.data())
def test_any_history_of_calls_equals_from_scratch(text: list[int], data: st.DataObject) -> None:
    for make in (NgramDrafter, lambda: SuffixDrafter(max_depth=7)):
        drafter, length = make(), 1
        while length < len(text):
            call = data.draw(st.sampled_from(["propose", "observe", "skip", "idle", "forget"]))
            if call == "observe":
                drafter.observe([row(text[:length])], [None])
            elif call == "idle":
                assert drafter.propose([row(text[:length])], [0])[0].tokens == []
            elif call == "propose":
                guess(drafter, row(text[:length]))
            elif call == "forget" and isinstance(drafter, NgramDrafter):
                drafter.forget(0)
            length += data.draw(st.integers(1, 5))
        assert guess(drafter, row(text)).tokens == guess(make(), row(text)).tokens


@pytest.mark.parametrize("make", [NgramDrafter, lambda: SuffixDrafter(max_cached_tokens=0)])
def test_sequences_do_not_feel_each_other(make) -> None:
    rng = random.Random(3)
    long = {i: rng.choices(range(4), k=80) for i in range(5)}
    crowd = make()
    for length in range(2, 80):
        rows = [row(text[: max(1, length - i)], seq_id=i) for i, text in long.items()]
        drafts = crowd.propose(rows, [6] * 5)
        assert [d.tokens for d in drafts] == [guess(make(), r, 6).tokens for r in rows]
        crowd.observe(rows, [None] * 5)


@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
def test_limits_and_shape_of_a_draft(make) -> None:
    text = [1, 2, 3] * 20
    drafter = make()
    for limit in range(8):
        draft = guess(drafter, row(text), limit)
        assert len(draft.tokens) == limit
        assert draft.tokens == [1, 2, 3, 1, 2, 3, 1][:limit]
        assert draft.q is None
        assert draft.source == drafter.name
        assert len(draft.survival) == limit
    assert len(guess(drafter, row(text), 10_000).tokens) == drafter.num_speculative_tokens
    assert guess(drafter, row([7], seq_id=1)).tokens == []


@settings(max_examples=60, deadline=None)
@given(texts, texts, st.integers(1, 12))
def test_survival_is_a_falling_probability(answer: list[int], text: list[int], step: int) -> None:
    ngram, suffix = NgramDrafter(), SuffixDrafter()
    finish(suffix, answer, seq_id=1)
    for length in range(1, len(text) + 1, step):
        for drafter in (ngram, suffix):
            survival = guess(drafter, row(text[:length])).survival
            assert all(0.0 < value < 1.0 for value in survival)
            assert survival == sorted(survival, reverse=True)


@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
def test_forget_frees_the_row_and_the_id_can_be_used_again(make) -> None:
    drafter = make()
    assert guess(drafter, row([1, 2, 3, 1, 2], num_prompt=5)).tokens[:1] == [3]
    drafter.forget(0)
    drafter.forget(77)
    assert not drafter._rows
    assert guess(drafter, row([8, 9, 5, 8, 9], num_prompt=5)).tokens[:1] == [5]
    assert guess(drafter, row([4, 1, 2], seq_id=3, num_prompt=3)).tokens == [], "a prompt is not material for others"


def test_a_sequence_may_not_shrink() -> None:
    drafter = NgramDrafter()
    guess(drafter, row([1, 2, 3]))
    with pytest.raises(AssertionError, match="forget"):
        guess(drafter, row([1, 2]))


# --- finished answers -----------------------------------------------------------------------------------------------


def test_finished_answers_serve_others_and_prompts_do_not() -> None:
    drafter = SuffixDrafter()
    finish(drafter, [1, 2, 3, 4, 5], seq_id=1, prompt=[20, 21, 22, 23])
    assert guess(drafter, row([30, 1, 2], seq_id=2)).tokens == [3, 4, 5]
    assert guess(drafter, row([30, 20, 21], seq_id=3)).tokens == []
    assert guess(drafter, row([30, 23], seq_id=4)).tokens == [], "nor does the seam between prompt and answer"


def test_a_preempted_sequence_does_not_count_twice() -> None:
    drafter = SuffixDrafter()
    finish(drafter, [1, 2, 3], seq_id=1)
    assert drafter.answers.num_tokens == 3
    drafter.observe([row([9, 1, 2, 3, 4], seq_id=1)], [None])
    assert drafter.answers.num_tokens == 0
    drafter.forget(1)
    assert (len(drafter.answers), drafter.answers.num_tokens) == (1, 4)
    drafter.observe([row([9, 5, 6], seq_id=1)], [None])
    assert drafter.answers.num_tokens == 4, "another sequence under the same id takes nothing back"


def test_memory_for_answers_is_bounded() -> None:
    rng = random.Random(5)
    drafter = SuffixDrafter(max_cached_tokens=100, max_depth=8)
    for seq_id in range(200):
        finish(drafter, rng.choices(range(6), k=rng.randrange(0, 140)), seq_id=seq_id)
        index = drafter.answers.index
        assert index.num_tokens == drafter.answers.num_tokens <= 100
        assert index.num_entries <= len(index.orders) * 100
        assert len(drafter.answers._text_of) == len(drafter.answers) <= 100
    nothing = SuffixDrafter(max_cached_tokens=0)
    finish(nothing, [1, 2, 3], seq_id=1)
    assert nothing.answers.index.num_entries == 0


def test_the_least_recently_used_answer_leaves_whole() -> None:
    drafter = SuffixDrafter(max_cached_tokens=12)
    for seq_id, first in enumerate((100, 200, 300)):
        finish(drafter, range(first, first + 4), seq_id=seq_id)
    assert guess(drafter, row([1, 100, 101], seq_id=10)).tokens == [102, 103]
    finish(drafter, range(400, 404), seq_id=3)
    assert guess(drafter, row([1, 200, 201], seq_id=11)).tokens == []
    assert guess(drafter, row([1, 100, 101], seq_id=12)).tokens == [102, 103]
    assert len(drafter.answers) == 3


@settings(max_examples=80, deadline=None)
@given(st.lists(texts, min_size=1, max_size=6), st.sets(st.integers(0, 5)))
def test_removing_a_text_leaves_the_index_of_the_others(all_texts: list[list[int]], gone: set[int]) -> None:
    index, expected = OccurrenceIndex((1, 2, 4)), OccurrenceIndex((1, 2, 4))
    for i, text in enumerate(all_texts):
        index.extend(i, text)
        if i not in gone:
            expected.extend(i, text)
    for i in gone & set(range(len(all_texts))):
        index.remove(i)
    assert index._positions == expected._positions
    assert index.num_tokens == expected.num_tokens


def test_an_answer_longer_than_the_bound_keeps_its_end() -> None:
    store = AnswerStore(max_tokens=3, orders=(1, 2))
    store.add(1, [1, 2, 3, 4, 5])
    assert store.num_tokens == 3
    assert list(store.index.text(0)) == [3, 4, 5]


def test_equal_hashes_are_not_equal_tokens() -> None:
    assert hash((-1,)) == hash((-2,)), "the collision this test is made of"
    assert guess(NgramDrafter(prompt_lookup_min=1), row([-1, 5, -2])).tokens == []
    assert guess(SuffixDrafter(), row([-1, 5, -2])).tokens == []


# --- learning -------------------------------------------------------------------------------------------------------


def run_script(drafter: NgramDrafter | SuffixDrafter, right: Sequence[int], params: SamplingParams = GREEDY) -> Draft:
    """Play one sequence per entry: the drafter sees a b ... a and is right for that many tokens, then wrong."""
    base = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    for num_right in right:
        drafter.propose([row(base, num_prompt=len(base), params=params)], [6])
        truth = [*base, *[3, 4, 5, 6, 7, 8][:num_right], 99]
        drafter.observe([row(truth, num_prompt=len(base), params=params)], [None])
        drafter.forget(0)
    return guess(drafter, row(base, seq_id=5, num_prompt=len(base), params=params), 6)


@pytest.mark.parametrize("make", [NgramDrafter, lambda: SuffixDrafter(max_cached_tokens=0)])
def test_survival_learns_what_really_happens(make) -> None:
    before = run_script(make(), []).survival
    good = run_script(make(), [6] * 200).survival
    bad = run_script(make(), [0] * 200).survival
    two = run_script(make(), [2] * 300).survival
    assert good[-1] > 0.85 > before[-1]
    assert bad[0] < 0.1 < before[0]
    assert two[1] > 0.8
    assert two[2] < 0.15, "the position at which guesses break is learned"
    mixed = run_script(make(), [0, 6, 6, 6] * 100).survival
    assert mixed[0] == pytest.approx(0.75, abs=0.05)


def test_greedy_and_sampled_traffic_are_learned_apart() -> None:
    drafter = NgramDrafter()
    run_script(drafter, [0] * 200)
    assert run_script(drafter, [], SamplingParams(temperature=1.0)).survival == run_script(NgramDrafter(), []).survival


def test_an_estimate_is_calibrated_on_random_truth() -> None:
    rng, table = random.Random(11), AcceptanceTable()
    for _ in range(900):
        run = [rng.random() < 0.7 for _ in range(4)]
        truth = [1 if ok else 0 for ok in run]
        table.settle(Guess(start=0, tokens=[1] * 4, kinds=["k"] * 4), truth)
    assert table.survival(["k"] * 4, [0.1] * 4) == pytest.approx([0.7, 0.49, 0.343, 0.24], abs=0.05)


def test_what_follows_a_wrong_token_teaches_nothing() -> None:
    table = AcceptanceTable()
    assert table.settle(Guess(start=1, tokens=[1, 2, 3], kinds=["a", "b", "c"]), [0, 1, 9, 3]) == 1
    assert table.estimate("c", 2, 0.5) == 0.5
    assert table.estimate("a", 0, 0.5) > 0.5 > table.estimate("b", 1, 0.5)
    assert table.settle(Guess(start=5, tokens=[1], kinds=["d"]), [0, 1]) == 0
    assert table.estimate("d", 0, 0.5) == 0.5, "nothing was committed, nothing is known"


def test_old_traffic_is_forgotten() -> None:
    table = AcceptanceTable(memory=100.0)
    for wrong in (0, 1):
        for _ in range(400):
            table.settle(Guess(start=0, tokens=[0], kinds=["k"]), [wrong])
    assert table.estimate("k", 0, 0.5) < 0.1


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("ngram", {"num_speculative_tokens": 0}),
        ("ngram", {"prompt_lookup_min": 5, "prompt_lookup_max": 4}),
        ("ngram", {"prompt_lookup_min": 0}),
        ("ngram", {"occurrence": "best"}),
        ("suffix", {"num_speculative_tokens": 1.5}),
        ("suffix", {"max_depth": 2, "min_match": 3}),
        ("suffix", {"max_cached_tokens": -1}),
        ("suffix", {"max_candidates": 0}),
        ("suffix", {"max_spec_factor": 0.0}),
        ("suffix", {"min_token_prob": 1.5}),
    ],
)
def test_unusable_settings_name_cause_and_cure(name: str, bad: dict) -> None:
    with pytest.raises(ValueError, match="is not usable: give"):
        registry()[name](**bad)


def test_index_orders_reach_from_min_match_to_max_depth() -> None:
    assert index_orders(1, 24) == (1, 2, 4, 8, 16, 24)
    assert index_orders(3, 3) == (3,)
    assert index_orders(2, 9) == (2, 4, 8, 9)
