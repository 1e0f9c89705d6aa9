"""Measured costs: read back as they were written, and never taken for another runner's."""

from __future__ import annotations

import json

import pytest

from dspark.engine import measure
from dspark.engine.measure import PassCost, cost_file, known_cost, measure_cost
from dspark.model.runner import build_runner
from dspark.plan.cost import CostTable
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def runner():
    return build_runner(tiny_model("llama"), path="torch", exact=False, quantization=None, device="cpu")


def test_a_runner_is_measured_over_rows_and_context(runner):
    cost = measure_cost(runner, page_size=16)
    rows = [rows for rows, _ in cost.table.points]
    assert rows[0] == 1 and rows == sorted(rows) and len(rows) > 5
    assert all(seconds > 0 for _, seconds in cost.table.points)
    assert cost.per_context >= 0 and cost.per_seq_context >= 0


def test_costs_are_measured_once_and_kept(runner, monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "cache_dir", lambda: tmp_path)
    made = []

    def fake(runner, *, page_size):
        made.append(runner)
        return PassCost(table=CostTable([(1, float(len(made))), (8, 20.0)]), per_context=1e-6, per_seq_context=2e-6)

    monkeypatch.setattr(measure, "measure_cost", fake)
    monkeypatch.setattr(measure, "_quicker_now", lambda *_, **__: False)
    settings = {"model": "m", "quantization": None, "threads": 2, "page_size": 16}
    first = known_cost(runner, **settings)
    again = known_cost(runner, **settings)
    assert len(made) == 1 and again.as_dict() == first.as_dict()
    assert known_cost(runner, **settings, fresh=True).table.points[0] == (1, 2.0)
    assert known_cost(runner, **settings).table.points[0] == (1, 2.0), "what is measured anew is kept"
    path = cost_file(runner, model="m", quantization=None, threads=2)
    for broken in ("", "{", "[]", json.dumps(first.as_dict() | {"format": "other"}), '{"format": "dspark-cost-2"}'):
        path.write_text(broken)
        known_cost(runner, **settings)
    assert len(made) == 2 + 5, "a file that cannot be read is measured anew"
    monkeypatch.setattr(measure, "cache_dir", lambda: tmp_path / "file")
    (tmp_path / "file").write_text("in the way")
    known_cost(runner, **settings)
    assert len(made) == 8, "a cache that cannot be written does not stop the start"


def test_costs_kept_from_a_bad_moment_are_measured_anew(runner, monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "cache_dir", lambda: tmp_path)
    settings = {"model": "m", "quantization": None, "threads": 2, "page_size": 16}
    right = known_cost(runner, **settings)
    path = cost_file(runner, model="m", quantization=None, threads=2)
    slow = PassCost(table=CostTable([(rows, 10 * seconds) for rows, seconds in right.table.points]))
    path.write_text(json.dumps(slow.as_dict()))
    assert known_cost(runner, **settings).table.points[0][1] < slow.table.points[0][1] / 2
    quick = PassCost(table=CostTable([(rows, seconds / 10) for rows, seconds in right.table.points]))
    path.write_text(json.dumps(quick.as_dict()))
    assert known_cost(runner, **settings).as_dict() == quick.as_dict(), "the machine is merely busy now"


def test_costs_of_another_model_device_or_thread_count_are_not_taken(runner, monkeypatch):
    def file(model="a", quantization=None, threads=1):
        return cost_file(runner, model=model, quantization=quantization, threads=threads)

    files = {file(), file(model="b"), file(threads=2), file(quantization="int8")}
    monkeypatch.setattr(measure, "cpu_model", lambda: "another processor")
    files.add(file())
    monkeypatch.setattr(measure, "versions", lambda: {"torch": "9"})
    files.add(file())
    assert len(files) == 6


@pytest.mark.parametrize(
    "change", ({"per_context": -1.0}, {"per_context": float("nan")}, {"points": []}, {"points": 3})
)
def test_what_are_no_costs_is_refused(change):
    good = PassCost(table=CostTable([(1, 1.0)])).as_dict()
    assert PassCost.from_dict(good).as_dict() == good
    with pytest.raises(ValueError, match="no costs of passes"):
        PassCost.from_dict(good | change)
