"""Simulation: the planner over a cost table and synthetic acceptance, for loads that no machine at hand can run.
It must never let a plan see how a draft ends, or give the planner anything that the engine would not give it.

What is simulated: arrivals, waiting, chunked prompts and speculative rows under one budget of tokens, drafting,
verification by chance, and time by the table. What decides is what decides in the engine: plan/admit, plan/budget,
plan/joint and plan/acceptance. Every request belongs to a kind, whose word the planner is told as a request's task.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dspark.plan.acceptance import AcceptanceModel
from dspark.plan.admit import LOOK_AHEAD, Admission, Applicant
from dspark.plan.budget import beside_prompts, choose
from dspark.plan.cost import Costs
from dspark.plan.joint import draft_lengths
from dspark.plan.pace import Pace

SOURCE = "simulated"
LEARN_EVERY = 4
"""Of verdicts of a kind, that the planner learns from: what takes the engine microseconds a row must not take the
simulation minutes."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Requests of one sort. `acceptance[j]`: chance that draft j holds where those before it held (`from_rates` reads
    survival instead). `share`: of all requests. `floor`, `priority`: what they ask for (plan/pace)."""

    name: str
    acceptance: Sequence[float]
    share: float = 1.0
    num_prompt: int = 256
    num_output: int = 256
    floor: float | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if not all(0 <= chance <= 1 for chance in self.acceptance):
            raise ValueError(f"kind {self.name!r}: acceptance {list(self.acceptance)} is not of chances, 0 to 1")
        if self.share <= 0 or self.num_prompt < 1 or self.num_output < 1:
            raise ValueError(f"kind {self.name!r}: share, num_prompt and num_output must be above 0")

    @classmethod
    def from_rates(cls, name: str, rates: Sequence[float], **fields: float) -> Kind:
        """From survival by position, as in vLLM's `synthetic_acceptance_rates`: each at most the one before."""
        if any(after > before for before, after in zip([1.0, *rates], rates)):
            raise ValueError(f"kind {name!r}: rates {list(rates)} must fall: each is the chance that all so far hold")
        before = [1.0, *rates]
        return cls(name=name, acceptance=[r / b if b else 0.0 for b, r in zip(before, rates)], **fields)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`target`: seconds of a pass by packed rows. `draft`: of a draft pass by rows, one a token if `by_token`, else one
    a block; None: drafts are free. `objective`: as in plan/pace. `group`: whether a drafter with a pass a token has
    requests of like acceptance run together (plan/admit)."""

    target: Costs
    draft: Costs | None = None
    by_token: bool = False
    max_seqs: int = 256
    max_tokens: int = 2048
    max_drafts: int = 8
    objective: str = "throughput"
    group: bool = True


@dataclass(kw_only=True)
class Report:
    """Sums over a simulation. Seconds are simulated. `expected`: tokens that the plans promised for their steps.
    `held`: for each whole second of a request with a floor, from its first token on, whether it was kept.
    `longest_wait`: seconds from coming to the first token."""

    seconds: float = 0.0
    num_requests: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_verified: int = 0
    num_rows: int = 0
    expected: float = 0.0
    emitted: int = 0
    longest_step: float = 0.0
    longest_wait: float = 0.0
    held: list[bool] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def verified_per_request(self) -> float:
        return self.num_verified / self.num_requests if self.num_requests else 0.0


@dataclass(kw_only=True)
class _Row:
    id: int
    kind: Kind
    came: float
    prompt_left: int
    left: int
    first: float | None = None
    seconds: dict[int, int] = field(default_factory=dict)


class Simulation:
    """One run. `policy`: "plain", "adaptive", or "fixed@k"."""

    def __init__(self, machine: Machine, kinds: Sequence[Kind], *, policy: str = "adaptive", seed: int = 0) -> None:
        name, _, count = policy.partition("@")
        if name not in ("plain", "adaptive", "fixed") or (name == "fixed") != count.isdigit():
            raise ValueError(f"policy {policy!r} cannot be simulated: choose plain, adaptive or fixed@k")
        self.machine = machine
        self.kinds = list(kinds)
        self.policy = name
        self.length = min(int(count or 0), machine.max_drafts)
        self.rng = random.Random(seed)
        self.acceptance = AcceptanceModel()
        self.numbers = {kind.name: number for number, kind in enumerate(self.kinds)}
        for kind, number in self.numbers.items():
            self.acceptance.begin(number, kind)
        self.num_verdicts = dict.fromkeys(self.numbers, 0)
        plans = self.policy == "adaptive"
        by_token = plans and machine.group and machine.draft is not None and machine.by_token
        self.admission = Admission(
            pace=Pace(objective=machine.objective),
            cost=machine.target if plans else None,
            expected=self._expected if by_token else None,
        )
        self.kind_of: dict[int, str] = {}
        self.now = 0.0

    def run(self, num_requests: int, *, rate: float | None = None, concurrency: int | None = None) -> Report:
        """`rate`: requests a second, Poisson; else `concurrency` clients, each asking again when answered."""
        if (rate is None) == (concurrency is None):
            raise ValueError("give a rate (open loop) or a concurrency (closed loop), one of the two")
        report = Report(num_requests=num_requests)
        arrivals = deque(self._arrivals(num_requests, rate))
        waiting: list[_Row] = []
        running: list[_Row] = []
        self.now = 0.0
        while arrivals or waiting or running:
            if not running and not waiting and rate is not None:
                self.now = max(self.now, arrivals[0].came)
            room = num_requests if concurrency is None else concurrency - len(running) - len(waiting)
            while arrivals and room > 0 and arrivals[0].came <= self.now:
                row = arrivals.popleft()
                row.came = self.now if rate is None else row.came
                self._come(row)
                waiting.append(row)
                room -= 1
            while waiting and len(running) < self.machine.max_seqs:
                running.append(self._next(waiting, running))
            self._step(running, report)
            for row in running:
                if row.left <= 0:
                    self._end(row, report)
            running = [row for row in running if row.left > 0]
        report.seconds = self.now
        return report

    def _expected(self, seq_id: int) -> float:
        number = self.numbers[self.kind_of[seq_id]]
        return sum(self.acceptance.foresee(number, SOURCE, self.machine.max_drafts))

    def _come(self, row: _Row) -> None:
        self.kind_of[row.id] = row.kind.name
        self.admission.begin(row.id, floor=row.kind.floor, priority=row.kind.priority)

    def _next(self, waiting: list[_Row], running: Sequence[_Row]) -> _Row:
        applicants = [
            Applicant(seq_id=row.id, priority=row.kind.priority, num_tokens=row.prompt_left)
            for row in waiting[:LOOK_AHEAD]
        ]
        index = self.admission.next_waiting(applicants, [row.id for row in running]) if len(waiting) > 1 else 0
        self.admission.pass_over([row.id for row in waiting[:index]])
        return waiting.pop(index)

    def _end(self, row: _Row, report: Report) -> None:
        self.admission.forget(row.id)
        del self.kind_of[row.id]
        if row.kind.floor is not None and row.first is not None:
            report.held += [row.seconds.get(i, 0) >= row.kind.floor for i in range(int(self.now - row.first))]

    def _arrivals(self, count: int, rate: float | None) -> Iterator[_Row]:
        now, shares = 0.0, [kind.share for kind in self.kinds]
        for number in range(count):
            now += self.rng.expovariate(rate) if rate is not None else 0.0
            kind = self.rng.choices(self.kinds, shares)[0]
            yield _Row(id=number, kind=kind, came=now, prompt_left=kind.num_prompt, left=kind.num_output)

    def _step(self, running: Sequence[_Row], report: Report) -> None:
        """Decoding rows first, then prompt chunks with what is left of the budget."""
        machine, admission = self.machine, self.admission
        ids = [row.id for row in running if row.prompt_left == 0]
        weights = admission.pace.weights(ids, self.now)
        resting = admission.resting(ids, weights)
        decoding = [row for row in running if row.prompt_left == 0 and row.id not in resting]
        if weights is not None:
            worth = dict(zip(ids, weights))
            weights = [worth[row.id] for row in decoding]
        budget = machine.max_tokens - len(decoding)
        prompts = admission.prompt_tokens([row.id for row in decoding], most=max(0, budget), now=self.now)
        chunks, finishing = 0, []
        for row in running:
            if row.prompt_left and prompts > 0:
                count = min(row.prompt_left, prompts)
                row.prompt_left -= count
                chunks += count
                prompts -= count
                if row.prompt_left == 0:
                    finishing.append(row)
        survivals, drafting = self._draft(decoding, weights)
        lengths = self._keep(survivals, drafting, chunks, max(0, budget - chunks), weights)
        admission.time(drafting)
        seconds = drafting + machine.target.seconds(len(decoding) + chunks + sum(lengths))
        report.expected += len(decoding) + sum(sum(row[:k]) for row, k in zip(survivals, lengths))
        self.now += seconds
        for row, survival, length in zip(decoding, survivals, lengths):
            emitted = self._verify(row, survival, length)
            report.emitted += emitted
            report.num_verified += length
            self._emit(row, emitted, report, packed=1 + length)
        for row in finishing:
            report.longest_wait = max(report.longest_wait, self.now - row.came)
            row.first = self.now
            self._emit(row, 1, report, packed=1)
        report.num_rows += len(decoding)
        report.num_steps += 1
        report.longest_step = max(report.longest_step, seconds)

    def _draft(self, rows: Sequence[_Row], weights: Sequence[float] | None) -> tuple[list[list[float]], float]:
        """(survival by row as the planner sees it, seconds of drafting)."""
        machine = self.machine
        if self.policy == "plain" or not rows:
            return [[] for _ in rows], 0.0
        by_kind = {
            name: self.acceptance.foresee(number, SOURCE, machine.max_drafts) for name, number in self.numbers.items()
        }
        foreseen = [by_kind[row.kind.name][: max(0, row.left - 1)] for row in rows]
        if self.policy == "fixed":
            foreseen = [row[: self.length] for row in foreseen]
        if machine.draft is None:
            return foreseen, 0.0
        if not machine.by_token:
            return self._blocks(foreseen, machine.draft)
        lengths = [len(row) for row in foreseen]
        if self.policy == "adaptive":
            lengths = draft_lengths(foreseen, machine.target, machine.draft, weights=weights).lengths
        depths = range(max(lengths, default=0))
        seconds = sum(machine.draft.seconds(sum(length > depth for length in lengths)) for depth in depths)
        return [row[:k] for row, k in zip(foreseen, lengths)], seconds

    def _blocks(self, foreseen: list[list[float]], draft: Costs) -> tuple[list[list[float]], float]:
        """A block pass over all rows, where the best that may come of it pays for it."""
        seconds = draft.seconds(len(foreseen))
        if self.policy == "adaptive":
            target, num_rows = self.machine.target, len(foreseen)
            lengths = choose(foreseen, lambda n: seconds + target.seconds(n), self.machine.max_tokens, search_all=True)
            expected = num_rows + sum(sum(row[:k]) for row, k in zip(foreseen, lengths))
            if expected / (seconds + target.seconds(num_rows + sum(lengths))) <= num_rows / target.seconds(num_rows):
                return [[] for _ in foreseen], 0.0
        return foreseen, seconds

    def _keep(
        self,
        survivals: Sequence[Sequence[float]],
        drafting: float,
        chunks: int,
        room: int,
        weights: Sequence[float] | None,
    ) -> list[int]:
        if self.policy != "adaptive":
            return [len(row) for row in survivals]
        cost = beside_prompts(self.machine.target, len(survivals), chunks)
        return choose(
            survivals,
            lambda packed: drafting + cost(packed),
            room,
            other_rows=chunks,
            weights=weights,
            search_all=True,
        )

    def _verify(self, row: _Row, survival: Sequence[float], length: int) -> int:
        """Tokens emitted, by chance; what the planner may learn from it."""
        accepted = 0
        while accepted < length and self.rng.random() < _chance(row.kind, accepted):
            accepted += 1
        if length:
            count = self.num_verdicts[row.kind.name] = self.num_verdicts[row.kind.name] + 1
            if count % LEARN_EVERY == 0:
                number = self.numbers[row.kind.name]
                self.acceptance.update(number, SOURCE, survival[:length], num_verified=length, num_accepted=accepted)
                self.acceptance.begin(number, row.kind.name)  # another request's verdict comes next
        return 1 + accepted

    def _emit(self, row: _Row, count: int, report: Report, *, packed: int) -> None:
        count = min(count, row.left)
        row.left -= count
        report.num_tokens += count
        self.admission.pace.emitted(row.id, count, packed=packed, now=self.now)
        if row.kind.floor is not None and row.first is not None:
            second = int(self.now - row.first)
            row.seconds[second] = row.seconds.get(second, 0) + count


def _chance(kind: Kind, position: int) -> float:
    return kind.acceptance[position] if position < len(kind.acceptance) else 0.0


def compare(
    machine: Machine, kinds: Sequence[Kind], policies: Sequence[str], num_requests: int, *, seed: int = 0, **load: float
) -> Mapping[str, Report]:
    """Each policy on the same requests."""
    return {
        policy: Simulation(machine, kinds, policy=policy, seed=seed).run(num_requests, **load)  # type: ignore[arg-type]
        for policy in policies
    }
