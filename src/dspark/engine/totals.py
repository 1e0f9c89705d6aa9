"""EngineTotals: what an engine has done since its start, and the clock that times the phases of a step.
They must never decide anything."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dspark.types import SpeculationRecord

PHASES = ("admit", "limit", "draft", "plan", "pack", "run", "verify", "commit")


@dataclass(kw_only=True)
class EngineTotals:
    """Sums over all steps since the start or the last reset. `seconds` by phase."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preempted: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    record: SpeculationRecord = field(default_factory=SpeculationRecord)


class Clock:
    """Seconds between marks."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self.last
        self.last = now
