"""What a draft's guesses are worth on given prompts, by the engine itself, before and after a distillation.
It must never look at a clock: acceptance does not depend on the machine's mood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dspark.bench.foretell import conditional
from dspark.config import SpeculationConfig
from dspark.params import SamplingParams
from dspark.types import SpeculationRecord

NUM_RESAMPLES = 2000


@dataclass(kw_only=True)
class Acceptance:
    """Of one draft at one temperature: a record for each prompt, in order."""

    temperature: float
    records: list[SpeculationRecord] = field(default_factory=list)

    @property
    def total(self) -> SpeculationRecord:
        """Of all prompts."""
        found = SpeculationRecord()
        for record in self.records:
            found.merge(record)
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON. `by_position[j]`: share of drafts at j that held, of those that were looked at there and held
        before."""
        total = self.total
        return {
            "temperature": self.temperature,
            "acceptance_rate": round(total.acceptance_rate, 4),
            "accepted_length": round(total.mean_accepted_length, 4),
            "by_position": [round(share, 4) for share in conditional(total)],
            "num_prompts": len(self.records),
            "record": {name: value for name, value in total.as_dict().items() if not isinstance(value, float)},
        }


def measure_acceptance(
    llm: Any, draft: str, prompts: Sequence[Sequence[int]], *, temperature: float, max_tokens: int, num_drafts: int
) -> Acceptance:
    """Answers with drafts of `num_drafts` tokens, all of them checked. `llm`: plain, its weights are shared."""
    settings = SpeculationConfig.from_draft(draft, num_speculative_tokens=num_drafts, policy="fixed")
    variant = llm.variant(speculation=settings, prefix_reuse=False)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    outputs = variant.generate([list(prompt) for prompt in prompts], params)
    if refused := [output.error for output in outputs if output.error]:
        raise ValueError(f"{len(refused)} held-out prompts were refused: {refused[0]}")
    return Acceptance(temperature=temperature, records=[output.outputs[0].speculation for output in outputs])


def relative_gain(
    before: Acceptance, after: Acceptance, *, seed: int = 0
) -> tuple[float | None, float | None, float | None]:
    """Acceptance rate after / before - 1, and its 95% bootstrap interval over prompts, drawn in pairs. None: no
    bound, because nothing was accepted before."""
    counts = np.array(
        [
            [b.num_accepted, b.num_verified, a.num_accepted, a.num_verified]
            for b, a in zip(before.records, after.records)
        ]
    )
    rng = np.random.default_rng(seed)
    drawn = counts[rng.integers(len(counts), size=(NUM_RESAMPLES, len(counts)))].sum(axis=1)
    low, high = np.percentile(_gain(drawn), [2.5, 97.5], method="nearest")
    found = (_gain(counts.sum(axis=0, keepdims=True))[0], low, high)
    gain, lower, upper = (float(value) if np.isfinite(value) else None for value in found)
    return gain, lower, upper


def _gain(sums: np.ndarray) -> np.ndarray:
    """(M, 4) -> (M,)."""
    accepted, verified, accepted_after, verified_after = sums.T.astype(float)
    before, after = accepted / np.maximum(verified, 1), accepted_after / np.maximum(verified_after, 1)
    return np.where(before > 0, after / np.where(before > 0, before, 1), np.inf) - 1
