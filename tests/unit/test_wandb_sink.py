"""The Weights & Biases sink: exact entries with a scripted wandb, and whole runs with the real one, offline.
It must never need a network or an account."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dspark.observe.metrics import MAX_LABELS, OTHER, EngineMetrics, Gauges
from dspark.observe.wandb_sink import ServingRun, TrainingSink, training_sink
from tests.fake_steps import FakeClock, feed, row_step, sequence

STEP_ROW = {
    "blocks": 240,
    "tokens": 900,
    "grad_norm": 0.5,
    "lr": 1e-3,
    "loss": 2.5,
    "ce": 2.0,
    "l1": 0.25,
    "confidence": 0.5,
    "accept_first": 0.75,
    "step": 7,
    "num_steps": 100,
}
VALIDATION_ROW = {
    "validation": {
        "accepted_length": 2.5,
        "by_task": {"gsm8k": 3.0, "a b/c": 2.0},
        "conditional": [0.75, 0.5, 0.25],
        "num_blocks": 60,
    },
    "blocks": 1680,
    "tokens": 6300,
    "seconds": 12.5,
    "step": 7,
    "num_steps": 100,
}


class FakeRun:
    """Remembers what it was told; raises `failure` instead, where it has one."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.entries: list[tuple[dict[str, Any], int | None]] = []
        self.summary: dict[str, Any] = {}
        self.failure: Exception | None = None
        self.num_tries = 0
        self.finished = 0
        self.logged = threading.Event()

    def log(self, entry: dict[str, Any], step: int | None = None) -> None:
        self.num_tries += 1
        if self.failure is not None:
            self.logged.set()
            raise self.failure
        self.entries.append((entry, step))
        self.logged.set()

    def finish(self) -> None:
        self.finished += 1
        if self.failure is not None:
            raise self.failure


class FakeHistogram:
    """Bars and the bounds around them."""

    def __init__(self, *, np_histogram: tuple[list[float], list[float]]) -> None:
        self.heights, self.bounds = np_histogram
        assert len(self.bounds) == len(self.heights) + 1 <= 513


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeRun]]:
    """The runs that were begun, with a scripted wandb."""
    begun: list[FakeRun] = []

    def init(**settings: Any) -> FakeRun:
        begun.append(FakeRun(**settings))
        return begun[-1]

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.Histogram = FakeHistogram  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    yield begun


def serving(**gauges: Any) -> tuple[EngineMetrics, FakeClock]:
    clock = FakeClock(100.0)
    return EngineMetrics(lambda: Gauges(**gauges), clock=clock), clock


def bars(entry: dict[str, Any]) -> dict[str, list[float]]:
    return {name: value.heights for name, value in entry.items() if isinstance(value, FakeHistogram)}


def scalars(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not isinstance(value, FakeHistogram)}


# -- serving


def test_a_run_begins_with_what_it_was_given(runs: list[FakeRun]) -> None:
    ServingRun(serving()[0], project="p", config={"model": "m"}, name="n", mode="offline", directory="d")
    expected = {"project": "p", "config": {"model": "m"}, "name": "n", "mode": "offline", "dir": "d"}
    assert runs[0].settings == expected | {"job_type": "serve"}
    ServingRun(serving()[0], project="p")
    assert runs[1].settings["mode"] is None, "then WANDB_MODE decides"


def test_an_entry_is_of_the_time_since_the_one_before(runs: list[FakeRun]) -> None:
    metrics, clock = serving(num_running=2, num_waiting=1, cache_usage=0.5)
    seq, other = sequence(0, prompt_class="#0", arrival=99.0), sequence(1, prompt_class="chat")
    feed(metrics, [row_step(seq, drafted=4, accepted=4, at=100.0)], prompt_tokens=4, seconds=0.5, plain=2.0)
    run = ServingRun(metrics, project="p")  # what was before the run is not its business
    clock.now = 101.0
    rows = [row_step(seq, drafted=3, verified=2, accepted=1, at=101.0), row_step(other, drafted=18, accepted=0)]
    feed(metrics, rows, prompt_tokens=4, seconds=0.5, plain=0.75)
    run.log()
    clock.now = 102.0
    feed(metrics, [row_step(other, drafted=1, accepted=1, end="stop")], seconds=0.5, plain=0.5)
    run.log()
    first, second = (entry for entry, step in runs[0].entries if step is None)
    assert scalars(first) == {
        "speed/tokens_per_second": pytest.approx(8 / 1.5),
        "speed/plain_tokens_per_second": pytest.approx(8 / 1.5 / 2.75),
        "speed/speedup": pytest.approx(2.75),
        "requests/running": 2,
        "requests/waiting": 1,
        "requests/ended": 0,
        "cache/usage": 0.5,
        "cache/prefix_hit_rate": 0.0,
        "tokens/prompt": 4,
        "tokens/generated": 3,
        "tokens/drafted": 21,
        "tokens/verified": 20,
        "tokens/accepted": 1,
        "savings/seconds": pytest.approx(0.25),
        "speculation/silent": 0,
        "acceptance/rate": 1 / 20,
        "acceptance/mean_accepted_length": 3 / 2,
        "class/_0/rate": 1 / 2,
        "class/_0/mean_accepted_length": 2.0,
        "class/chat/rate": 0.0,
        "class/chat/mean_accepted_length": 1.0,
        **{f"acceptance/at/{place}": 0.5 if place == 0 else 0.0 for place in range(18)},
    }
    places = [0] * 18
    assert bars(first) == {
        "lengths/verified": [*places[:2], 1, *places[:14], 1],
        "lengths/accepted": [1, 1, *places[:16]],
        "acceptance/at/by_position": [0.5, *places[:17]],
    }
    assert first["lengths/verified"].bounds[:3] == [-0.5, 0.5, 1.5]
    assert second["requests/ended"] == 1 and second["tokens/generated"] == 2
    assert bars(second)["lengths/verified"] == [0, 1, *places[:16]], "of the interval, not since the start"
    assert bars(second)["acceptance/at/by_position"] == [1.0, *places[:17]]
    assert "class/_0/rate" not in second and second["class/chat/rate"] == 1.0


def test_an_idle_interval_has_no_shares(runs: list[FakeRun]) -> None:
    metrics, _ = serving(num_running=0)
    run = ServingRun(metrics, project="p")
    run.log()
    [(entry, _)] = runs[0].entries
    assert not bars(entry) and entry["tokens/generated"] == 0 and entry["speed/tokens_per_second"] == 0.0
    assert not {name for name in entry if name.startswith(("acceptance/", "class/"))} and "speed/speedup" not in entry


def test_names_of_classes_are_bounded_and_safe(runs: list[FakeRun]) -> None:
    metrics, _ = serving()
    run = ServingRun(metrics, project="p")
    for name in ("a b", "a/b", *(f"tenant {i}" for i in range(1000))):
        feed(metrics, [row_step(sequence(0, prompt_class=name), drafted=2, accepted=1)])
    run.log()
    [(entry, _)] = runs[0].entries
    names = {name.split("/")[1] for name in entry if name.startswith("class/")}
    assert len(names) == MAX_LABELS and {"a_b", "tenant_0", OTHER} <= names  # two became one
    assert all(name.isidentifier() for name in names)
    assert entry["class/a_b/mean_accepted_length"] == 2.0


def test_failures_are_told_once_and_stop_nobody(runs: list[FakeRun]) -> None:
    metrics, _ = serving()
    run = ServingRun(metrics, project="p")
    runs[0].failure = OSError("disk full")
    with pytest.warns(UserWarning, match="disk full") as told:
        for i in range(3):
            feed(metrics, [row_step(sequence(i), end="stop")])
            run.log()
        run.close()
    assert len(told) == 1 and runs[0].num_tries == 4 and runs[0].finished == 1
    assert metrics.counts.num_steps == 3


def test_a_thread_writes_until_it_is_closed(runs: list[FakeRun]) -> None:
    metrics, _ = serving()
    run = ServingRun(metrics, project="p")
    run.start(0.001)
    assert runs[0].logged.wait(30)
    feed(metrics, [row_step(sequence(0), drafted=2, accepted=2, end="stop")])
    run.close()
    assert run.thread is not None and not run.thread.is_alive() and run.thread.daemon
    entries = [entry for entry, _ in runs[0].entries]
    assert sum(entry["tokens/generated"] for entry in entries) == 3, "the last entry has what the thread had not"
    run.close()
    assert len(runs[0].entries) == len(entries) and runs[0].finished == 1


def test_the_thread_outlives_failures(runs: list[FakeRun]) -> None:
    run = ServingRun(serving()[0], project="p")
    runs[0].failure = RuntimeError("offline")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        run.start(0.001)
        for _ in range(3):
            runs[0].logged.clear()
            assert runs[0].logged.wait(30)
        assert run.thread is not None and run.thread.is_alive()
        run.close()


@pytest.mark.parametrize("seconds", (0, -1, float("nan")))
def test_an_interval_must_be_one(runs: list[FakeRun], seconds: float) -> None:
    with pytest.raises(ValueError, match="give a number above 0"):
        ServingRun(serving()[0], project="p").start(seconds)


def test_without_wandb_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    for begin in (lambda: ServingRun(serving()[0], project="p"), lambda: training_sink(project="p")):
        with pytest.raises(ValueError, match=r"pip install 'dspark\[wandb\]'") as caught:
            begin()
        assert "\n" not in str(caught.value)


def test_a_run_that_does_not_begin_is_a_users_error(monkeypatch: pytest.MonkeyPatch, runs: list[FakeRun]) -> None:
    def init(**settings: Any) -> Any:
        raise RuntimeError("no API key configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    with pytest.raises(ValueError, match="no API key configured.*wandb login"):
        ServingRun(serving()[0], project="p")


def test_importing_the_sink_does_not_import_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "dspark.observe.wandb_sink"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import dspark.observe.wandb_sink

    assert dspark.observe.wandb_sink.INTERVAL and "wandb" not in sys.modules


# -- training


def test_training_rows_become_scalars_histograms_and_a_summary(runs: list[FakeRun]) -> None:
    sink = training_sink(project="p", config={"target": "m"})
    sink({"prompts": 40, "left_out": {"long": 2}, "rows": [1]})
    sink(STEP_ROW)
    sink(VALIDATION_ROW)
    sink.close()
    run = runs[0]
    assert run.settings["job_type"] == "train" and run.settings["config"] == {"target": "m"} and run.finished == 1
    assert run.summary == {"prompts": 40, "left_out": {"long": 2}}
    (step, at), (validation, also_at) = run.entries
    assert at == also_at == 7
    assert step == {f"train/{name}": value for name, value in STEP_ROW.items() if name not in ("step", "num_steps")}
    assert scalars(validation) == {
        "validation/accepted_length": 2.5,
        "validation/by_task/gsm8k": 3.0,
        "validation/by_task/a_b_c": 2.0,
        "validation/conditional/0": 0.75,
        "validation/conditional/1": 0.5,
        "validation/conditional/2": 0.25,
        "validation/num_blocks": 60,
        "validation/blocks": 1680,
        "validation/tokens": 6300,
        "validation/seconds": 12.5,
    }
    assert bars(validation) == {"validation/conditional/by_position": [0.75, 0.5, 0.25]}


def test_training_goes_on_when_wandb_fails(runs: list[FakeRun]) -> None:
    sink = training_sink(project="p")
    runs[0].failure = ConnectionError("gone")
    with pytest.warns(UserWarning, match="gone") as told:
        for _ in range(5):
            sink(STEP_ROW)
        sink.close()
    assert len(told) == 1 and runs[0].num_tries == 5


def test_a_trainer_can_call_it(runs: list[FakeRun]) -> None:
    sink = training_sink(project="p")
    assert isinstance(sink, TrainingSink) and callable(sink)
    many = VALIDATION_ROW | {"validation": {"by_task": {f"task{i}": 1.0 for i in range(500)}}}
    sink(many)
    [(entry, _)] = runs[0].entries
    assert len([name for name in entry if name.startswith("validation/by_task/")]) == MAX_LABELS


# -- the real one, without a network


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    pytest.importorskip("wandb")
    for name, value in (
        ("WANDB_MODE", "offline"),
        ("WANDB_DIR", tmp_path),
        ("WANDB_CACHE_DIR", tmp_path / "cache"),
        ("WANDB_CONFIG_DIR", tmp_path / "config"),
        ("WANDB_DATA_DIR", tmp_path / "data"),
        ("WANDB_SILENT", "true"),
        ("WANDB_CONSOLE", "off"),
        ("WANDB_DISABLE_GIT", "true"),
        ("WANDB_ERROR_REPORTING", "false"),
    ):
        monkeypatch.setenv(name, str(value))
    return tmp_path


def test_wandb_takes_the_entries(offline: Path) -> None:
    import wandb

    metrics, _ = serving(num_running=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Weights & Biases")
        run = ServingRun(metrics, project="dspark-test", config={"model": "m"})
        feed(metrics, [row_step(sequence(0, prompt_class="#3"), drafted=3, accepted=2, end="stop")], plain=0.1)
        run.log()
        logged = dict(run.run.run.summary)
        run.close()
        sink = training_sink(project="dspark-test", directory=str(offline))
        for row in ({"prompts": 40}, STEP_ROW, VALIDATION_ROW, STEP_ROW | {"step": 8}):
            sink(row)  # wandb holds the rows of a step back until another comes
        trained = dict(sink.run.run.summary)
        sink.close()
    assert logged["acceptance/rate"] == pytest.approx(2 / 3) and logged["class/_3/mean_accepted_length"] == 3
    assert logged["lengths/verified"]["_type"] == "histogram" and sum(logged["lengths/verified"]["values"]) == 1
    assert trained["train/loss"] == 2.5 and trained["validation/by_task/gsm8k"] == 3.0 and trained["prompts"] == 40
    assert list(trained["validation/conditional/by_position"]["values"]) == [0.75, 0.5, 0.25]
    assert len(list(offline.glob("**/*.wandb"))) == 2 and wandb.run is None
