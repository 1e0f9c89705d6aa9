"""Companion: drafts for the requests of a loop that is not ours, by our lookups, length policy and budget.
It must never propose anything that was drawn: a host that knows no draft's law takes each for certain.

The host tells what it emitted (`commit`), asks for drafts (`propose`), tells how long steps take (`time`) and when a
request ends (`end`). Text is the host's own: nothing here decides about it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dspark.config import LOOKUP_METHODS, SpeculationConfig
from dspark.draft.base import DraftRow, registry
from dspark.engine.scheduler import Work
from dspark.engine.speculator import RowPlan, Speculator
from dspark.observe.profile import ProfileLog
from dspark.params import SamplingParams
from dspark.plan.history import History
from dspark.plan.learned import LearnedCost
from dspark.plan.length import PolicyInputs, build_policies
from dspark.types import TARGET_PHASES, Draft, Request, RowStep, Verdict
from dspark.types import Sequence as Answer

LOG_AFTER = 32
"""Steps after which their price is known well enough to begin a profile with it."""


@dataclass(kw_only=True)
class _Row:
    """A running request: its answer, its plan, what was drafted for its coming step and what of it the host got."""

    answer: Answer
    plan: RowPlan
    draft: Draft = field(default_factory=Draft)
    kept: Draft = field(default_factory=Draft)
    packed: int = 0


@dataclass(kw_only=True)
class Companion:
    """Speculation beside a host's loop.

    `max_context`: tokens of the longest sequence. `max_tokens`: packed tokens of a step, beyond which no draft is kept.
    `profile`: a file to which what was drafted is written as `dspark profile` does, from the LOG_AFTER-th timed step
    on, with `info` of what runs. Memory is that of the running requests, of the finished answers that the settings
    allow, and of what is learned by names, at most plan/recent.MAX_NAMES.
    """

    settings: SpeculationConfig
    max_context: int
    max_tokens: int
    profile: str | Path | None = None
    info: dict[str, Any] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter
    cost: LearnedCost = field(default_factory=LearnedCost)
    rows: dict[int, _Row] = field(default_factory=dict)
    num_begun: int = 0
    log: ProfileLog | None = None

    def __post_init__(self) -> None:
        if self.settings.method not in LOOKUP_METHODS:
            raise ValueError(
                f"method={self.settings.method!r} draws its drafts or needs the host's layers: inside another engine "
                f"choose one of {', '.join(LOOKUP_METHODS)}"
            )
        self.speculator = build_speculator(self.settings, self.cost)
        self.works: list[Work] = []
        self.draft_seconds = 0.0

    # -- what the host tells

    def begin(self, prompt: Sequence[int], *, request_id: str = "", params: SamplingParams | None = None) -> int:
        """A request comes in with these tokens (not empty); returns the number it goes by here."""
        number, self.num_begun = self.num_begun, self.num_begun + 1
        tokens, params = list(prompt), params or SamplingParams(max_tokens=None, temperature=0.0)
        request = Request(id=request_id or str(number), prompt_token_ids=[], params=params)
        answer = Answer(id=number, request=request, index=0, tokens=tokens, num_prompt=len(tokens))
        plan = self.speculator.begin(answer, drafts=params.control.enabled)
        self.rows[number] = _Row(answer=answer, plan=plan)
        return number

    def commit(self, number: int, tokens: Sequence[int], *, num_verified: int | None = None) -> None:
        """What the host emitted for the request in the step that was last proposed for (at least one token), and how
        many drafts it looked at (None: all that it was given)."""
        row = self.rows[number]
        answer, now = row.answer, self.clock()
        draft, kept, row.draft, row.kept = row.draft, row.kept, Draft(), Draft()
        if num_verified is not None:
            kept = kept.prefix(num_verified)
        num_accepted = min(len(tokens) - 1, len(kept.tokens))
        if list(tokens[:num_accepted]) != kept.tokens[:num_accepted]:  # other drafts than ours: nothing to learn
            kept, num_accepted = Draft(), 0
        answer.tokens.extend(tokens)
        answer.num_cached = len(answer.tokens) - 1
        answer.first_token_time = answer.first_token_time or now
        answer.finish_time = now
        drafted, verified = len(draft.tokens), len(kept.tokens)
        answer.record.add(drafted=drafted, verified=verified, accepted=num_accepted, emitted=len(tokens))
        verdict = Verdict(num_verified=verified, num_accepted=num_accepted, tokens=list(tokens))
        self.speculator.learn(number, row.plan, draft, kept, verdict)
        if self.log is not None:
            self.log(self._step(row, draft, verdict))

    def time(self, seconds: float, *, packed: int | None = None) -> None:
        """How long the step took that was last proposed for, drafting left out. Leave it untold where prompts were in
        it, or the host waited for work. `packed`: tokens that it had, where the host knows."""
        if packed is not None:
            self.speculator.shape = replace(self.speculator.shape, rows=packed)
        phases = dict.fromkeys(TARGET_PHASES, 0.0) | {"run": seconds, "draft": self.draft_seconds}
        if seconds > 0 and self.works:
            self.speculator.time(self.works, [], seconds=phases)
        if self.profile is not None and self.log is None and self.cost.num_steps >= LOG_AFTER:
            costs: dict[str, Any] = {
                "target": self.cost.points,
                "draft": None,
                "block_sources": {},
                "token_sources": [],
            }
            self.log = ProfileLog(self.profile, header={"info": self.info, "costs": costs})

    def end(self, number: int, reason: str = "ended") -> None:
        """The request is over, or will not be gone on with; unknown numbers are fine."""
        row = self.rows.pop(number, None)
        if row is None:
            return
        row.answer.finish_reason = reason
        self.speculator.drafter.forget(number)
        self.speculator.forget(number, row.plan)
        self.works = [work for work in self.works if work.seq.id != number]
        if self.log is not None:
            self.log.aborted(row.answer)

    def close(self) -> None:
        """Forget all requests and end the profile."""
        for number in list(self.rows):
            self.end(number)
        if self.log is not None:
            self.log.close()
            self.log = None

    # -- what the host asks for

    def propose(self, numbers: Sequence[int], *, rooms: Sequence[int] | None = None) -> list[list[int]]:
        """Drafts for the coming step of these requests, each of its own length. `rooms`: tokens that each answer may
        still get (None: up to the context's end)."""
        began = self.clock()
        rows = [self.rows[number] for number in numbers]
        self.works = [
            Work(seq=row.answer, num_tokens=1, samples=True, max_drafts=self._room(row, rooms[i] if rooms else None))
            for i, row in enumerate(rows)
        ]
        if not rows:
            return []
        plans = [row.plan for row in rows]
        self.speculator.limit(self.works, plans)
        drafts = self._draft(rows)
        room = max(0, self.max_tokens - len(rows))
        kept = self.speculator.keep(self.works, plans, drafts, max_tokens=room)
        packed = len(rows) + sum(len(draft.tokens) for draft in kept)
        for row, draft, keep in zip(rows, drafts, kept):
            row.draft, row.kept, row.packed = draft, keep, packed
        self.draft_seconds = self.clock() - began
        return [list(draft.tokens) for draft in kept]

    # -- inside

    def _room(self, row: _Row, room: int | None) -> int:
        """Drafts that could be emitted: one place is left for the host's own token."""
        control = row.answer.params.control
        left = self.max_context - len(row.answer.tokens)
        longest = self.speculator.max_tokens if control.max_tokens is None else control.max_tokens
        left = left if room is None else min(left, room)
        return max(0, min(left - 1, longest, self.speculator.max_tokens)) if control.enabled else 0

    def _draft(self, rows: Sequence[_Row]) -> list[Draft]:
        drafts, drafter = [Draft() for _ in rows], self.speculator.drafter
        seen = [_draft_row(row) for row in rows]
        drafter.observe(seen, [None] * len(rows))
        chosen = [i for i, work in enumerate(self.works) if work.max_drafts > 0]
        limits = [self.works[i].max_drafts for i in chosen]
        for i, draft in zip(chosen, drafter.propose([seen[i] for i in chosen], limits)):
            drafts[i] = draft
        return drafts

    def _step(self, row: _Row, draft: Draft, verdict: Verdict) -> RowStep:
        plan, emitted = row.plan, len(verdict.tokens)
        return RowStep(
            seq=row.answer,
            policy=plan.name,
            allowed=plan.allowed,
            position=row.answer.num_output - emitted,
            text_kind=plan.text_kind,
            source=draft.source,
            limit=plan.limit.max_tokens,
            tokens=list(draft.tokens),
            claims=list(draft.survival),
            survival=list(plan.survival),
            verified=verdict.num_verified,
            accepted=verdict.num_accepted,
            emitted=emitted,
            packed=row.packed or 1,
        )


def _draft_row(row: _Row) -> DraftRow:
    answer = row.answer
    return DraftRow(
        seq_id=answer.id,
        tokens=answer.tokens,
        num_prompt=answer.num_prompt,
        params=answer.params,
        num_cached=answer.num_cached,
        thrifty=row.plan.limit.thrifty,
    )


def build_speculator(settings: SpeculationConfig, cost: LearnedCost) -> Speculator:
    """With every policy, over a cost that is still to be learned."""
    drafter = registry()[settings.method](**settings.drafter_settings())
    history = History() if settings.history is None else History.load(settings.history)
    speculator = Speculator(
        drafter=drafter,
        policies={},
        policy=settings.policy,
        max_tokens=settings.num_speculative_tokens,
        cost=cost,
        history=history,
    )
    inputs = PolicyInputs(
        max_tokens=settings.num_speculative_tokens,
        threshold=settings.confidence_threshold,
        foresee=lambda seq_id, k: history.acceptance.foresee(seq_id, drafter.name, k),
        cost=cost,
        asking=lambda: speculator.asking,
    )
    speculator.policies.update(build_policies(inputs))
    return speculator
