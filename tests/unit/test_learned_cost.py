"""Tests of the cost curve that is learned from steps alone."""

from __future__ import annotations

import random

import pytest

from dspark.plan.cost import Shape
from dspark.plan.learned import SIZES, LearnedCost


def fed(seconds, sizes, *, noise: float = 0.0, cost: LearnedCost | None = None) -> LearnedCost:
    cost, rng = cost or LearnedCost(), random.Random(0)
    for rows in sizes:
        cost.observe(Shape(rows=rows), seconds(rows) * (1 + noise * rng.uniform(-1, 1)))
    return cost


def some_sizes(most: int, count: int) -> list[int]:
    rng = random.Random(1)
    return [rng.randint(1, most) for _ in range(count)]


def test_before_the_first_step_more_rows_cost_a_little_more():
    cost = LearnedCost()
    assert 0 < cost.seconds(1) < cost.seconds(2) < 1.1 * cost.seconds(1)


@pytest.mark.parametrize("slope", [0.0, 0.001, 0.02, 0.3])
@pytest.mark.parametrize("unit", [1e-3, 1.0, 30.0])
def test_a_line_is_found_in_any_unit(slope: float, unit: float):
    cost = fed(lambda rows: unit * (1 + slope * rows), some_sizes(16, 400), noise=0.1)
    for rows in (1, 5, 16):
        assert cost.seconds(rows) == pytest.approx(unit * (1 + slope * rows), rel=0.1)


def test_a_cliff_is_seen_where_it_stands():
    cost = fed(lambda rows: 1.0 if rows <= 8 else 2.0, some_sizes(16, 400))
    assert cost.seconds(16) > 1.5 * cost.seconds(8)
    flat = fed(lambda rows: 1.0, some_sizes(16, 400))
    assert flat.seconds(16) < 1.1 * flat.seconds(8)


def test_the_curve_never_falls_and_prices_are_positive():
    rng = random.Random(3)
    cost = fed(lambda rows: rng.uniform(0.01, 5.0), some_sizes(64, 300))
    values = [cost.seconds(size) for size in SIZES]
    assert all(0 < a <= b for a, b in zip(values, values[1:]))


def test_one_slow_step_is_no_price():
    def flat(rows: int) -> float:
        return 1.0

    cost = fed(flat, some_sizes(8, 100))
    before = cost.seconds(4)
    cost.observe(Shape(rows=4), 1000.0)
    assert cost.seconds(4) < 1.2 * before


def test_a_size_that_has_not_come_for_long_keeps_its_price_against_the_line():
    cost = fed(lambda rows: 1.0 if rows < 8 else 3.0, some_sizes(12, 300))
    known = cost.seconds(12) / cost.seconds(1)
    fed(lambda rows: 1.0, [1] * 300, cost=cost)
    assert cost.seconds(12) / cost.seconds(1) > 0.6 * known


def test_a_new_pace_is_followed():
    cost = fed(lambda rows: 1 + 0.02 * rows, some_sizes(16, 200))
    fed(lambda rows: 1.8 * (1 + 0.02 * rows), some_sizes(16, 400), cost=cost)
    assert cost.seconds(8) == pytest.approx(1.8 * 1.16, rel=0.1)
