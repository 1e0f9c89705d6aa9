"""The simulation: counts add up, plans keep their promises, plain decoding is never lost to, and nothing stalls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.bench.simulation import read_table
from dspark.cli import main
from dspark.plan.cost import CostTable
from dspark.plan.simulate import Kind, Machine, Simulation, compare

CODE = Kind(name="code", acceptance=(0.9,) * 8, share=1, num_prompt=40, num_output=60)
CHAT = Kind(name="chat", acceptance=(0.5,) * 8, share=1, num_prompt=20, num_output=40)
NOISE = Kind(name="noise", acceptance=(0.05,) * 8, share=1, num_prompt=20, num_output=40)
FLAT = CostTable([(1, 0.010), (256, 0.012), (2048, 0.080)])
BUSY = CostTable([(1, 0.010), (8, 0.010), (64, 0.080), (2048, 2.5)])
TILES = CostTable(
    [point for n in range(16) for point in ((64 * n + 1, 0.01 + 0.004 * n), (64 * n + 64, 0.01 + 0.004 * n + 1e-6))]
)


def machine(target=FLAT, **settings):
    return Machine(target=target, **({"max_seqs": 32, "max_drafts": 8} | settings))


@pytest.mark.parametrize("policy", ("plain", "adaptive", "fixed@3"))
@pytest.mark.parametrize("load", ({"concurrency": 7}, {"rate": 3.0}))
def test_every_token_of_every_request_comes_once(policy, load):
    report = Simulation(machine(), [CODE, CHAT], policy=policy, seed=1).run(50, **load)
    kinds = [kind.num_output for kind in (CODE, CHAT)]
    assert 50 * min(kinds) <= report.num_tokens <= 50 * max(kinds) and report.num_tokens % 20 == 0
    assert report.num_requests == 50 and report.seconds > 0
    assert (report.num_verified == 0) == (policy == "plain")


def test_plain_decoding_takes_the_time_of_its_table():
    kind = Kind(name="x", acceptance=(), num_prompt=1, num_output=11)
    report = Simulation(machine(CostTable([(1, 0.5)])), [kind], policy="plain").run(3, concurrency=1)
    assert report.seconds == pytest.approx(3 * 11 * 0.5) and report.num_steps == 33


@pytest.mark.parametrize("concurrency", (1, 4, 32))
@pytest.mark.parametrize("target", (FLAT, BUSY, TILES), ids=("flat", "busy", "tiles"))
def test_adaptive_never_loses_to_plain_nor_much_to_the_best_fixed_length(target, concurrency):
    policies = ("plain", "adaptive", "fixed@1", "fixed@2", "fixed@4", "fixed@8")
    reports = compare(machine(target), [CODE, CHAT, NOISE], policies, 120, concurrency=concurrency)
    speed = {name: report.throughput for name, report in reports.items()}
    assert speed["adaptive"] >= 0.99 * speed["plain"]
    assert speed["adaptive"] >= 0.98 * max(speed.values())


@pytest.mark.parametrize(
    "drafts",
    (
        {"draft": CostTable([(1, 0.001), (32, 0.002)]), "by_token": True},
        {"draft": CostTable([(1, 0.002), (32, 0.003)])},
    ),
)
def test_drafts_that_cost_are_paid_for(drafts):
    dear = {"draft": CostTable([(1, 0.5)]), "by_token": drafts.get("by_token", False)}
    reports = compare(machine(**drafts), [CODE, NOISE], ("plain", "adaptive", "fixed@8"), 80, concurrency=8)
    assert reports["adaptive"].throughput > 1.2 * reports["plain"].throughput
    costly = compare(machine(**dear), [CODE, NOISE], ("plain", "adaptive", "fixed@8"), 80, concurrency=8)
    assert costly["adaptive"].throughput >= 0.99 * costly["plain"].throughput > costly["fixed@8"].throughput


def test_plans_keep_their_promises_and_fewer_drafts_are_checked_under_load():
    light, heavy = (
        Simulation(machine(BUSY, max_seqs=64), [CODE, CHAT, NOISE], seed=2).run(300, concurrency=n) for n in (2, 64)
    )
    for report in (light, heavy):
        assert report.emitted == pytest.approx(report.expected, rel=0.05)
    assert heavy.verified_per_request < 0.5 * light.verified_per_request


def test_long_prompts_and_a_rush_neither_stall_nor_starve():
    long = Kind(name="long", acceptance=(0.7,) * 4, num_prompt=5000, num_output=20)
    report = Simulation(machine(TILES, max_tokens=512), [long, CHAT], seed=3).run(100, rate=1e6)
    assert report.num_tokens >= 100 * 20 and report.longest_step <= 1.05 * TILES.seconds(512)


def test_rates_by_position_are_those_of_vllm():
    kind = Kind.from_rates("x", [0.8, 0.6, 0.3])
    assert kind.acceptance == pytest.approx([0.8, 0.75, 0.5])
    with pytest.raises(ValueError, match="must fall"):
        Kind.from_rates("x", [0.5, 0.6])


@pytest.mark.parametrize("policy", ("fixed", "fixed@x", "best", "plain@3"))
def test_unknown_policies_are_refused(policy):
    with pytest.raises(ValueError, match="cannot be simulated"):
        Simulation(machine(), [CODE], policy=policy)


@pytest.mark.parametrize("change", ({"acceptance": (1.5,)}, {"share": 0}, {"num_output": 0}))
def test_kinds_that_cannot_be_are_refused(change):
    with pytest.raises(ValueError, match="kind 'x'"):
        Kind(**({"name": "x", "acceptance": (0.5,)} | change))


def test_a_load_is_open_or_closed():
    with pytest.raises(ValueError, match="one of the two"):
        Simulation(machine(), [CODE]).run(3)


TABLE = Path(__file__).parent.parent.parent / "benchmarks" / "cost-tables" / "h100-8b-roofline.json"


def test_the_command_prints_every_policy_at_every_load(capsys):
    words = ["simulate", "--table", str(TABLE), "--requests", "60", "--concurrency", "1,16", "--rate", "50"]
    assert main([*words, "--kind", "code=0.8,0.6,0.5"]) == 0
    text = capsys.readouterr().out
    assert "H100" in text and "fixed@3" in text and "50/s" in text
    assert main([*words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert set(figures) == {"1", "16", "50/s"}
    for of in figures.values():
        assert of["adaptive"]["throughput"] >= 0.98 * of["plain"]["throughput"]


@pytest.mark.parametrize(
    ("words", "message"),
    (
        (["--table", "/absent"], "no cost table"),
        (["--kind", "code"], "NAME=RATE"),
        (["--kind", "code=0.5,0.6"], "must fall"),
        (["--requests", "0"], "at least 1"),
        (["--policies", "best"], "cannot be simulated"),
        ([], "give a load"),
    ),
)
def test_bad_input_is_one_line(words, message, capsys):
    load = ["--concurrency", "2"] if words else []
    table = [] if "--table" in words else ["--table", str(TABLE)]
    assert main(["simulate", *table, *load, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "content", ("", "[]", "{}", '{"source": "", "target": [[1, 1]]}', '{"source": "x", "target": []}')
)
def test_a_table_without_a_source_or_points_is_refused(content, tmp_path):
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="is no cost table"):
        read_table(path)
