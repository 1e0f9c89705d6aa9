"""Weights & Biases: what an engine does over each interval, and the rows of a training run, as runs of a project.
It must never stop an engine or a training run: what W&B refuses is told once, and the work goes on without it.

wandb is imported when a run begins, and needed by nobody else.
"""

from __future__ import annotations

import importlib
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from dspark.observe.metrics import MAX_LABELS, OTHER, Acceptance, Counts, EngineMetrics

INTERVAL = 10.0
"""Seconds between two entries of a serving run."""
PATIENCE = 30.0
"""Seconds that `close` waits for an entry that is being sent."""
MAX_BINS = 512
"""Of wandb.Histogram."""


class ServingRun:
    """A W&B run of an engine that serves. `log` writes one entry: speeds of now, and counts, shares and histograms of
    the time since the entry before."""

    def __init__(
        self,
        metrics: EngineMetrics,
        *,
        project: str,
        config: Mapping[str, Any] | None = None,
        name: str | None = None,
        mode: str | None = None,
        directory: str | None = None,
    ) -> None:
        """`mode`: "online", "offline" or "disabled"; None is what WANDB_MODE says. `directory`: where wandb keeps its
        files. Raises ValueError where wandb is not installed or cannot begin a run."""
        self.metrics = metrics
        self.run = _Run(project=project, config=config, name=name, mode=mode, dir=directory, job_type="serve")
        self.before = _Reading.of(metrics)
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None

    def log(self) -> None:
        """One entry."""
        with self.lock:
            before, self.before = self.before, _Reading.of(self.metrics)
            self.run.attempt(lambda run: run.log(self._entry(self.before.since(before))))

    def start(self, interval_seconds: float = INTERVAL) -> None:
        """Write an entry every `interval_seconds`, on a thread of its own, until `close`."""
        if not interval_seconds > 0:
            raise ValueError(f"interval_seconds={interval_seconds} is not usable: give a number above 0")
        assert self.thread is None, "start is called once"
        self.thread = threading.Thread(target=self._work, args=(interval_seconds,), name="dspark-wandb", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """A last entry, and the end of the run. May be called twice."""
        if self.stopped.is_set():
            return
        self.stopped.set()
        if self.thread is not None:
            self.thread.join(PATIENCE)
            if self.thread.is_alive():
                self.run.tell(f"an entry was not sent within {PATIENCE:g} seconds: the run is left without its end")
                return
        self.log()
        self.run.attempt(lambda run: run.finish())

    def _work(self, interval_seconds: float) -> None:
        while not self.stopped.wait(interval_seconds):
            self.log()

    def _entry(self, passed: _Reading) -> dict[str, Any]:
        speed, now, counts = self.metrics.speed(), self.metrics.gauges(), passed.counts
        entry: dict[str, Any] = {
            "speed/tokens_per_second": speed.tokens_per_second,
            "speed/plain_tokens_per_second": speed.plain_tokens_per_second,
            "speed/speedup": speed.speedup,
            "requests/running": now.num_running,
            "requests/waiting": now.num_waiting,
            "requests/ended": sum(counts.finished.values()),
            "cache/usage": now.cache_usage,
            "cache/prefix_hit_rate": _share(counts.prefix_hits, counts.prefix_queries),
            "tokens/prompt": counts.num_prompt_tokens,
            "tokens/generated": counts.num_generation_tokens,
            "tokens/drafted": counts.num_drafted,
            "tokens/verified": counts.num_verified,
            "tokens/accepted": counts.num_accepted,
            "savings/seconds": counts.plain_seconds - counts.decode_seconds,
            "speculation/silent": int(self.metrics.silent),
        }
        entry |= _shares("acceptance", passed.total()) | self._histograms(passed)
        for name, acceptance in passed.by_class.items():
            entry |= _shares(f"class/{name}", acceptance)
        return {name: value for name, value in entry.items() if value is not None}

    def _histograms(self, passed: _Reading) -> dict[str, Any]:
        """Of steps of rows by drafts verified and accepted, the last bin all that were longer; and, as high as the
        share of the drafts looked at in a place that held there, of the places of a draft."""
        entry: dict[str, Any] = {}
        if any(passed.verified_lengths):
            entry["lengths/verified"] = self.run.histogram(passed.verified_lengths)
            entry["lengths/accepted"] = self.run.histogram(passed.accepted_lengths)
        counts = passed.counts
        held = [_share(a, v) or 0.0 for a, v in zip(counts.accepted_at, counts.verified_at)]
        return entry | (_positions(self.run, "acceptance/at", held) if any(counts.verified_at) else {})


class TrainingSink:
    """A W&B run of a training run: give it to TrainingRun as `sink`, beside what else hears the rows.

    Numbers become scalars over the trainer's step: `train/...` of each step, `validation/...` of each validation,
    tables (by task) one scalar a name, MAX_LABELS at most, lists (by position) a histogram whose bars are the values,
    and one scalar a place. A row of no step, such as the number of prompts, goes to the run's summary.
    """

    def __init__(self, run: _Run) -> None:
        self.run = run

    def __call__(self, row: Mapping[str, Any]) -> None:
        self.run.attempt(lambda run: self._write(run, row))

    def close(self) -> None:
        """The end of the run."""
        self.run.attempt(lambda run: run.finish())

    def _write(self, run: Any, row: Mapping[str, Any]) -> None:
        if "step" not in row:
            run.summary.update({name: value for name, value in row.items() if not isinstance(value, list)})
            return
        found = row.get("validation")
        rest = {name: value for name, value in row.items() if name not in ("validation", "step", "num_steps")}
        entry = self._flat("train" if found is None else "validation", rest | (found or {}))
        run.log(entry, step=row["step"])

    def _flat(self, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
        entry: dict[str, Any] = {}
        for name, value in list(values.items())[:MAX_LABELS]:
            key = f"{prefix}/{_safe(str(name))}"
            if isinstance(value, Mapping):
                entry |= self._flat(key, value)
            elif isinstance(value, (list, tuple)):
                entry |= _positions(self.run, key, value)
            elif isinstance(value, (int, float)):
                entry[key] = value
        return entry


def training_sink(
    *,
    project: str,
    config: Mapping[str, Any] | None = None,
    name: str | None = None,
    mode: str | None = None,
    directory: str | None = None,
) -> TrainingSink:
    """A sink for training rows; `config` is shown beside the run (the recipe, say). Arguments and errors are
    ServingRun's."""
    return TrainingSink(_Run(project=project, config=config, name=name, mode=mode, dir=directory, job_type="train"))


class _Run:
    """A run of wandb's, whose failures are told once and stop nobody."""

    def __init__(self, *, project: str, config: Mapping[str, Any] | None, **settings: Any) -> None:
        try:
            self.wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise ValueError(f"Weights & Biases is not usable ({error}): pip install 'dspark[wandb]'") from None
        self.told = False
        try:
            self.run = self.wandb.init(project=project, config=dict(config or {}), **settings)
        except Exception as error:  # wandb has errors of many kinds; to the caller they are one: no run
            cure = "log in with `wandb login`, or choose mode 'offline'"
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"Weights & Biases did not begin a run ({what}): {cure}") from None

    def attempt(self, work: Callable[[Any], Any]) -> None:
        """Do `work` with the run; the first failure is a warning."""
        try:
            work(self.run)
        except Exception as error:  # a report that is lost must not cost an answer or a training step
            what = f"{type(error).__name__}: {error}"
            self.tell(f"an entry was lost ({what}); the work goes on, later losses are not told")

    def tell(self, text: str) -> None:
        """Warn, once."""
        if not self.told:
            self.told = True
            warnings.warn(f"Weights & Biases: {text}", stacklevel=3)

    def histogram(self, heights: Sequence[float]) -> Any:
        """Bars over 0, 1, 2, ..., each a bin from half below to half above."""
        heights = list(heights)[:MAX_BINS]
        return self.wandb.Histogram(np_histogram=(heights, [place - 0.5 for place in range(len(heights) + 1)]))


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """What was counted up to a moment, or between two of them. `by_class` under names that W&B can show."""

    counts: Counts
    by_class: dict[str, Acceptance]
    verified_lengths: list[int]
    accepted_lengths: list[int]

    @classmethod
    def of(cls, metrics: EngineMetrics) -> _Reading:
        """Now."""
        with metrics.lock:
            by_class: dict[str, Acceptance] = {}
            for name, found in metrics.by_class.items():
                by_class[_safe(name)] = _sum(by_class.get(_safe(name), Acceptance()), found)
            return cls(
                counts=deepcopy(metrics.counts),
                by_class=by_class,
                verified_lengths=list(metrics.histograms["spec_decode_verified_length"].counts),
                accepted_lengths=list(metrics.histograms["spec_decode_accepted_length"].counts),
            )

    def since(self, before: _Reading) -> _Reading:
        """What came after `before`; classes that had no step are left out."""
        by_class = {
            name: _sum(found, before.by_class.get(name, Acceptance()), sign=-1) for name, found in self.by_class.items()
        }
        counts = {name: _minus(value, getattr(before.counts, name)) for name, value in vars(self.counts).items()}
        return _Reading(
            counts=Counts(**counts),
            by_class={name: found for name, found in by_class.items() if found.steps},
            verified_lengths=_minus(self.verified_lengths, before.verified_lengths),
            accepted_lengths=_minus(self.accepted_lengths, before.accepted_lengths),
        )

    def total(self) -> Acceptance:
        """Of all classes."""
        total = Acceptance()
        for found in self.by_class.values():
            total = _sum(total, found)
        return total


def _sum(one: Acceptance, other: Acceptance, *, sign: int = 1) -> Acceptance:
    return replace(one, **{name: value + sign * getattr(other, name) for name, value in vars(one).items()})


def _minus(value: Any, before: Any) -> Any:
    """Number by number; what `before` did not have yet was 0."""
    if isinstance(value, list):
        return [now - then for now, then in zip(value, [*before, *[0] * (len(value) - len(before))])]
    if isinstance(value, dict):
        return {name: number - before.get(name, 0) for name, number in value.items()}
    return value - before


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _shares(prefix: str, found: Acceptance) -> dict[str, float | None]:
    return {
        f"{prefix}/rate": _share(found.accepted, found.verified),
        f"{prefix}/mean_accepted_length": _share(found.emitted, found.steps),
    }


def _positions(run: _Run, name: str, values: Sequence[float]) -> dict[str, Any]:
    """A histogram whose bars are the values by place, and the values."""
    scalars = {f"{name}/{place}": value for place, value in enumerate(values[:MAX_LABELS])}
    return {f"{name}/by_position": run.histogram(values), **scalars} if values else {}


def _safe(name: str) -> str:
    """A name without what W&B's keys cannot hold; two that become the same are counted together."""
    return re.sub(r"\W", "_", name) or OTHER
