"""Drafter: whatever guesses the next tokens of running sequences.
It must never change what the target's cache holds of a committed token, decide what is emitted, or see a token
before it is committed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dspark.model.batch import Packed
from dspark.params import SamplingParams
from dspark.types import Draft, Verdict


@dataclass(frozen=True, kw_only=True)
class Taps:
    """Hidden states of a target pass: `hidden` one (T, D) for each layer in the drafter's `taps`, of the tokens of
    `packed`, whose sequences are the rows of `observe` in the same order."""

    packed: Packed
    hidden: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class DraftRow:
    """What a drafter may know of one sequence.

    `tokens`: prompt and everything emitted, never to be changed, longer at each call for the same `seq_id` (after a
    preemption too). `num_prompt` of them are the prompt; `num_cached` have keys and values in the target's cache.
    `sampler`: the processors and the noise of the request (see
    dspark.sampling.RowSampler), used by drafters that sample; lookup drafters ignore it. `thrifty`: the row may go
    without a draft where one does not pay; else it wants one whatever it costs. `weight`: what a token of the row is
    worth against others' (plan/pace). `judge(j, chance)`: how likely draft j is to hold where those before it do, of
    which the drafter itself says `chance`, known before the token is drawn.
    """

    seq_id: int
    tokens: Sequence[int]
    num_prompt: int
    params: SamplingParams
    num_cached: int = 0
    sampler: Any = None
    thrifty: bool = True
    weight: float = 1.0
    judge: Callable[[int, float], float] = lambda j, chance: chance


class Drafter(Protocol):
    """The seam between drafting and the loop (ARCHITECTURE.md)."""

    name: str
    taps: Sequence[int]
    """Target layers whose hidden states `observe` wants; () for none."""
    num_places: int
    """Places of the target's cache behind a row's cached tokens that drafting uses as scratch, whatever the limit: the
    target's next pass overwrites them."""

    def propose(
        self,
        rows: Sequence[DraftRow],
        limits: Sequence[int],
        *,
        floors: Sequence[float] | None = None,
    ) -> list[Draft]:
        """One draft a row, of at most limits[i] tokens; empty where the limit is 0 or there is nothing to say.

        Where the row's sampler has a grammar, tokens are drawn from the law that it leaves, and a guess ends before the
        first that it forbids.

        A drafter that pays for each token stops row i *after* the token with which survival, as the row judges it, fell
        below floors[i] (a token once drawn is kept: dropping it for its own low probability would be biased).
        """
        ...

    def observe(self, rows: Sequence[DraftRow], verdicts: Sequence[Verdict | None], taps: Taps | None = None) -> None:
        """After commit: `rows` hold the new tokens; a verdict is None for a row that had no decision in this step."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence has ended, been aborted or been preempted: free what is held for it. Its finished text may be
        kept as material for others."""
        ...


class NoDrafter:
    """Plain decoding as a drafter: the baseline of every benchmark runs through the same loop."""

    name = "none"
    taps: Sequence[int] = ()
    num_places = 0

    def propose(
        self,
        rows: Sequence[DraftRow],
        limits: Sequence[int],
        *,
        floors: Sequence[float] | None = None,
    ) -> list[Draft]:
        return [Draft(source=self.name) for _ in rows]

    def observe(self, rows: Sequence[DraftRow], verdicts: Sequence[Verdict | None], taps: Any = None) -> None:
        return None

    def forget(self, seq_id: int) -> None:
        return None


DrafterFactory = Callable[..., Drafter]


def registry() -> Mapping[str, DrafterFactory]:
    """Name -> a function that imports lazily and builds the drafter from its settings."""

    def none(**_: Any) -> Drafter:
        return NoDrafter()

    def ngram(**settings: Any) -> Drafter:
        from dspark.draft.lookup import NgramDrafter

        return NgramDrafter(**settings)

    def suffix(**settings: Any) -> Drafter:
        from dspark.draft.lookup import SuffixDrafter

        return SuffixDrafter(**settings)

    def model(**settings: Any) -> Drafter:
        from dspark.draft.model import ModelDrafter

        return ModelDrafter(**settings)

    def dspark(**settings: Any) -> Drafter:
        from dspark.draft.semi_ar import SemiAutoregressiveDrafter

        return SemiAutoregressiveDrafter(**settings)

    def eagle3(**settings: Any) -> Drafter:
        from dspark.draft.eagle import EagleDrafter

        return EagleDrafter(**settings)

    return {"none": none, "ngram": ngram, "suffix": suffix, "model": model, "dspark": dspark, "eagle3": eagle3}
