"""Plans against brute force: cost tables, budgets, lengths."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.config import POLICIES
from dspark.plan.budget import choose
from dspark.plan.cost import CostTable, PacedTable, profile
from dspark.plan.length import (
    FIRST_HEURISTIC,
    PROBE_EVERY,
    PROBE_SHARE,
    AdaptiveLength,
    Features,
    Limit,
    PolicyInputs,
    build_policies,
)

FLAT = CostTable([(1, 1.0), (64, 1.0)])
LINEAR = CostTable([(1, 1.0), (64, 64.0)])


def test_cost_keeps_cliffs_and_extrapolates():
    table = CostTable([(4, 1.0), (1, 1.2), (8, 5.0)])
    assert [table.seconds(rows) for rows in (1, 4, 6, 8, 16)] == [1.2, 1.0, 3.0, 5.0, 10.0]


@pytest.mark.parametrize("points", ([], [(0, 1.0)], [(1, 0.0)]))
def test_cost_refuses_nonsense(points):
    with pytest.raises(ValueError, match="cost table"):
        CostTable(points)


def test_profile_takes_the_fastest():
    times = itertools.cycle([3.0, 1.0, 2.0])
    assert all(seconds == 1.0 for _, seconds in profile(lambda rows: next(times), max_rows=2, repetitions=3).points)


def test_paced_costs_follow_the_clock_and_bear_hiccups():
    table = PacedTable(CostTable([(1, 1.0), (4, 2.0)]))
    assert table.seconds(4) == 2.0 and table.points == [(1, 1.0), (4, 2.0)]
    for _ in range(200):
        table.observe(1, 1.5)
    assert table.seconds(4) == pytest.approx(3.0, rel=0.01)
    table.observe(1, 1e6)
    assert table.seconds(1) < 1.7
    for _ in range(200):
        table.observe(4, 6.0, passes=3)
    assert table.seconds(1) == pytest.approx(1.0, rel=0.01)


def test_choose_takes_all_when_flat_and_none_when_linear():
    survivals = [[0.5, 0.2], [0.9, 0.8, 0.7]]
    assert choose(survivals, FLAT.seconds, 64) == [2, 3]
    assert choose(survivals, LINEAR.seconds, 64) == [0, 0]
    assert choose(survivals, FLAT.seconds, 2) == [0, 2]
    assert choose([], FLAT.seconds, 4) == []


falling = st.lists(st.floats(0, 1), max_size=3).map(lambda values: sorted(values, reverse=True))


@given(st.lists(falling, min_size=1, max_size=3), st.integers(0, 2**32))
def test_search_is_the_best_of_all_prefix_vectors(survivals, seed):
    """Greedy order by survival contains, for every total, the best prefix vector; so the search is exact."""
    rng = random.Random(seed)
    table = CostTable([(rows, rng.uniform(0.5, 3)) for rows in range(1, 16)])

    def rate(lengths):
        expected = len(survivals) + sum(sum(row[:n]) for row, n in zip(survivals, lengths))
        return expected / table.seconds(len(survivals) + sum(lengths))

    best = max(rate(lengths) for lengths in itertools.product(*(range(len(row) + 1) for row in survivals)))
    chosen = choose(survivals, table.seconds, 99, search_all=True)
    assert rate(chosen) == pytest.approx(best)
    stopped = choose(survivals, table.seconds, 99)
    assert rate(stopped) >= rate([0] * len(survivals)) - 1e-12


def test_choose_counts_what_rows_that_are_not_for_choice_bring():
    """A draft of 0.5 is worth a pass 1.4 times as long to a row alone, not beside a row that brings nine tokens."""
    cost = lambda rows: {1: 1.0, 2: 1.4, 10: 2.0, 11: 2.4}[rows]  # noqa: E731
    assert choose([[0.5]], cost, 8) == [1]
    assert choose([[0.5]], cost, 8, other_rows=9, other_tokens=9.0) == [0]


def features(seq_id=1, *, num_rows=1, step=0):
    return Features(seq_id=seq_id, num_rows=num_rows, step=step)


def adaptive(acceptance, *, max_tokens=8, draft=0.3, target=FLAT):
    """Every draft is foreseen to hold with the same conditional probability."""
    return AdaptiveLength(
        max_tokens=max_tokens,
        target_cost=target,
        foresee=lambda seq_id, k: [acceptance(seq_id) ** (j + 1) for j in range(k)],
        draft_cost=None if draft is None else CostTable([(1, draft)]),
    )


def test_adaptive_length_follows_what_is_foreseen():
    policy = adaptive({1: 0.95, 2: 0.1}.__getitem__)
    long = policy.limit(features(1))
    assert long.max_tokens >= 5 and 0 < long.floor < 1
    assert policy.limit(features(2)).max_tokens == 0
    assert policy.limit(features(2)).thrifty and policy.keep([0.9]) is None


@pytest.mark.parametrize("acceptance", (0.5, 0.8, 0.9))
def test_adaptive_length_matches_leviathan(acceptance):
    """With acceptance a and costs of 1 and c, the best k maximises (1 - a^(k+1)) / ((1 - a) (1 + c k))."""
    policy = adaptive(lambda seq_id: acceptance, max_tokens=40, draft=0.1)
    best = max(range(41), key=lambda k: (1 - acceptance ** (k + 1)) / ((1 - acceptance) * (1 + 0.1 * k)))
    assert policy.limit(features()).max_tokens == best + 2


@pytest.mark.parametrize(("draft", "pause"), ((None, PROBE_EVERY), (0.01, PROBE_EVERY), (0.3, 0.3 / PROBE_SHARE)))
def test_a_row_without_drafts_is_tried_again_for_a_small_share_of_the_time(draft, pause):
    policy = adaptive(lambda seq_id: 0.005, draft=draft)
    tried = []
    for step in range(1000):
        limit = policy.limit(features(step=step))
        assert limit.max_tokens == (limit.least if draft else 8)
        policy.update(1, num_verified=limit.least, num_accepted=0)
        tried += [step] if limit.least else []
    pauses = [b - a - 1 for a, b in itertools.pairwise([-1, *tried])]
    assert pauses == pytest.approx([pause] * len(pauses), abs=1) and pauses
    policy.forget(1)
    assert 1 not in policy.idle


def policies(**settings):
    given = {"max_tokens": 8, "threshold": 0.4, "foresee": lambda seq_id, k: [0.5] * k} | settings
    return build_policies(PolicyInputs(**given))


def test_adaptive_needs_costs_and_the_others_do_not():
    assert set(policies()) == set(POLICIES) - {"adaptive"}
    assert set(policies(cost=FLAT)) == set(policies(max_tokens=0)) == set(POLICIES)


def test_fixed_length():
    policy = policies(max_tokens=5)["fixed"]
    policy.update(0, num_verified=5, num_accepted=0)
    policy.forget(0)
    assert policy.limit(features(num_rows=9, step=3)) == Limit(max_tokens=5)
    assert policy.keep([0.1, 0.0]) == 2
    shadow = policies(max_tokens=5)["shadow"]
    assert shadow.limit(features()) == Limit(max_tokens=5) and shadow.keep([0.9]) == 0


@given(falling)
def test_confidence_keeps_what_is_above_the_threshold(survival):
    policy = policies()["confidence"]
    assert policy.limit(features()) == Limit(max_tokens=8, floor=0.4)
    assert policy.keep(survival) == sum(alive >= 0.4 for alive in survival)
    assert policies(threshold=0.0)["confidence"].keep(survival) == len(survival)


def test_heuristic_length_is_the_rule_of_transformers():
    policy = policies()["heuristic"]
    lengths = []
    for accepted in (1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0):
        length = policy.limit(features()).max_tokens
        lengths.append(length)
        policy.update(1, num_verified=length, num_accepted=length if accepted else 0)
    assert lengths == [5, 7, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1] and FIRST_HEURISTIC == 5
    policy.update(1, num_verified=0, num_accepted=0)
    assert policy.limit(features()).max_tokens == 1, "a step without drafts says nothing"
    policy.forget(1)
    assert policy.limit(features()).max_tokens == 5
    assert policies(max_tokens=3)["heuristic"].limit(features()).max_tokens == 3
