"""run_bench: the same prompts through several ways of decoding, in one process, prompt by prompt in turns.
It must never let a variant profit from its place in the order, from an earlier repetition, or from another cache."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dspark.bench.data import PromptRow, encode_rows
from dspark.bench.variants import Variant, reference_of
from dspark.params import SamplingParams
from dspark.types import RequestOutput, SpeculationRecord

WARM_UP = "Repeat this list three times, word for word: red, green, blue, red, green, blue, red, green, blue. " * 4
WARM_UP_TOKENS = 16
FIRST_SEED = 1000
Judge = Callable[[Sequence[int], Sequence[int], Sequence[int], bool], Any]
"""judge(prompt, plain, other, exact) -> a finding with `verdict` ("identical", "tie", "fault"), `text` and figures."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one participant made of one prompt.

    `decode_seconds` from the moment when the first `num_first` tokens were there (1 with dspark) to the end;
    `first_seconds` from the start to that moment. `phases` in seconds, for this answer alone. `error`: refused.
    """

    tokens: list[int]
    first_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_first: int = 1
    finish_reason: str | None = None
    record: SpeculationRecord | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding alone: (n - num_first) / decode_seconds; None for an answer without a second token or block."""
        num_decoded = len(self.tokens) - self.num_first
        return num_decoded / self.decode_seconds if num_decoded > 0 and self.decode_seconds > 0 else None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """An answer with its place in the run: index of the row, name of the participant, repetition from 0."""

    row: int
    variant: str
    repetition: int
    answer: Answer


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The comparison of one answer with the reference's in the same repetition."""

    row: int
    variant: str
    reference: str
    repetition: int
    finding: Any


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """How to measure. `temperature` 0 is greedy; above it each prompt has a fixed seed, so answers stay comparable."""

    max_tokens: int = 128
    temperature: float = 0.0
    repeat: int = 3

    def __post_init__(self) -> None:
        for name in ("max_tokens", "repeat"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} is not usable: give at least 1")

    def params(self, row: int) -> SamplingParams:
        seed = FIRST_SEED + row if self.temperature > 0 else None
        return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, seed=seed)


@dataclass(kw_only=True)
class Result:
    """Everything measured; dspark.bench.summary makes figures of it. `names[0]` is the baseline of every speedup."""

    rows: list[PromptRow]
    names: list[str]
    num_variants: int
    settings: BenchSettings
    measurements: list[Measurement] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        return self.names[0]

    @property
    def peer_names(self) -> list[str]:
        return self.names[self.num_variants :]


class Peer(Protocol):
    """Another engine on the same prompts (dspark.bench.peers)."""

    name: str

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Answer: ...


class EngineParticipant:
    """One variant with an engine of its own: caches, drafter and policy are fresh, the target's weights shared."""

    def __init__(self, llm: Any, variant: Variant) -> None:
        overrides = {"prefix_reuse": False, "max_num_seqs": 1} | dict(variant.engine)
        self.name = variant.name
        self.llm = llm.variant(speculation=variant.speculation, **overrides)

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Answer:
        """With the seconds by phase of this answer alone."""
        self.llm.reset_stats()
        (output,) = self.llm.generate([list(prompt)], [params])
        return _answer(output, phases=dict(self.llm.stats.seconds))


def _answer(output: RequestOutput, *, phases: Mapping[str, float]) -> Answer:
    if output.error is not None:
        return Answer(tokens=[], error=output.error)
    completion, times = output.outputs[0], output.timings
    return Answer(
        tokens=list(completion.token_ids),
        first_seconds=times["first_token"] - times["arrival"],
        decode_seconds=times["finished"] - times["first_token"],
        finish_reason=completion.finish_reason,
        record=completion.speculation,
        phases=phases,
    )


def run_bench(
    llm: Any,
    variants: Sequence[Variant],
    rows: Sequence[PromptRow],
    *,
    settings: BenchSettings,
    peers: Sequence[Peer] = (),
    judge: Judge | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Result:
    """Measure `variants` (the first of them the baseline, plain decoding) and `peers` over `rows`.

    `llm` is the plain LLM whose weights all variants share. One stream: prompt by prompt, every participant in turn,
    the order moved on by one with each prompt and each repetition, so that a drift of the machine hits all alike
    (many streams: bench/load). Each repetition starts with new engines: nothing
    learned from an answer, by a suffix store or a length policy, meets the same prompt again. Prefix reuse is off.
    """
    if not rows:
        raise ValueError("no prompts to measure: the selection is empty; relax --tasks or --per-task")
    assert variants and variants[0].plain and not variants[0].engine, "the first variant is the baseline"
    result = Result(
        rows=list(rows),
        names=[variant.name for variant in variants] + [peer.name for peer in peers],
        num_variants=len(variants),
        settings=settings,
    )
    prompts = encode_rows(rows, llm.tokenizer)
    for repetition in range(settings.repeat):
        engines = [EngineParticipant(llm, variant) for variant in variants]
        _warm_up([*engines, *peers], prompt=llm.tokenizer.encode(WARM_UP), settings=settings)
        _one_stream(result, [*engines, *peers], prompts, repetition=repetition, progress=progress)
        result.configs = {engine.name: engine.llm.info() for engine in engines}
        del engines
        gc.collect()  # engines hold caches of gigabytes, in cycles; free them before the next are made
    if len(result.refused) == len(rows):
        raise ValueError(f"every prompt was refused, the first with: {next(iter(result.refused.values()))}")
    if judge is not None and settings.temperature == 0:
        _compare(result, variants, prompts, judge=judge)
    return result


def _warm_up(participants: Sequence[Peer], *, prompt: Sequence[int], settings: BenchSettings) -> None:
    params = SamplingParams(temperature=settings.temperature, max_tokens=WARM_UP_TOKENS, seed=0)
    for participant in participants:
        participant.answer(prompt, params)


def _one_stream(
    result: Result,
    participants: Sequence[Peer],
    prompts: Sequence[Sequence[int]],
    *,
    repetition: int,
    progress: Callable[[str], None],
) -> None:
    for row, prompt in enumerate(prompts):
        shift = (row + repetition) % len(participants)
        params = result.settings.params(row)
        for participant in [*participants[shift:], *participants[:shift]]:
            _keep(result, participant.answer(prompt, params), row=row, variant=participant.name, repetition=repetition)
        label = f"{result.rows[row].task}/{result.rows[row].id}"
        progress(f"repetition {repetition + 1}/{result.settings.repeat}, prompt {row + 1}/{len(prompts)} ({label})")


def _keep(result: Result, answer: Answer, *, row: int, variant: str, repetition: int) -> None:
    if answer.error is not None:
        result.refused.setdefault(row, f"{variant}: {answer.error}")
    else:
        result.measurements.append(Measurement(row=row, variant=variant, repetition=repetition, answer=answer))


def _compare(result: Result, variants: Sequence[Variant], prompts: Sequence[Sequence[int]], *, judge: Judge) -> None:
    """Every answer against its reference of the same repetition; plain ones against their own first repetition."""
    references = {variant.name: reference_of(variant, variants).name for variant in variants}
    exact = {variant.name: bool(variant.engine.get("exact")) for variant in variants}
    answers = {(m.row, m.variant, m.repetition): m.answer for m in result.measurements}
    known: dict[tuple, Any] = {}
    for (row, name, repetition), answer in answers.items():
        reference = references.get(name, result.baseline)
        against = answers.get((row, reference, 0 if reference == name else repetition))
        if against is None or (reference == name and repetition == 0):
            continue
        key = (row, tuple(against.tokens), tuple(answer.tokens), exact.get(name, False))
        if key not in known:
            known[key] = judge(prompts[row], against.tokens, answer.tokens, key[-1])
        result.differences.append(
            Difference(row=row, variant=name, reference=reference, repetition=repetition, finding=known[key])
        )
