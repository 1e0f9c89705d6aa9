"""A vLLM worker in thirty lines: rows with fixed answers, drafts verified as vLLM's greedy rejection does.
It must never tell a proposer more than vLLM 0.32 does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np


def vllm_config(*, num_tokens: int = 8, scheduler: Any = None, **own: Any) -> SimpleNamespace:
    """The parts of a VllmConfig that are read; `own` go into additional_config's table."""
    return SimpleNamespace(
        additional_config={"dspark": own} if own else {},
        speculative_config=SimpleNamespace(num_speculative_tokens=num_tokens),
        model_config=SimpleNamespace(max_model_len=256, model="tiny"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=8, scheduler_cls=scheduler),
    )


@dataclass
class Job:
    """A request whose answer is known: what the target would write after its prompt."""

    prompt: list[int]
    answer: list[int]
    emitted: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.emitted) >= len(self.answer)

    def step(self) -> list[int]:
        """Tokens of one step: drafts as far as they are right, and the target's own."""
        rest = self.answer[len(self.emitted) :]
        held = 0
        for draft, truth in zip(self.drafts, rest[:-1]):
            if draft != truth:
                break
            held += 1
        self.verified.append(len(self.drafts))
        new = rest[: held + 1]
        self.emitted += new
        return new


@dataclass
class Clock:
    """Seconds that only the host's steps add to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class FakeWorker:
    """Steps all jobs at once, one step of which costs `cost(packed tokens)` seconds on the clock."""

    def __init__(self, proposer: Any, clock: Clock, *, cost: Any = lambda packed: 1.0 + 0.02 * packed) -> None:
        self.proposer, self.clock, self.cost = proposer, clock, cost

    def step(self, jobs: Sequence[Job], *, prefilling: int = 0) -> None:
        """`prefilling`: further rows that read a prompt and sample nothing."""
        self.clock.now += self.cost(sum(1 + len(job.drafts) for job in jobs))
        sampled: list[list[int]] = [job.step() for job in jobs]
        tokens = np.zeros((len(jobs) + prefilling, 256), dtype=np.int32)
        lengths = np.zeros(len(jobs) + prefilling, dtype=np.int32)
        for i, job in enumerate(jobs):
            text = job.prompt + job.emitted
            tokens[i, : len(text)], lengths[i] = text, len(text)
        sampled += [[] for _ in range(prefilling)]
        drafts = self.proposer.propose(sampled, lengths, tokens, slot_mappings=None)
        assert len(drafts) == len(sampled) and all(not draft for draft in drafts[len(jobs) :])
        for job, draft in zip(jobs, drafts):
            job.drafts = list(draft)
