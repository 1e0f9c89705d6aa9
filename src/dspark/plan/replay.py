"""Replay: what recorded answers would have cost under another policy, without a model.
It must never show a policy how a draft ends before it has decided.

An answer's record holds drafts at positions of its text, with their claims and how many of their tokens the text
confirms: that many would have been accepted. A record under the policy "shadow" has a draft at every position; under
another the positions inside an accepted run have none of their own, and the rest of the draft that covered them stands
in, which is somewhat less than a fresh draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dspark.plan import values as read
from dspark.plan.budget import choose
from dspark.plan.cost import CostTable
from dspark.plan.gains import KINDS
from dspark.plan.history import History
from dspark.plan.length import PROBE_EVERY, PROBE_SHARE, Features, LengthPolicy, PolicyInputs, build_policies

LONGEST_ANSWER = 10**6
"""Tokens of an answer that a profile may tell of: a replay makes a list as long."""
SHORTEST = 1e-12
"""Seconds of a pass."""


@dataclass(frozen=True, kw_only=True)
class Chance:
    """A draft at one position: who made it, its survival claims, how many of its tokens hold, and the kind of text it
    goes on from."""

    source: str
    claims: Sequence[float]
    holds: int
    text_kind: str = ""

    def later(self, skip: int) -> Chance:
        """What is left of it `skip` accepted tokens later."""
        before = self.claims[skip - 1] if skip else 1.0
        claims = [claim / before if before > 0 else 0.0 for claim in self.claims[skip:]]
        return replace(self, claims=claims, holds=self.holds - skip)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A recorded answer of `num_tokens` tokens, with drafts by position; its first token comes out of the prompt's own
    pass. `task` is the caller's word, `prompt_class` what acceptance was learned by. `seconds`, `verified` and
    `accepted`: of the answer as it was recorded."""

    id: str
    num_tokens: int
    drafts: Mapping[int, Chance]
    prompt_class: str = ""
    task: str = ""
    seconds: float | None = None
    verified: int = 0
    accepted: int = 0

    def by_position(self) -> list[Chance | None]:
        """A draft for each position; None where the record does not say."""
        found: list[Chance | None] = [None] * self.num_tokens
        for position in sorted(self.drafts):
            chance = self.drafts[position]
            found[position] = chance
            for skip in range(1, min(chance.holds, self.num_tokens - position - 1) + 1):
                if position + skip not in self.drafts:
                    found[position + skip] = chance.later(skip)
        return found


@dataclass(kw_only=True)
class Outcome:
    """Of replayed answers: seconds by the cost tables, those of plain decoding, and counts."""

    seconds: float = 0.0
    plain_seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0

    def add(self, other: Outcome) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def speedup(self) -> float:
        """Plain seconds over seconds; 1 for nothing at all."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a step costs: a target pass by rows, a draft pass by rows; drafts of `block_sources` (with their kind,
    plan/gains) need one pass each, those of `token_sources` one a token, all others are free."""

    target: CostTable
    draft: CostTable | None = None
    block_sources: Mapping[str, str] = field(default_factory=dict)
    token_sources: tuple[str, ...] = ()

    def draft_seconds(self, source: str, num_tokens: int) -> float:
        """Of one row's draft."""
        if self.draft is None or not num_tokens:
            return 0.0
        passes = 1 if source in self.block_sources else num_tokens if source in self.token_sources else 0
        return passes * self.draft.seconds(1)


@dataclass(kw_only=True)
class Replay:
    """Answers one after another under one policy, with what it learns on the way."""

    costs: Costs
    policy: LengthPolicy
    history: History = field(default_factory=History)
    idle: dict[int, int] = field(default_factory=dict)
    num_answers: int = 0

    def run(self, answer: Answer) -> Outcome:
        """The answer once more, step by step."""
        seq_id, self.num_answers = self.num_answers, self.num_answers + 1
        self.history.begin(seq_id, task=answer.task or answer.prompt_class)
        table, outcome, position = answer.by_position(), Outcome(), 1
        plain = self.costs.target.seconds(1)
        while position < answer.num_tokens:
            room = answer.num_tokens - position - 1
            seconds, drafted, verified, accepted = self._step(seq_id, table[position], room, outcome.steps)
            outcome.add(
                Outcome(
                    seconds=seconds,
                    plain_seconds=(1 + accepted) * plain,
                    tokens=1 + accepted,
                    steps=1,
                    drafted=drafted,
                    verified=verified,
                    accepted=accepted,
                )
            )
            position += 1 + accepted
        self.policy.forget(seq_id)
        self.history.forget(seq_id)
        self.idle.pop(seq_id, None)
        return outcome

    def _step(self, seq_id: int, chance: Chance | None, room: int, step: int) -> tuple[float, int, int, int]:
        """(seconds, drafted, verified, accepted) of one step with room for so many drafts."""
        target = self.costs.target
        if room <= 0:
            return target.seconds(1), 0, 0, 0
        if chance is not None:
            self.history.read(seq_id, chance.text_kind)
        features = Features(seq_id=seq_id, num_rows=1, step=step, room=room)
        self.policy.begin([features])
        limit = self.policy.limit(features)
        size = min(room, limit.max_tokens)
        if chance is None or not size or (limit.thrifty and not self._block_pays(seq_id, chance)):
            self.policy.update(seq_id, num_verified=0, num_accepted=0)
            self.history.learn(seq_id, "", (), num_verified=0, num_accepted=0)
            return target.seconds(1), 0, 0, 0
        survival = self.history.acceptance.survival(seq_id, chance.source, chance.claims[:size])
        claims = self._drawn(chance, survival, limit.floor)
        survival = survival[: len(claims)]
        spent = self.costs.draft_seconds(chance.source, size)
        keep = self.policy.keep(survival)
        if keep is None:
            (keep,) = choose([survival], lambda rows: spent + target.seconds(rows), len(survival), search_all=True)
            keep = max(keep, min(limit.least, len(survival)))
        accepted = min(keep, chance.holds)
        counts = {"num_verified": keep, "num_accepted": accepted}
        self.policy.update(seq_id, **counts)
        block = self.costs.block_sources.get(chance.source)
        self.history.learn(seq_id, chance.source, claims, block=block, **counts)
        drafting = self.costs.draft_seconds(chance.source, len(claims))
        return drafting + target.seconds(1 + keep), len(claims), keep, accepted

    def _drawn(self, chance: Chance, survival: Sequence[float], floor: float) -> Sequence[float]:
        """What a drafter that pays for each token makes before it stops: one token after falling below the floor."""
        claims = chance.claims[: len(survival)]
        if chance.source in self.costs.token_sources:
            stop = next((j for j, alive in enumerate(survival) if alive < floor), len(claims))
            claims = claims[: stop + 1]
        return claims

    def _block_pays(self, seq_id: int, chance: Chance) -> bool:
        """As draft/portfolio asks a head, with no lookup beside it."""
        if (kind := self.costs.block_sources.get(chance.source)) is None:
            return True
        accepted, verified = self.history.expected(seq_id, kind)
        head, plain = self.costs.draft_seconds(chance.source, 1), self.costs.target.seconds(1)
        idle = self.idle.get(seq_id, 0) + 1
        pays = (1 + accepted) / (self.costs.target.seconds(1 + verified) + head) > 1 / plain
        asked = pays or (idle >= PROBE_EVERY and idle * plain * PROBE_SHARE >= head)
        self.idle[seq_id] = 0 if asked else idle
        return asked


def replay(
    answers: Sequence[Answer], under: Replay, *, by: Callable[[Answer], str] = lambda answer: answer.task
) -> dict[str, Outcome]:
    """All answers in their order; outcomes by group, and of all under ""."""
    found = {"": Outcome()}
    for answer in answers:
        outcome = under.run(answer)
        found[""].add(outcome)
        if by(answer):
            found.setdefault(by(answer), Outcome()).add(outcome)
    return found


def best_possible(answers: Sequence[Answer], costs: Costs) -> Outcome:
    """Of a planner who knows how every recorded draft ends: at each position the length, none included, that makes the
    whole answer quickest. No policy can do better with these drafts; `drafted` counts only what is verified."""
    total = Outcome()
    for answer in answers:
        total.add(_best_answer(answer, costs))
    return total


def _best_answer(answer: Answer, costs: Costs) -> Outcome:
    """Backwards from the end: the least seconds from each position on."""
    table, plain, last = answer.by_position(), costs.target.seconds(1), answer.num_tokens
    best = [Outcome() for _ in range(last + 1)]
    for position in range(last - 1, 0, -1):
        chance, options = table[position], [(plain + best[position + 1].seconds, 0)]
        if chance is not None:
            # A draft that fails is never worth verifying beyond what holds: lengths up to that are all there is.
            for k in range(1, min(chance.holds, len(chance.claims), last - position - 1) + 1):
                spent = costs.draft_seconds(chance.source, k) + costs.target.seconds(1 + k)
                options.append((spent + best[position + 1 + k].seconds, k))
        seconds, k = min(options)
        after = best[position + 1 + k]
        best[position] = Outcome(
            seconds=seconds,
            plain_seconds=after.plain_seconds + (1 + k) * plain,
            tokens=after.tokens + 1 + k,
            steps=after.steps + 1,
            drafted=after.drafted + k,
            verified=after.verified + k,
            accepted=after.accepted + k,
        )
    return best[1] if last > 1 else Outcome()


def policy_replay(name: str, costs: Costs, *, max_tokens: int, threshold: float = 0.4) -> Replay:
    """A replay under a policy by name, with a history of its own."""
    history = History()
    source = costs.token_sources[0] if costs.token_sources else ""
    policies = build_policies(
        PolicyInputs(
            max_tokens=max_tokens,
            threshold=threshold,
            foresee=lambda seq_id, k: history.acceptance.foresee(seq_id, source, k),
            cost=costs.target,
            draft_cost=costs.draft if costs.token_sources else None,
        )
    )
    return Replay(costs=costs, policy=policies[name], history=history)


def costs_from_dict(values: Mapping[str, Any]) -> Costs:
    """As a profile's first line has them: points are [rows, seconds]. Raises ValueError for anything else."""
    try:
        sources = read.table(values, "block_sources")
        if unknown := sorted({read.word(sources, name) for name in sources} - set(KINDS)):
            raise ValueError(f"block_sources has the kinds {unknown}: known are {list(KINDS)}")
        return Costs(
            target=_cost_table(values, "target"),
            draft=None if read.member(values, "draft") is None else _cost_table(values, "draft"),
            block_sources=dict(sources),
            token_sources=tuple(read.words(values, "token_sources")),
        )
    except ValueError as error:
        raise ValueError(f"the profile holds no costs: {error}") from None


def _cost_table(values: Mapping[str, Any], key: str) -> CostTable:
    points = [read.as_numbers(key, point, count=2, least=SHORTEST) for point in read.sequence(values, key)]
    if any(rows != int(rows) for rows, _ in points):
        raise ValueError(f"{key} has a part of a row")
    return CostTable([(int(rows), seconds) for rows, seconds in points])


def answer_from_dict(values: Mapping[str, Any]) -> Answer:
    """A line of a profile. Raises ValueError for a line of another kind."""
    try:
        num_tokens, steps = read.whole(values, "num_tokens", most=LONGEST_ANSWER), read.sequence(values, "steps")
        places = [read.whole(step, "at", most=num_tokens - 1) for step in steps]
        chances = [_chance(step) for step in steps]
        return Answer(
            id=read.word(values, "id"),
            num_tokens=num_tokens,
            drafts={at: chance for at, chance in zip(places, chances) if chance.claims},
            prompt_class=read.word(values, "prompt_class"),
            task=read.word(values, "task"),
            seconds=None if values.get("seconds") is None else read.number(values, "seconds", least=0.0),
            verified=sum(read.whole(step, "verified") for step in steps if "verified" in step),
            accepted=sum(read.whole(step, "accepted") for step in steps if "accepted" in step),
        )
    except ValueError as error:
        raise ValueError(f"not an answer of a profile: {error}") from None


def _chance(step: Mapping[str, Any]) -> Chance:
    claims = read.numbers(step, "claims", least=0.0, most=1.0)
    return Chance(
        source=read.word(step, "source"),
        claims=claims,
        holds=read.whole(step, "holds", most=len(claims)),
        text_kind=read.word(step, "text_kind"),
    )
