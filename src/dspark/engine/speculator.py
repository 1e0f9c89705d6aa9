"""Speculator: who drafts, how long, what of it is verified, and what is learned from the verdicts.
It must never let a draft's own token, or anything that depends on it, decide whether it is verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from dspark.draft.base import Drafter
from dspark.engine.heads import HeadCosts
from dspark.engine.scheduler import Work
from dspark.engine.sketch import sketch
from dspark.plan.budget import beside_prompts, choose
from dspark.plan.cost import PacedTable, Shape, StepCosts
from dspark.plan.history import History
from dspark.plan.length import NO_DRAFTS, Features, LengthPolicy, Limit
from dspark.types import TARGET_PHASES, Draft, Sequence, Verdict

ASKING_SHARE = 3.0
"""What being asked costs a row, limit and learning included, against the time of the lookup alone."""
ASKING_RATE = 0.02
LONGEST_ASKING = 1e-3
READ_EVERY = 4
"""Tokens after which the kind of text is looked at again: each look costs as much as the rest of a limit."""


@dataclass(kw_only=True)
class RowPlan:
    """What is planned for one sequence: its policy, the kind of text it is at, found when it had `read_at` tokens, and
    of this step whether drafts are `allowed` at all, the `weight` of a token (plan/pace), the limit, how a draft is
    judged while it grows, and the survival that it was judged to have (`past`: in the step before)."""

    name: str
    policy: LengthPolicy
    limit: Limit = NO_DRAFTS
    allowed: bool = False
    weight: float = 1.0
    judge: Callable[[int, float], float] = lambda j, chance: chance
    text_kind: str = ""
    read_at: int = -READ_EVERY
    survival: Seq[float] = ()
    past: Seq[float] = ()


@dataclass(frozen=True, kw_only=True)
class _Others:
    """What a step holds beside the drafts for choice: packed `rows`, so many of them a prompt's, the weighted `tokens`
    expected of them, `seconds` beside the pass, and the drafts that fit."""

    rows: int
    tokens: float
    num_prompt_tokens: int
    max_tokens: int
    seconds: float


@dataclass(kw_only=True)
class Speculator:
    """What speculation needs, in one place.

    `policies` by name, `policy` the one of requests that name none. `max_tokens`: the largest draft of any row and
    step. `cost`: of a step's target phases by its shape; None where no policy leaves lengths to the budget.
    `draft_cost`: of a draft pass by rows, for a drafter that needs one a token; `block_costs`: for drafts whose source
    is one of `block_sources` (with its kind, plan/gains), which need one a draft. All costs follow the clock.
    `text_kind`: what the last of a row's tokens look like (engine/text_kinds). `asking`: seconds that it costs a row to
    be asked for a draft that needs no network.
    """

    drafter: Drafter
    policies: dict[str, LengthPolicy]
    policy: str
    max_tokens: int = 0
    cost: StepCosts | None = None
    draft_cost: PacedTable | None = None
    block_costs: HeadCosts | None = None
    block_sources: Mapping[str, str] = field(default_factory=dict)
    history: History = field(default_factory=History)
    text_kind: Callable[[Seq[int]], str] = lambda tokens: ""
    shape: Shape = Shape(rows=0)
    asking: float = 0.0

    def begin(self, seq: Sequence, *, drafts: bool) -> RowPlan:
        """A sequence comes in; `drafts`: whether it may ever draft, so that its class is worth finding."""
        if drafts:
            prompt = sketch(seq.tokens[: seq.num_prompt])
            task = seq.params.control.task
            if task is None and seq.params.structure is not None:
                task = seq.params.structure.name  # answers of one schema are alike, whatever is asked
            seq.prompt_class = self.history.begin(seq.id, task=task, sketch=prompt)
        name = seq.params.control.policy or self.policy
        return RowPlan(name=name, policy=self.policies[name])

    def forget(self, seq_id: int, plan: RowPlan) -> None:
        """The sequence has ended."""
        plan.policy.forget(seq_id)
        self.history.forget(seq_id)

    def limit(self, works: Seq[Work], plans: Seq[RowPlan]) -> None:
        """Before drafting: lower each work's `max_drafts` to what its policy allows."""
        if self.cost is not None:
            self.cost.begin(_shape(works))
        num_rows = sum(work.max_drafts > 0 for work in works)
        asked: dict[int, tuple[RowPlan, list[tuple[Work, RowPlan, Features]]]] = {}
        for work, plan in zip(works, plans):
            plan.limit, plan.past, plan.survival = NO_DRAFTS, plan.survival, ()
            plan.allowed, plan.weight = work.max_drafts > 0, work.weight
            if work.max_drafts > 0:
                self._read(work.seq, plan)
                step = work.seq.record.num_steps
                features = Features(
                    seq_id=work.seq.id, num_rows=num_rows, step=step, room=work.max_drafts, weight=work.weight
                )
                asked.setdefault(id(plan.policy), (plan, []))[1].append((work, plan, features))
        for first, rows in asked.values():
            first.policy.begin([features for _, _, features in rows])
            for work, plan, features in rows:
                plan.limit = plan.policy.limit(features)
                if plan.limit.floor > 0:
                    plan.judge = self.history.acceptance.judge(work.seq.id, self.drafter.name)
                work.max_drafts = min(work.max_drafts, plan.limit.max_tokens)
        if self.block_costs is not None:
            self.block_costs.others = sum(work.samples and not work.max_drafts for work in works)

    def _read(self, seq: Sequence, plan: RowPlan) -> None:
        if len(seq.tokens) - plan.read_at >= READ_EVERY:
            plan.text_kind, plan.read_at = self.text_kind(seq.tokens), len(seq.tokens)
            self.history.read(seq.id, plan.text_kind)

    def keep(self, works: Seq[Work], plans: Seq[RowPlan], drafts: Seq[Draft], *, max_tokens: int) -> list[Draft]:
        """The prefix of each draft to verify: by the row's own policy, or by the budget of all rows that leave it.
        `max_tokens`: drafts over all of these together."""
        kept, open_rows = list(drafts), []
        other_rows, other_tokens, num_prompt_tokens = 0, 0.0, 0
        for i, (work, plan, draft) in enumerate(zip(works, plans, drafts)):
            length: int | None = 0
            num_prompt_tokens += work.num_tokens - work.samples
            if draft.tokens:
                plan.survival = self.history.acceptance.survival(work.seq.id, draft.source, draft.survival)
                length = plan.policy.keep(plan.survival)
            if length is None:
                open_rows.append(i)
                other_rows += work.num_tokens - 1
            else:
                kept[i] = draft.prefix(length)
                other_rows += work.num_tokens + length
                other_tokens += work.weight * (work.samples + sum(plan.survival[:length]))
        if open_rows:
            spent = self._planned_draft_seconds(works, drafts)
            others = _Others(
                rows=other_rows,
                tokens=other_tokens,
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=max_tokens,
                seconds=spent,
            )
            lengths = self._budget([plans[i] for i in open_rows], [drafts[i] for i in open_rows], others)
            for i, length in zip(open_rows, lengths):
                kept[i] = drafts[i].prefix(max(length, plans[i].limit.least))
        if self.cost is not None:
            self.shape = _shape(works, kept)
        return kept

    def _budget(self, plans: Seq[RowPlan], drafts: Seq[Draft], others: _Others) -> list[int]:
        """Lengths for the rows that leave them open. Sampled drafts are stopped early, within a capacity that a search
        over the survivals of the step before found: one over their own would anticipate (plan/budget)."""
        assert self.cost is not None, "a policy leaves lengths to the budget, and no cost was measured"
        num_rows = len(drafts) + others.rows - others.num_prompt_tokens
        cost = beside_prompts(self.cost, num_rows, others.num_prompt_tokens)
        search_all, capacity = all(draft.q is None for draft in drafts), 0

        def seconds(packed: int) -> float:
            return others.seconds + cost(packed)

        weights = [plan.weight for plan in plans]
        beside: dict[str, Any] = {"other_rows": others.rows, "other_tokens": others.tokens, "weights": weights}
        if not search_all:
            past = [plan.past for plan in plans]
            capacity = sum(choose(past, seconds, others.max_tokens, search_all=True, **beside))
        survivals = [plan.survival for plan in plans]
        return choose(survivals, seconds, others.max_tokens, search_all=search_all, capacity=capacity, **beside)

    def learn(self, seq_id: int, plan: RowPlan, draft: Draft, kept: Draft, verdict: Verdict) -> None:
        """After the verdict, for a row that was asked for drafts."""
        if plan.limit is NO_DRAFTS:
            return
        counts = {"num_verified": len(kept.tokens), "num_accepted": verdict.num_accepted}
        plan.policy.update(seq_id, **counts)
        block = self.block_sources.get(draft.source)
        self.history.learn(seq_id, draft.source, draft.survival, block=block, **counts)

    def predicted(self) -> float | None:
        """Seconds of the target's phases of the step that was planned last; None where nothing is measured."""
        return None if self.cost is None else self.cost.predict(self.shape)

    def plain_seconds(self, works: Seq[Work], *, num_emitted: int) -> float | None:
        """What plain decoding would have needed for the tokens of this step: a pass like it without drafts, and more of
        the rows that decode for what they emitted beyond one token each. None where nothing is measured."""
        if self.cost is None:
            return None
        seconds = self.cost.predict(_shape(works))
        decoding = [work for work in works if work.num_tokens == 1 and work.samples]
        extra = num_emitted - sum(work.samples for work in works)
        if extra > 0 and decoding:
            seconds += extra / len(decoding) * self.cost.predict(_shape(decoding))
        return seconds

    def time(self, works: Seq[Work], drafts: Seq[Draft], *, seconds: Mapping[str, float]) -> None:
        """What the step that was planned last took, by phase. One with prompt chunks says nothing of the others."""
        if self.cost is None or any(work.num_tokens != 1 for work in works):
            return
        self.cost.observe(self.shape, sum(seconds[name] for name in TARGET_PHASES))
        lengths = [len(draft.tokens) for draft in drafts if draft.tokens]
        # A row's first draft has the draft model read the prompt, which is no price of drafting on.
        begun = all(work.seq.record.num_steps > 2 for work, draft in zip(works, drafts) if draft.tokens)
        if self.draft_cost is not None and lengths and begun:
            self.draft_cost.observe(len(lengths), seconds["draft"], passes=max(lengths))
        greedy, sampled = self._num_blocks(drafts)
        if self.block_costs is not None and greedy + sampled:
            self.block_costs.observe_head(greedy, sampled, seconds["draft"])
        elif self.draft_cost is None and (asked := sum(work.max_drafts > 0 for work in works)):
            each = ASKING_SHARE * min(seconds["draft"] / asked, LONGEST_ASKING)
            self.asking += ASKING_RATE * (each - self.asking)

    def _planned_draft_seconds(self, works: Seq[Work], drafts: Seq[Draft]) -> float:
        """Draft time as foreseen *before* drafting. The time really spent depends on how far each row drafted, and so
        on the drawn tokens: to plan with it would anticipate."""
        if self.block_costs is not None:  # who drafts a row was chosen before anything was drawn
            return self.block_costs.head(*self._num_blocks(drafts))
        limits = [work.max_drafts for work in works if work.max_drafts]
        if self.draft_cost is None or not limits:
            return 0.0
        cost = self.draft_cost
        return sum(cost.seconds(sum(limit > depth for limit in limits)) for depth in range(max(limits)))

    def _num_blocks(self, drafts: Seq[Draft]) -> tuple[int, int]:
        """Rows with a block, greedy and sampled."""
        blocks = [draft for draft in drafts if draft.tokens and draft.source in self.block_sources]
        sampled = sum(draft.q is not None for draft in blocks)
        return len(blocks) - sampled, sampled


def _shape(works: Seq[Work], kept: Seq[Draft] = ()) -> Shape:
    """Of the pass over these works, with these drafts or without any."""
    rows = context = seq_context = seqs = sampled = 0
    for i, work in enumerate(works):
        num_tokens = work.num_tokens + (len(kept[i].tokens) if kept else 0)
        rows += num_tokens
        context += num_tokens * work.seq.num_cached
        seq_context += work.seq.num_cached
        seqs += work.samples
        if work.samples and work.seq.params.temperature > 0:
            sampled += num_tokens - work.num_tokens + 1
    return Shape(rows=rows, context=context, seq_context=seq_context, seqs=seqs, sampled=sampled)
