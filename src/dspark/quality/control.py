"""Control: an engine whose acceptance is too generous, to show that a test of distributions would find that.
It must never be reached by an answer that a user gets: it is made for one test, over an engine of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from dspark.types import Verdict


class Generous:
    """Wraps an engine's verdicts: of the drafts that were refused, this share is kept all the same.

    `num_overruled` counts them; a control that overruled nothing shows nothing.
    """

    def __init__(self, verify: Callable[..., list[Verdict | None]], *, share: float, seed: int) -> None:
        self.verify = verify
        self.share = share
        self.random = random.Random(seed)
        self.num_overruled = 0

    def __call__(self, works: Any, kept: Any, logits: Any) -> list[Verdict | None]:
        return [
            verdict if verdict is None else self._overrule(verdict, draft.tokens)
            for verdict, draft in zip(self.verify(works, kept, logits), kept, strict=True)
        ]

    def _overrule(self, verdict: Verdict, drafted: list[int]) -> Verdict:
        place = verdict.num_accepted
        if place == len(drafted) or self.random.random() >= self.share:
            return verdict
        self.num_overruled += 1
        # As the token that corrects the draft: the cache and the counts then stay as they are.
        return Verdict(
            num_verified=verdict.num_verified, num_accepted=place, tokens=[*verdict.tokens[:place], drafted[place]]
        )


def make_generous(llm: Any, *, share: float, seed: int = 0) -> Generous:
    """Spoil this LLM, which must be a variant made for it."""
    generous = Generous(llm.engine._verify, share=share, seed=seed)
    llm.engine._verify = generous
    return generous
