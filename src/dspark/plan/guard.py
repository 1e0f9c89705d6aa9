"""GuardedPolicy: a length policy of the user's own, kept from doing harm when it fails.
It must never change what a sound policy decides, or let a broken one reach another request.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from dspark.plan.length import Features, LengthPolicy, Limit

METHODS = ("limit", "keep", "update", "forget")


class GuardedPolicy:
    """Asks `policy`, checks its answers, and stops asking after the first fault: from then on its requests go without
    drafts, which changes no text. The fault is told once, as a warning that names the policy."""

    def __init__(self, name: str, policy: LengthPolicy, *, has_costs: bool) -> None:
        """`has_costs`: whether `keep` may leave a length to the budget. Raises ValueError for what is no policy."""
        missing = [method for method in METHODS if not callable(getattr(policy, method, None))]
        if missing or isinstance(policy, type):
            raise ValueError(
                f"policy {name!r} is no LengthPolicy (plan/length): "
                + (f"it lacks {', '.join(missing)}" if missing else "it is a class; give an instance of it")
            )
        self.name = name
        self.policy = policy
        self.has_costs = has_costs
        self.broken = False

    def begin(self, rows: Sequence[Features]) -> None:
        if (begin := getattr(self.policy, "begin", None)) is not None:
            self._ask(lambda: begin(rows))

    def limit(self, features: Features) -> Limit:
        found = self._ask(lambda: self._checked_limit(self.policy.limit(features)))
        return Limit(max_tokens=0) if found is None else found

    def keep(self, survival: Sequence[float]) -> int | None:
        found = self._ask(lambda: (self._checked_keep(self.policy.keep(survival)),))
        return 0 if found is None else found[0]

    def update(self, seq_id: int, *, num_verified: int, num_accepted: int) -> None:
        self._ask(lambda: self.policy.update(seq_id, num_verified=num_verified, num_accepted=num_accepted))

    def forget(self, seq_id: int) -> None:
        self._ask(lambda: self.policy.forget(seq_id))

    def _ask(self, call: Callable[[], Any]) -> Any:
        if self.broken:
            return None
        try:
            return call()
        except Exception as error:  # it is not our code: whatever it raises must not end the requests of others
            self.broken = True
            warnings.warn(
                f"policy {self.name!r} failed ({type(error).__name__}: {error}): its requests go on without drafts; "
                "mend it and give it another name",
                stacklevel=2,
            )
            return None

    @staticmethod
    def _checked_limit(limit: Any) -> Limit:
        if not isinstance(limit, Limit):
            raise ValueError(f"limit returned {limit!r}, not a dspark.plan.length.Limit")
        for field in ("max_tokens", "least"):
            if not _is_count(getattr(limit, field)):
                raise ValueError(f"Limit.{field}={getattr(limit, field)!r} is no whole number of at least 0")
        return limit

    def _checked_keep(self, length: Any) -> int | None:
        if length is None and not self.has_costs:
            raise ValueError(
                "keep returned None, and this engine has no budget to leave the length to: start it with policy "
                "'adaptive' (which measures costs), or return a number"
            )
        if length is not None and not _is_count(length):
            raise ValueError(f"keep returned {length!r}, not None or a whole number of at least 0")
        return length


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
