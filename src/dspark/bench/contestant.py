"""Contestant: a candidate of `dspark select` with an engine of its own, and what it shows while it answers.
It must never share a cache, a drafter or a planner with another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark.bench.foretell import Drafted, Seen
from dspark.bench.harness import EngineParticipant
from dspark.bench.variants import Variant
from dspark.types import SpeculationRecord


class Contestant:
    """A candidate with an engine of its own over the target's weights, and what it shows on the way."""

    def __init__(self, llm: Any, variant: Variant) -> None:
        self.inner = EngineParticipant(llm, variant)
        self.name = variant.name
        self.variant = variant
        self.seen = Seen()
        self.tokens = 0
        self.seconds = 0.0
        self.phases: dict[str, float] = {}
        self.context = self.steps = 0
        self.num_prompt: list[int] = []
        self.num_output: list[int] = []
        self.task = ""
        self.listening = False

    def begin(self) -> None:
        """From now on it counts."""
        self.listening = True
        self.inner.llm.add_row_sink(self._see)

    def answer(self, prompt: Sequence[int], params: Any) -> Any:
        """As harness.Peer."""
        answer = self.inner.answer(prompt, params)
        if self.listening and answer.error is None:
            self.num_prompt.append(len(prompt))
            self.num_output.append(len(answer.tokens))
            self.tokens += max(0, len(answer.tokens) - 1)
            self.seconds += answer.decode_seconds
            for name, seconds in answer.phases.items():
                self.phases[name] = self.phases.get(name, 0.0) + seconds
        return answer

    def _see(self, step: Any) -> None:
        if step.position == 0:
            return  # the prompt's own pass
        self.steps += 1
        self.context += step.seq.num_prompt + step.position
        record = self.seen.by_task.setdefault(self.task, SpeculationRecord())
        record.add(
            drafted=len(step.tokens), verified=step.verified, accepted=step.accepted, emitted=max(step.emitted, 0)
        )
        if step.tokens:
            drafted = self.seen.sources.setdefault(step.source, Drafted())
            drafted.drafts += 1
            drafted.tokens += len(step.tokens)

    def finish(self) -> Any:
        """What was seen, as means."""
        self.seen.context = self.context / self.steps if self.steps else 0.0
        self.seen.num_prompt = sum(self.num_prompt) / len(self.num_prompt) if self.num_prompt else 1.0
        self.seen.num_output = sum(self.num_output) / len(self.num_output) if self.num_output else 1.0
        return self.seen

    def seconds_per_token(self) -> float:
        """Of decoding."""
        return self.seconds / self.tokens if self.tokens else 0.0
