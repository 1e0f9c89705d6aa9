"""Choosing a draft: who is put out of a race and when, what is foretold, what fits, and the whole command."""

from __future__ import annotations

import json
import math
import random
import re

import pytest

from dspark.bench.candidates import expand, within
from dspark.bench.data import PromptRow
from dspark.bench.foretell import Drafted, Prices, Seen, alone, best_length, conditional, under_load
from dspark.bench.harness import Answer, BenchSettings, Result
from dspark.bench.race import LEAST_PROMPTS, behind, race
from dspark.bench.report import target_note
from dspark.bench.select import Row, as_it_is, off_from, recommend
from dspark.bench.suggestions import suggestions
from dspark.cli import main
from dspark.plan.cost import CostTable, StepCost
from dspark.types import SpeculationRecord
from tests.tiny_folder import tiny_folder


class Runner:
    """Answers at a scripted speed."""

    def __init__(self, name, speed):
        self.name, self.speed, self.asked, self.task = name, speed, [], ""

    def answer(self, prompt, params):
        self.asked.append((self.task, tuple(prompt)))
        return Answer(tokens=list(range(101)), decode_seconds=100 / self.speed(len(self.asked)), first_seconds=0.1)


def run_race(participants, count, **settings):
    rows = [PromptRow(task="ab"[i % 2], id=str(i), messages=()) for i in range(count)]
    result = Result(
        rows=rows, names=[p.name for p in participants], num_variants=len(participants), settings=BenchSettings()
    )
    return race(participants, [[i] for i in range(count)], result=result, **settings)


def test_clear_losers_end_early_and_nobody_else():
    rng = random.Random(1)
    plain, quick, close, slow = (
        Runner("none", lambda n: 10 * rng.uniform(0.9, 1.1)),
        Runner("quick", lambda n: 30 * rng.uniform(0.9, 1.1)),
        Runner("close", lambda n: 30 * rng.uniform(0.9, 1.1)),
        Runner("slow", lambda n: 12 * rng.uniform(0.9, 1.1)),
    )
    found = run_race([plain, quick, close, slow], 20)
    assert set(found.out) == {"slow"} and found.out["slow"][0] == LEAST_PROMPTS
    assert len(slow.asked) == LEAST_PROMPTS and len(plain.asked) == len(quick.asked) == len(close.asked) == 20
    assert 0.3 < found.out["slow"][1] < 1
    assert [task for task, _ in quick.asked[:2]] == ["a", "b"]
    slow.asked.clear()
    assert run_race([plain, quick, close, slow], 8, stop_early=False).out == {}
    assert len(slow.asked) == 8


def test_equals_are_put_out_no_more_often_than_promised():
    """300 races of four equals over 30 prompts, looked at after each: in at most 5% is anybody out."""
    rng, wrong = random.Random(2), 0
    for _ in range(300):
        speeds = {name: {} for name in "abcd"}
        for row in range(30):
            common = rng.uniform(5, 50)
            for name in speeds:
                speeds[name][row] = common * math.exp(rng.gauss(0, 0.1))
            if behind(speeds):
                wrong += 1
                break
    assert wrong <= 0.05 * 300 + 3 * math.sqrt(300 * 0.05 * 0.95)


def test_what_is_foretold_of_one_stream_is_arithmetic():
    record = SpeculationRecord()
    for _ in range(10):
        record.add(drafted=3, verified=2, accepted=2, emitted=3)
    for _ in range(10):
        record.add(drafted=0, verified=0, accepted=0, emitted=1)
    table = CostTable([(1, 0.010), (2, 0.011), (3, 0.012), (4, 0.013)])
    prices = Prices(target=StepCost(table), overhead=0.001, by_token=CostTable([(1, 0.002)]))
    seen = Seen(by_task={"t": record}, sources={"model": Drafted(drafts=10, tokens=30)}, num_output=40)
    plain = 40 * 0.011
    spent = 10 * 0.013 + 10 * 0.011 + 30 * 0.002
    assert alone(seen, prices) == pytest.approx(plain / spent)
    assert conditional(record) == [1.0, 1.0]
    assert best_length(seen, prices, longest=8) == 2
    by_block = Prices(
        target=StepCost(table), by_block=CostTable([(1, 0.004)]), by_token=None, block_sources={"head": "dspark"}
    )
    seen.sources = {"head": Drafted(drafts=10, tokens=30), "suffix": Drafted(drafts=5, tokens=5)}
    assert alone(seen, by_block) == pytest.approx(40 * 0.010 / (10 * 0.012 + 10 * 0.010 + 10 * 0.004))


def test_what_never_holds_is_foretold_to_bring_nothing_and_what_holds_less_under_load():
    table = CostTable([(1, 0.010), (4, 0.011), (8, 0.012), (16, 0.020), (64, 0.080), (256, 0.32)])
    prices = Prices(target=StepCost(table))
    good, bad = SpeculationRecord(), SpeculationRecord()
    for _ in range(40):
        good.add(drafted=3, verified=3, accepted=3, emitted=4)
        bad.add(drafted=3, verified=3, accepted=0, emitted=1)
    seen = Seen(by_task={"t": good}, num_prompt=20, num_output=60)
    speedups = under_load(seen, prices, [1, 4, 32], max_drafts=3)
    assert speedups[1] > 2 and speedups[1] > speedups[4] > speedups[32] > 0.95
    nothing = under_load(Seen(by_task={"t": bad}, num_prompt=20, num_output=60), prices, [4], max_drafts=3)
    assert 0.9 < nothing[4] < 1.05
    assert best_length(Seen(by_task={"t": bad}), prices, longest=3) == 0


def test_models_come_in_each_precision_and_the_rest_as_they_are():
    found = expand(
        ["suffix", "small@4", "other:int4", "none", "heads/x"], precisions=["bf16", "int8"], is_head="heads/x".__eq__
    )
    assert [v.name for v in found] == ["suffix", "small@4", "small:int8@4", "other:int4", "heads/x"]
    assert found[2].speculation.quantization == "int8" and found[2].speculation.num_speculative_tokens == 4
    for drafts, precisions, message in (
        (["a", "a"], ["bf16"], "twice"),
        (["none"], ["bf16"], "no drafts"),
        (["a"], ["fp3"], "fp3"),
    ):
        with pytest.raises(ValueError, match=message):
            expand(drafts, precisions=precisions)


def test_a_quantised_folder_is_measured_as_it_is_and_reports_say_so(tmp_path):
    folder = tiny_folder(tmp_path / "q")
    assert not as_it_is(str(folder)) and not as_it_is("suffix")
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "dspark", "version": 1, "bits": 8}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    assert [v.name for v in expand([str(folder)], precisions=["bf16", "int8"], is_head=as_it_is)] == [str(folder)]
    assert target_note({"quantization": None, "weights": "float32"}) == []
    (line,) = target_note({"quantization": "int8", "weights": "int8 as on disk"})
    assert "int8" in line and "this quantised target's own" in line


def test_what_does_not_fit_is_told_what_would():
    variants = expand(["a", "b"], precisions=["bf16", "int4"])
    gib = 2**30
    sizes = {"a": 3 * gib, "a:int4": gib, "b": 9 * gib, "b:int4": 3 * gib}
    kept, refused = within(variants, sizes, 8 * gib)
    assert [v.name for v in kept] == ["a", "a:int4", "b:int4"]
    assert re.search("needs 9.00 GiB .* 3.20 GiB are left: measure it as :int4", refused["b"])


def test_the_smallest_of_equals_is_recommended_and_nothing_that_does_not_pay():
    def row(name, speedup, size, out=None, foretold=None):
        return Row(
            name=name, speedup=speedup, mean_of_tasks=speedup, interval=None, foretold=foretold or {},
            accepted_length=2, acceptance_rate=0.5, draft_ms=1, verify_ms=1, num_bytes=size, length=3,
            settings={}, out=out,
        )  # fmt: skip

    assert recommend([row("big", 2.0, 100), row("small", 1.96, 10), row("slow", 1.5, 1)]) == "small"
    assert recommend([row("gone", 3.0, 1, out=5), row("here", 1.5, 9)]) == "here"
    assert recommend([row("idle", 1.01, 1)]) is None
    assert off_from(row("a", 2, 1, foretold={1: 2.0, 4: 1.3, 16: 1.0})) == 16
    assert off_from(row("a", 2, 1, foretold={1: 2.0, 4: 1.3})) is None


def test_known_targets_have_published_drafts_and_every_target_lookups():
    names = [entry["draft"] for entry in suggestions("Qwen/Qwen3-8B")]
    assert "Qwen/Qwen3-0.6B" in names and "RedHatAI/Qwen3-8B-speculator.eagle3" in names and "suffix" in names
    assert [e["draft"] for e in suggestions("some/unknown-model")] == ["suffix", "ngram"]
    assert "meta-llama/Llama-3.2-1B-Instruct" in [e["draft"] for e in suggestions("meta-llama/Llama-3.1-8B-Instruct")]
    for entry in suggestions("qwen3-8b"):
        assert set(entry) == {"target", "draft", "kind", "use", "source"} and entry["source"]


def test_the_command_measures_writes_and_says_what_cannot_be_used(tmp_path, capsys):
    target, foreign = tiny_folder(tmp_path / "t"), tiny_folder(tmp_path / "f", shift=3, seed=4)
    prompts = [{"task": "ab"[i % 2], "id": str(i), "prompt": "hello hello hello " * (i + 1)} for i in range(6)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    argv = ["select", "--model", str(target), "--drafts", "suffix", str(foreign), "/absent/x", "--precisions", "bf16"]
    argv += ["--data", str(tmp_path / "p.jsonl"), "--max-tokens", "16", "--max-model-len", "256", "--no-early-stop"]
    argv += ["--out", str(tmp_path / "out"), "--name", "x", "--concurrency", "1,4", "--json"]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in document["candidates"]}
    assert set(rows) == {"suffix", str(foreign)} and set(document["refused"]) == {"/absent/x"}
    assert "does not exist" in document["refused"]["/absent/x"]
    assert all(set(row["foretold"]) == {"1", "4"} and row["speedup"] > 0 for row in rows.values())
    assert rows[str(foreign)]["num_bytes"] > 0 == rows["suffix"]["num_bytes"]
    [page] = (tmp_path / "out").glob("*.html")
    assert "data:image/png" in page.read_text() and "/absent/x" in page.read_text()
    [config] = (tmp_path / "out").glob("*.toml")
    from dspark.config import load_config

    loaded = load_config(config)
    chosen = document["best"]
    assert loaded.speculation.method == ("none" if chosen is None else rows[chosen]["settings"]["method"])
    assert main(["select", "--suggest", "--model", "Qwen/Qwen3-8B"]) == 0
    assert "eagle3" in capsys.readouterr().out
