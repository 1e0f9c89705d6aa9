"""What a draft should bring, by the planner's costs and seen acceptance: alone, and with many requests at a time.
It must never look at a clock itself: what it says can then be held against what the clock said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.plan.cost import Costs, Shape, StepCost
from dspark.plan.simulate import Kind, Machine, compare
from dspark.types import SpeculationRecord

LEAST_SEEN = 5
"""Drafts that reached a place, from which its acceptance is taken."""
NUM_REQUESTS = 64
"""Simulated at each load, or four times the load where that is more."""


@dataclass(kw_only=True)
class Drafted:
    """What one drafter of a candidate drafted: `drafts` that were not empty, and their `tokens`."""

    drafts: int = 0
    tokens: int = 0


@dataclass(kw_only=True)
class Seen:
    """What a candidate showed in the race. `by_task`: acceptance by task, `sources`: by who drafted, `context`: cached
    tokens behind a row, `num_prompt`, `num_output`: of a request, all as means."""

    by_task: dict[str, SpeculationRecord] = field(default_factory=dict)
    sources: dict[str, Drafted] = field(default_factory=dict)
    context: float = 0.0
    num_prompt: float = 1.0
    num_output: float = 1.0

    def record(self) -> SpeculationRecord:
        """Of all tasks."""
        total = SpeculationRecord()
        for record in self.by_task.values():
            total.merge(record)
        return total


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Costs as an engine's planner holds them: measured when it started, corrected by each step since (plan/cost).
    `overhead`: seconds of a step beside the target's phases, as plain decoding showed them. `by_token`: of a draft
    pass, one a token; `by_block`: of one a draft, of the drafters in `block_sources`."""

    target: StepCost
    overhead: float = 0.0
    by_token: Costs | None = None
    by_block: Costs | None = None
    block_sources: Mapping[str, str] = field(default_factory=dict)

    def step(self, rows: float, *, seqs: float = 1, context: float = 0.0) -> float:
        """Seconds of a step of so many packed rows, each with so many cached tokens behind it."""
        shape = Shape(
            rows=rows,  # type: ignore[arg-type]
            context=rows * context,  # type: ignore[arg-type]
            seq_context=seqs * context,  # type: ignore[arg-type]
            seqs=seqs,  # type: ignore[arg-type]
        )
        return self.target.predict(shape) + self.overhead

    def drafting(self, sources: Mapping[str, Drafted]) -> float:
        """Seconds for what was drafted, one stream."""
        total = 0.0
        for source, drafted in sources.items():
            if self.by_block is not None and source in self.block_sources:
                total += drafted.drafts * self.by_block.seconds(1)
            elif self.by_token is not None:
                total += drafted.tokens * self.by_token.seconds(1)
        return total


class AtLoad:
    """Prices as the simulator asks for them: by packed rows, with a mean context and so many sequences at most."""

    def __init__(self, prices: Prices, *, context: float, seqs: int) -> None:
        self.prices = prices
        self.context = context
        self.seqs = seqs

    def seconds(self, rows: float) -> float:
        """Of a step."""
        return self.prices.step(rows, seqs=min(rows, self.seqs), context=self.context)


def alone(seen: Seen, prices: Prices) -> float:
    """Speedup of one stream: the same tokens one a step, over the steps that were taken with the drafts that were
    checked in them, and the drafting. Steps with j checked drafts = verified_at[j-1] - verified_at[j]."""
    record = seen.record()
    reached = [record.num_steps, *record.verified_at, 0]
    steps = sum(
        (here - beyond) * prices.step(1 + j, context=seen.context)
        for j, (here, beyond) in enumerate(zip(reached, reached[1:]))
    )
    plain = record.num_emitted * prices.step(1, context=seen.context)
    spent = steps + prices.drafting(seen.sources)
    return plain / spent if spent > 0 else 1.0


def under_load(seen: Seen, prices: Prices, loads: Sequence[int], *, max_drafts: int) -> dict[int, float]:
    """Speedup of so many clients at a time, prompts included, by the simulator with these costs and this acceptance. It
    knows acceptance by task and place, and not what a drafter knows of each draft: what that brings one stream
    (`alone` over the simulated) is taken to bring the same under load."""
    kinds = [
        Kind(
            name=task,
            acceptance=conditional(record)[:max_drafts],
            share=max(record.num_emitted, 1),
            num_prompt=max(1, round(seen.num_prompt)),
            num_output=max(1, round(seen.num_output)),
        )
        for task, record in seen.by_task.items()
        if record.num_steps
    ]
    if not kinds or not any(kind.acceptance for kind in kinds):
        return dict.fromkeys(loads, 1.0)

    def simulated(load: int, of: Sequence[Kind]) -> float:
        machine = Machine(
            target=AtLoad(prices, context=seen.context, seqs=load),  # type: ignore[arg-type]
            draft=prices.by_block or prices.by_token,
            by_token=prices.by_block is None and prices.by_token is not None,
            max_seqs=load,
            max_tokens=512,
            max_drafts=max_drafts,
        )
        count = max(NUM_REQUESTS, 4 * load)
        reports = compare(machine, of, ("plain", "adaptive"), count, concurrency=load)
        return reports["adaptive"].throughput / reports["plain"].throughput

    decoding = [
        Kind(name=k.name, acceptance=k.acceptance, share=k.share, num_prompt=1, num_output=k.num_output) for k in kinds
    ]
    known = alone(seen, prices) / simulated(1, decoding)
    return {load: 1 + (simulated(load, kinds) - 1) * (known if load > 1 else 1.0) for load in loads}


def conditional(record: SpeculationRecord) -> list[float]:
    """Chance that draft j holds where those before it held: the share of drafts looked at there that held up to there,
    over the same share one place before. Places that few drafts reached are left out."""
    found, before = [], 1.0
    for held, verified in zip(record.accepted_at, record.verified_at):
        if verified < LEAST_SEEN or before <= 0:
            break
        rate = held / verified
        found.append(min(1.0, rate / before))
        before = min(before, rate)
    return found


def best_length(seen: Seen, prices: Prices, *, longest: int) -> int:
    """The one draft length that pays best for one stream, for engines that have but one: tokens expected of a step over
    its seconds, where each draft holds as often as was seen at its place."""
    chances = conditional(seen.record())
    best, length, survival, tokens = 0.0, 0, 1.0, 1.0
    for k in range(min(longest, len(chances)) + 1):
        if k:
            survival *= chances[k - 1]
            tokens += survival
        drafting = prices.by_block.seconds(1) if prices.by_block is not None and k else 0.0
        if prices.by_token is not None and prices.by_block is None:
            drafting = k * prices.by_token.seconds(1)
        rate = tokens / (prices.step(1 + k, context=seen.context) + drafting)
        if rate > best:
            best, length = rate, k
    return length


def prices_of(speculator: Any, *, overhead: float) -> Prices:
    """Of an engine's planner."""
    blocks = speculator.block_costs
    return Prices(
        target=speculator.cost,
        overhead=overhead,
        by_token=speculator.draft_cost,
        by_block=None if blocks is None else blocks.greedy,
        block_sources=dict(speculator.block_sources),
    )
