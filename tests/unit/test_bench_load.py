"""The load generator: arrivals by their law, every request answered and timed from when it came, figures by hand."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace

import pytest

from dspark import LLM
from dspark.bench.arrivals import Load, parse_loads
from dspark.bench.data import PromptRow
from dspark.bench.harness import BenchSettings
from dspark.bench.load import LoadRun, Served, run_load
from dspark.bench.load_report import load_lines, load_page, load_text, plot_load
from dspark.bench.load_summary import (
    Slo,
    floor_held,
    gaps,
    seconds_held,
    steady_throughput,
    summarise_load,
    time_per_token,
    time_to_first,
)
from dspark.bench.variants import parse_variants
from dspark.types import SpeculationRecord
from tests.tiny_folder import tiny_folder

ROWS = [PromptRow(task="t", id=str(i), messages=({"role": "user", "content": "ab" * (i + 2)},)) for i in range(7)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(str(tiny_folder(tmp_path_factory.mktemp("m"))), draft="none", path="torch", dtype="float32", check=True)


def test_open_loops_come_at_their_rate_and_burstiness():
    for burstiness in (0.25, 1.0, 4.0):
        times = Load(rate=5.0, burstiness=burstiness).times(4000, seed=1)
        between = [b - a for a, b in zip([0.0, *times], times)]
        assert times == sorted(times) and statistics.fmean(between) == pytest.approx(0.2, rel=0.1)
        variation = statistics.pstdev(between) / statistics.fmean(between)
        assert variation == pytest.approx(burstiness**-0.5, rel=0.1), "of a Gamma law; 1 for a Poisson process"
    assert Load(rate=math.inf).times(3, seed=0) == Load(concurrency=2).times(3, seed=0) == [0.0] * 3
    assert Load(rate=5.0).times(9, seed=1) == Load(rate=5.0).times(9, seed=1) != Load(rate=5.0).times(9, seed=2)


def test_loads_are_read_from_lists():
    loads = parse_loads("1, 8", "0.5,inf", burstiness=0.5)
    assert [load.name for load in loads] == ["1", "8", "0.5/s", "inf/s"]
    assert loads[2].burstiness == 0.5 and not parse_loads(None, "", burstiness=1.0)
    with_floors = parse_loads("8", "2", burstiness=1.0, floor="2@40")
    assert [load.name for load in with_floors] == ["8", "8 (2 at 40/s)", "2/s", "2/s (2 at 40/s)"]
    with pytest.raises(ValueError, match="closed .* or open"):
        Load(concurrency=1, rate=1.0)


@pytest.mark.parametrize("load", (Load(concurrency=3), Load(rate=math.inf), Load(rate=200.0)), ids=lambda l: l.name)
def test_every_request_is_answered_once_and_the_text_is_the_same(llm, load):
    settings = BenchSettings(max_tokens=12, repeat=2)
    result = run_load(llm, parse_variants("none,suffix"), ROWS, loads=[load], settings=settings)
    assert [run.variant for run in result.runs] == ["none", "suffix", "suffix", "none"], "in turns"
    lengths = {}
    for run in result.runs:
        assert sorted(served.row for served in run.served) == list(range(len(ROWS)))
        for served in run.served:
            assert served.num_tokens == served.record.num_emitted
            lengths.setdefault(served.row, set()).add(served.num_tokens)
            times = [time for time, _ in served.deliveries]
            assert times == sorted(times) and served.came <= times[0] <= times[-1] <= run.seconds
        running = [sum(s.came <= t < s.deliveries[-1][0] for s in run.served) for t in [s.came for s in run.served]]
        assert max(running) <= (load.concurrency or 99)
        assert sum(step.num_emitted for step in run.steps) == sum(served.num_tokens for served in run.served)
    assert all(len(found) == 1 for found in lengths.values())


def test_so_many_of_the_running_requests_have_a_floor(llm):
    load = Load(concurrency=3, num_floors=2, floor=1.0)
    result = run_load(llm, parse_variants("none"), ROWS, loads=[load], settings=BenchSettings(max_tokens=12, repeat=1))
    (run,) = result.runs
    asked = [entry for entry in run.served if entry.floor is not None]
    assert {entry.floor for entry in asked} == {1.0} and 2 <= len(asked) < len(ROWS)
    for time in [entry.came for entry in run.served]:
        assert sum(entry.came <= time < entry.deliveries[-1][0] for entry in asked) <= 2


def served(row, came, deliveries, *, verified=0):
    record = SpeculationRecord()
    for _, count in deliveries:
        record.add(drafted=verified, verified=verified, accepted=min(verified, count - 1), emitted=count)
    return Served(row=row, came=came, deliveries=deliveries, num_prompt=3, record=record)


def test_a_second_is_held_by_the_tokens_that_came_in_it():
    entry = served(0, 0.0, [(1.0, 1), (1.5, 2), (2.5, 1), (3.0, 3), (3.9, 1)])
    assert seconds_held(entry, 3) == [True, False], "from 1 to 2 came 3, from 2 to 3 one; the rest is no whole second"
    told = replace(served(1, 0.0, [(0.0, 1), (0.9, 4), (1.0, 1)]), floor=5.0)
    assert floor_held([entry, told], 5.0) == 1.0 and floor_held([entry], 3.0) == 0.5
    assert floor_held([entry], 0.0) is None and floor_held([], 3.0) is None


def test_figures_are_those_of_their_formulas(tmp_path):
    a = served(0, 0.0, [(1.0, 1), (2.0, 3), (3.0, 1)], verified=2)
    b = served(1, 0.5, [(1.0, 1), (4.0, 2)], verified=2)
    c = served(2, 3.5, [(5.0, 1)])
    assert (time_to_first(b), time_per_token(a), time_per_token(c), gaps(a)) == (0.5, 0.5, None, [1.0, 1.0])
    run = LoadRun(
        variant="none", load=Load(concurrency=2), repetition=0, served=[a, b, c], seconds=5.0, last_sent=3.5, steps=[]
    )
    assert steady_throughput(run) == 0.0, "nothing came between the first end at 3 and the last sending at 3.5"
    from dspark.bench.load import LoadResult

    rows = ROWS[:3]
    result = LoadResult(
        rows=rows, names=["none"], loads=[run.load], settings=BenchSettings(max_tokens=5, repeat=1), runs=[run]
    )
    slo = Slo(ttft=1.0, tpot=0.6)
    figures = summarise_load(result, slo)
    cell = figures["2", "none"]
    assert cell.throughput == 9 / 5 and cell.num_tokens == 9
    assert cell.goodput == 1 / 5, "b is too slow a token, c waits too long"
    assert cell.latencies["ttft"]["p50"] == 1.0 and cell.per_user == pytest.approx(1 / 1.0)
    assert cell.accepted_length == 9 / 6 and cell.verified_per_request == 10 / 3
    head = {
        "command": "dspark bench",
        "git": None,
        "versions": {},
        "cpu": "x",
        "num_cpus": 2,
        "threads": 2,
        "device": "cpu",
        "date": "now",
    }
    assert "1.8" in load_text(result, figures, slo)
    assert "TTFT at most 1.0" in load_page(result, figures, slo, title="t", head=head, plot="p.png")
    lines = [json.loads(line) for line in load_lines(result, figures, head=head)]
    assert [line["kind"] for line in lines] == ["head", "figures", "request", "request", "request"]
    plot_load(result, figures, tmp_path / "p.png", title="t")
    assert (tmp_path / "p.png").stat().st_size > 1000
