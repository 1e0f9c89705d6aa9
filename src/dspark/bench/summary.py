"""Figures: what a benchmark's measurements say, by task and variant; each formula is written beside its field.
It must never drop a prompt for one variant only: pairs stay pairs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.bench.harness import Measurement, Result
from dspark.bench.stats import (
    Interval,
    Pair,
    acceptance_by_position,
    bootstrap_mean_of_tasks,
    bootstrap_ratio,
    mean_of_tasks,
    median,
    medians_by,
    merged,
    ratio_of_medians,
)
from dspark.types import SpeculationRecord

ALL = "all prompts"
MEAN = "mean of tasks"

FORMULAS = (
    (
        "tokens/s",
        "decoding alone, (n - 1) / (time of the last token - time of the first) for an answer of n tokens, "
        "end-of-text respected; for each prompt the median over the repetitions, then the median over the prompts. "
        "A peer whose first step delivers m tokens: (n - m) / (time after that step)",
    ),
    (
        "speedup",
        "median tokens/s of the variant / median tokens/s of plain decoding in this run, over the prompts that both "
        f"have; '{MEAN}' is the arithmetic mean of the tasks' speedups",
    ),
    (
        "interval",
        "95% percentile bootstrap, 2000 resamples of paired prompts (inside each task for the mean of tasks)",
    ),
    ("accepted length", "tokens emitted / target passes that emitted tokens, the target's own token included"),
    ("acceptance", "drafts accepted / drafts verified"),
    (
        "acceptance by position",
        "accepted_at[j] / verified_at[j]: of the blocks whose draft j was verified, those that kept drafts 1..j",
    ),
    ("first token", "seconds from arrival to the first token, median over prompts of the median over repetitions"),
    (
        "ms/token by phase",
        "seconds of the phase / tokens emitted, over all answers; `run` holds the prompts' passes too",
    ),
    (
        "same text",
        "answers equal to plain decoding's / answers compared; a tie is a first difference within the near-tie bound "
        "(dspark.quality.oracle), a fault one beyond it",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One cell: a task (or ALL, or MEAN) and a participant. None where a figure does not exist."""

    task: str
    variant: str
    num_prompts: int
    num_tokens: int = 0
    tokens_per_second: float | None = None
    speedup: float | None = None
    interval: Interval | None = None
    first_seconds: float | None = None
    record: SpeculationRecord | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    verdicts: Mapping[str, int] = field(default_factory=dict)

    @property
    def accepted_length(self) -> float | None:
        return self.record.mean_accepted_length if self.record and self.record.num_steps else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        record = self.record.as_dict() if self.record else None
        return {
            "task": self.task,
            "variant": self.variant,
            "num_prompts": self.num_prompts,
            "num_tokens": self.num_tokens,
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.speedup,
            "interval": list(self.interval) if self.interval else None,
            "first_token_seconds": self.first_seconds,
            "speculation": record,
            "acceptance_by_position": acceptance_by_position(self.record) if self.record else None,
            "phase_seconds": dict(self.phases),
            "verdicts": dict(self.verdicts),
        }


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Cells by (task, variant). `tasks` are the rows of a table in order; the last ones are ALL and MEAN."""

    tasks: list[str]
    variants: list[str]
    cells: Mapping[tuple[str, str], Figures]


def summarise(result: Result) -> Summary:
    """All figures of a run."""
    of_task: dict[str, list[int]] = {}
    for row, prompt in enumerate(result.rows):
        if row not in result.refused:
            of_task.setdefault(prompt.task, []).append(row)
    cells: dict[tuple[str, str], Figures] = {}
    speeds = {name: _speeds(result, name) for name in result.names}
    everything = [row for rows in of_task.values() for row in rows]
    for name in result.names:
        for task, rows in [*of_task.items(), (ALL, everything)]:
            cells[task, name] = _figures(result, task=task, name=name, rows=rows, speeds=speeds)
    for name in result.names:
        cells[MEAN, name] = _mean_cell(name, of_task=of_task, speeds=speeds, baseline=result.baseline)
    return Summary(tasks=[*of_task, ALL, MEAN], variants=result.names, cells=cells)


def _speeds(result: Result, name: str) -> dict[int, float]:
    """Row -> tokens/s, the median over the repetitions."""
    mine = [m for m in result.measurements if m.variant == name]
    return medians_by(mine, key=lambda m: m.row, value=lambda m: m.answer.tokens_per_second)


def _pairs(rows: Sequence[int], base: Mapping[int, float], other: Mapping[int, float]) -> list[Pair]:
    return [(base[row], other[row]) for row in rows if row in base and row in other]


def _figures(
    result: Result, *, task: str, name: str, rows: Sequence[int], speeds: Mapping[str, Mapping[int, float]]
) -> Figures:
    chosen = set(rows)
    mine = [m for m in result.measurements if m.variant == name and m.row in chosen]
    pairs = _pairs(rows, speeds[result.baseline], speeds[name])
    paired = bool(pairs) and name != result.baseline
    records = [m.answer.record for m in mine if m.answer.record is not None]
    firsts = medians_by(mine, key=lambda m: m.row, value=lambda m: m.answer.first_seconds)
    return Figures(
        task=task,
        variant=name,
        num_prompts=len(rows),
        num_tokens=sum(len(m.answer.tokens) for m in mine),
        tokens_per_second=median([speeds[name][row] for row in rows if row in speeds[name]]),
        speedup=ratio_of_medians(pairs) if paired else None,
        interval=bootstrap_ratio(pairs) if paired else None,
        first_seconds=median(list(firsts.values())),
        record=merged(records) if records else None,
        phases=_summed([m.answer.phases for m in mine]),
        verdicts=_verdicts(result, name=name, rows=chosen),
    )


def _verdicts(result: Result, *, name: str, rows: set[int]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for difference in result.differences:
        if difference.variant == name and difference.row in rows:
            verdict = difference.finding.verdict
            counts[verdict] = counts.get(verdict, 0) + 1
    return counts


def _summed(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for seconds in phases:
        for phase, value in seconds.items():
            total[phase] = total.get(phase, 0.0) + value
    return total


def _mean_cell(
    name: str, *, of_task: Mapping[str, Sequence[int]], speeds: Mapping[str, Mapping[int, float]], baseline: str
) -> Figures:
    pairs = {task: _pairs(rows, speeds[baseline], speeds[name]) for task, rows in of_task.items()}
    pairs = {task: of_one for task, of_one in pairs.items() if of_one}
    medians = [statistics.median(speed for _, speed in of_one) for of_one in pairs.values()]
    paired = bool(pairs) and name != baseline
    return Figures(
        task=MEAN,
        variant=name,
        num_prompts=sum(len(of_one) for of_one in pairs.values()),
        tokens_per_second=statistics.fmean(medians) if medians else None,
        speedup=mean_of_tasks(pairs) if paired else None,
        interval=bootstrap_mean_of_tasks(pairs) if paired else None,
    )


def measurement_row(result: Result, measurement: Measurement) -> dict[str, Any]:
    """One answer for JSON, without its tokens."""
    answer, row = measurement.answer, result.rows[measurement.row]
    return {
        "task": row.task,
        "id": row.id,
        "variant": measurement.variant,
        "repetition": measurement.repetition,
        "num_tokens": len(answer.tokens),
        "num_first": answer.num_first,
        "first_token_seconds": answer.first_seconds,
        "decode_seconds": answer.decode_seconds,
        "tokens_per_second": answer.tokens_per_second,
        "finish_reason": answer.finish_reason,
        "phase_seconds": dict(answer.phases),
        "speculation": answer.record.as_dict() if answer.record else None,
    }
