"""Statistics of `dspark verify`: paired outcomes, goodness of fit, and the power that they state."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy import stats

from dspark.quality.goodness import Fit, fit, holm, noncentrality_needed, samples_needed, together, two_samples
from dspark.quality.paired import Paired, interval, mcnemar, questions_needed, sign_test

LAW = {"a": 0.5, "b": 0.3, "c": 0.15, "d": 0.05}


def drawn(law, n, seed):
    counts = np.random.default_rng(seed).multinomial(n, list(law.values()))
    return {cell: int(count) for cell, count in zip(law, counts)}


def test_paired_counts():
    counts = Paired.of([(True, True), (True, False), (False, True), (False, False), (True, True)])
    assert (counts.n, counts.both, counts.plain_only, counts.other_only) == (5, 2, 1, 1)
    assert counts.plain == counts.other == 0.6 and counts.difference == 0


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 5), (6, 0), (12, 12), (3, 20)])
def test_mcnemar_is_the_binomial_test(b, c):
    expected = stats.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    assert mcnemar(Paired(n=60, both=10, plain_only=b, other_only=c)) == pytest.approx(min(1, expected))
    assert sign_test(b, c) == pytest.approx(min(1, expected))


@pytest.mark.parametrize(("b", "c"), [(1, 12), (4, 4), (0, 7)])
def test_interval_is_where_the_score_test_rejects(b, c):
    """Tango's statistic with the likelihood maximised by brute force over the share of discordant pairs."""
    n = 50
    for limit in interval(Paired(n=n, both=20, plain_only=b, other_only=c)):
        shares = np.linspace(max(0.0, -limit), (1 - limit) / 2, 200_001)[1:-1]
        likelihood = b * np.log(shares) + c * np.log(shares + limit) + (n - b - c) * np.log1p(-2 * shares - limit)
        share = shares[int(np.nanargmax(likelihood))]
        score = (c - b - n * limit) / np.sqrt(n * (2 * share + limit * (1 - limit)))
        assert abs(score) == pytest.approx(stats.norm.ppf(0.975), rel=5e-3)


def test_interval_without_a_difference_is_not_empty():
    z2 = stats.norm.ppf(0.975) ** 2
    low, high = interval(Paired(n=100, both=60, plain_only=0, other_only=0))
    assert high == pytest.approx(z2 / (100 + z2), rel=1e-6) and low == pytest.approx(-high, rel=1e-6)


def test_interval_covers():
    generator, covered = np.random.default_rng(0), 0
    for _ in range(400):
        both, plain, other, _ = generator.multinomial(120, [0.5, 0.12, 0.05, 0.33])
        low, high = interval(Paired(n=120, both=int(both), plain_only=int(plain), other_only=int(other)))
        covered += low <= 0.05 - 0.12 <= high
    assert 0.92 <= covered / 400 <= 0.98


def test_questions_needed_are_enough_and_not_too_many():
    none = Paired(n=50, both=20, plain_only=0, other_only=0)
    n = questions_needed(none, margin=0.001)
    assert interval(Paired(n=n, both=n, plain_only=0, other_only=0))[1] <= 0.001
    assert interval(Paired(n=n - 1, both=n - 1, plain_only=0, other_only=0))[1] > 0.001
    some = Paired(n=100, both=50, plain_only=5, other_only=5)
    n = questions_needed(some, margin=0.01)
    assert 2_000 < n < 5_000 < questions_needed(some, margin=0.005)
    half = n // 20
    assert interval(Paired(n=n, both=0, plain_only=half, other_only=half))[1] == pytest.approx(0.01, rel=0.02)


def test_samples_of_the_law_pass_and_of_another_fail():
    assert fit(drawn(LAW, 2000, 1), LAW).p_value > 0.01
    assert fit(drawn({"a": 0.4, "b": 0.4, "c": 0.15, "d": 0.05}, 2000, 1), LAW).p_value < 1e-6


def test_the_level_is_kept():
    p_values = [fit(drawn(LAW, 300, seed), LAW).p_value for seed in range(300)]
    assert sum(p < 0.05 for p in p_values) / 300 < 0.085
    first = [two_samples(drawn(LAW, 300, seed), drawn(LAW, 200, 10_000 + seed)).p_value for seed in range(300)]
    assert sum(p < 0.05 for p in first) / 300 < 0.085


def test_what_cannot_be_drawn_is_a_fault():
    assert fit({"a": 500, "e": 1}, {**LAW, "e": 0.0}).p_value == 0.0
    assert fit({"a": 500, "f": 1}, LAW).p_value == 0.0


def test_small_cells_are_pooled():
    law = {"a": 0.98, **{str(i): 0.02 / 40 for i in range(40)}}
    assert fit({"a": 196, "3": 2, "4": 2}, law).num_cells <= 2


@pytest.mark.parametrize("seed", range(3))
def test_every_departure_of_the_stated_size_is_found(seed):
    """The smallest total variation distance that is named is found in at least 80% of runs, in any direction."""
    n, alpha = 800, 0.01
    distance = fit(drawn(LAW, n, 0), LAW).detectable(alpha)
    rng = random.Random(seed)
    up, down = rng.sample(list(LAW)[:3], 2)
    other = dict(LAW)
    other[up] += distance
    other[down] -= distance
    assert other[down] > 0
    found = sum(fit(drawn(other, n, 100 + run), LAW).p_value < alpha for run in range(200))
    assert found / 200 > 0.75


def test_two_samples_find_what_they_say():
    first, second = drawn(LAW, 1000, 0), drawn(LAW, 1000, 1)
    distance = two_samples(first, second).detectable(0.01)
    assert distance > fit(first, LAW).detectable(0.01)
    other = {**LAW, "a": 0.5 - distance, "b": 0.3 + distance}
    runs = [two_samples(drawn(LAW, 1000, s), drawn(other, 1000, 500 + s)).p_value < 0.01 for s in range(100)]
    assert sum(runs) > 75


def test_samples_needed():
    other = {"a": 0.52, "b": 0.28, "c": 0.15, "d": 0.05}
    n = samples_needed(LAW, other, alpha=0.01)
    found = sum(fit(drawn(other, n, run), LAW).p_value < 0.01 for run in range(300)) / 300
    assert 0.72 < found < 0.88


def test_rounding_that_is_allowed_is_not_found_and_more_is():
    rounded = {"a": 0.52, "b": 0.28, "c": 0.15, "d": 0.05}
    allowance = sum((rounded[cell] - LAW[cell]) ** 2 / LAW[cell] for cell in LAW)
    runs = [fit(drawn(rounded, 5000, seed), LAW, allowance=allowance).p_value < 0.05 for seed in range(200)]
    assert sum(runs) / 200 < 0.12
    worse = {"a": 0.56, "b": 0.24, "c": 0.15, "d": 0.05}
    assert fit(drawn(worse, 5000, 1), LAW, allowance=allowance).p_value < 1e-3


def test_together_finds_what_is_small_and_everywhere():
    other = {"a": 0.53, "b": 0.27, "c": 0.15, "d": 0.05}
    fits = [fit(drawn(other, 600, seed), LAW) for seed in range(40)]
    assert together(fits).p_value < 1e-4 < min(holm([f.p_value for f in fits]))
    assert together([Fit(statistic=0, num_cells=1, num_samples=5, p_value=1.0)]).p_value == 1.0


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == [] and holm([0.9, 0.8]) == [1.0, 1.0]


def test_noncentrality_grows_with_power_and_freedom():
    base = noncentrality_needed(3, alpha=0.05)
    assert stats.ncx2.sf(stats.chi2.isf(0.05, 3), 3, base) == pytest.approx(0.8)
    assert base < noncentrality_needed(30, alpha=0.05) and base < noncentrality_needed(3, alpha=0.001)
