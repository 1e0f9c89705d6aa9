"""Plans against brute force: cost tables, budgets, calibration, lengths."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.plan.budget import choose
from dspark.plan.cost import CostTable, profile
from dspark.plan.history import Calibration
from dspark.plan.length import AdaptiveLength, Features, FixedLength

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


def test_calibration_believes_then_judges():
    table = Calibration()
    assert table.survival("x", [0.9, 0.45]) == pytest.approx([0.9, 0.45])
    for _ in range(400):
        table.update("x", [0.9, 0.45], num_verified=2, num_accepted=0)
    first, second = table.survival("x", [0.9, 0.45])
    assert first < 0.1 and second == pytest.approx(first * 0.5)  # draft 1 was never reached: nothing learned
    assert table.survival("other", [0.9]) == [0.9]


def test_adaptive_length_follows_acceptance_and_comes_back():
    policy = AdaptiveLength(8, target_cost=FLAT, draft_cost=CostTable([(1, 0.3)]))
    features = Features(seq_id=1, num_rows=1, step=0)
    for _ in range(60):
        policy.update(1, num_verified=4, num_accepted=4)
    long = policy.limit(features)
    for _ in range(60):
        policy.update(1, num_verified=4, num_accepted=0)
    limits = [policy.limit(Features(seq_id=1, num_rows=1, step=step)).max_tokens for step in range(64)]
    assert long.max_tokens >= 5 and 0 < long.floor < 1
    assert sum(limits) <= 8 and max(limits) == 1, "switched off, with cheap re-tries"
    assert policy.limit(Features(seq_id=2, num_rows=1, step=0)).max_tokens >= 0
    policy.forget(1)
    assert 1 not in policy.by_row


def test_adaptive_length_matches_leviathan():
    """With acceptance a and costs of 1 and c, the best k maximises (1 - a^(k+1)) / ((1 - a) (1 + c k))."""
    policy = AdaptiveLength(20, target_cost=FLAT, draft_cost=CostTable([(1, 0.1)]))
    policy.overall = [0.8 * 1e9, 1e9]
    best = max(range(21), key=lambda k: (1 - 0.8 ** (k + 1)) / (0.2 * (1 + 0.1 * k)))
    assert policy.limit(Features(seq_id=0, num_rows=1, step=0)).max_tokens == best + 2


def test_fixed_length():
    policy = FixedLength(5)
    policy.update(0, num_verified=5, num_accepted=0)
    policy.forget(0)
    assert policy.limit(Features(seq_id=0, num_rows=9, step=3)).max_tokens == 5
