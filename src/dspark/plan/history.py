"""Calibration: what a drafter's confidence has really meant so far.
It must never learn from a token that was not verified, and never look at tokens themselves."""

from __future__ import annotations

from collections.abc import Sequence

NUM_BINS = 16
PRIOR_WEIGHT = 8.0
DECAY = 0.998


class Calibration:
    """Observed acceptance by (source, bin of claimed conditional confidence).

    A claim c in [0, 1] for draft j says: given that drafts before j are accepted, j is accepted with probability c.
    Each bin mixes its decayed counts with the claim itself, weighted as PRIOR_WEIGHT observations, so an untried
    drafter is believed and a tried one is judged.
    """

    def __init__(self) -> None:
        self.accepted: dict[str, list[float]] = {}
        self.seen: dict[str, list[float]] = {}

    def survival(self, source: str, claims: Sequence[float]) -> list[float]:
        """Calibrated survival for the claimed survival `claims` (falling, each in [0, 1])."""
        result, alive, before = [], 1.0, 1.0
        for claim in claims:
            conditional = claim / before if before > 0 else 0.0
            alive *= self._conditional(source, min(1.0, conditional))
            before = claim
            result.append(alive)
        return result

    def update(self, source: str, claims: Sequence[float], *, num_verified: int, num_accepted: int) -> None:
        """Learn from one verdict: drafts 0..num_accepted - 1 held, the next verified one (if any) did not."""
        seen = self.seen.setdefault(source, [0.0] * NUM_BINS)
        accepted = self.accepted.setdefault(source, [0.0] * NUM_BINS)
        before = 1.0
        for j, claim in enumerate(claims[: min(num_verified, num_accepted + 1)]):
            index = self._bin(min(1.0, claim / before if before > 0 else 0.0))
            seen[index] = seen[index] * DECAY + 1.0
            accepted[index] = accepted[index] * DECAY + (1.0 if j < num_accepted else 0.0)
            before = claim

    def _conditional(self, source: str, claim: float) -> float:
        if source not in self.seen:
            return claim
        index = self._bin(claim)
        return (self.accepted[source][index] + PRIOR_WEIGHT * claim) / (self.seen[source][index] + PRIOR_WEIGHT)

    @staticmethod
    def _bin(claim: float) -> int:
        return min(int(claim * NUM_BINS), NUM_BINS - 1)
