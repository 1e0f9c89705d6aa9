"""The near-tie oracle: says of two greedy answers that differ whether rounding explains it or a fault must.
It must never excuse a difference without having looked at the target's own logits there.

Two correct passes over the same prefix in low precision differ a little in their logits, because sums are taken in
another order when a row comes in other company. Where the two best tokens are close the argmax may then differ, and
after that the answers are different texts. So only the first difference can be judged:

    z        the target's raw logits after the common prefix, from a fresh plain pass
    gap(t) = max(z) - z[t]                                   (in logits; equal to the gap in log-probabilities)
    margin = max(gap(a), gap(b))                             a, b: what plain and speculative decoding chose there
    tie    when margin <= bound, else fault

Both tokens must be near the best one: a margin between a and b alone would excuse two equally absurd tokens.

Bound. Let delta be the most by which the difference of two leading logits changes between two correct passes. Where
plain decoding chose a, its pass had z[a] >= z[t] for every t, so the fresh pass has gap(a) <= delta; likewise for b. So
bound = delta. Measured with SmolLM2-135M under transformers, one token at a time against one pass over the whole text,
the coarsest change of company there is, over the two best tokens of both passes: bfloat16 0.375 at most (245 positions;
99% within 0.25; 8 argmaxes differed, each by 0.25 or less), float32 2.3e-5 (165 positions, no argmax differed). The
bounds, 0.5 and 1e-3, leave room for other models: logits between 16 and 32 are 0.125 apart in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.params import MAX_LOGPROBS, SamplingParams

Margin = Callable[[Sequence[int], int, int], float]
"""margin(prefix, a, b): the formula above; infinite when a token is so unlikely that it is not reported."""

IDENTICAL, TIE, FAULT = "identical", "tie", "fault"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict on one pair of answers.

    `position` of the first difference, counted from 0 in the answer (None when identical); `plain` and `other` are the
    token ids there, None where that answer had already ended. `margin` and `bound` in logits.
    """

    verdict: str
    position: int | None = None
    plain: int | None = None
    other: int | None = None
    margin: float | None = None
    bound: float | None = None

    @property
    def text(self) -> str:
        """One line for people."""
        if self.verdict == IDENTICAL:
            return "identical"
        if self.margin is None:
            return f"{self.verdict} at token {self.position}: one answer ends where the other goes on"
        relation = "<=" if self.verdict == TIE else ">"
        return (
            f"{self.verdict} at token {self.position}: {self.plain} or {self.other}, "
            f"margin {self.margin:.3g} {relation} {self.bound:.3g} logits"
        )


def tie_bound(dtype: str, *, quantization: str | None = None, exact: bool = False) -> float:
    """The largest margin, in logits, that rounding explains (see the top of this file).

    `exact` promises bitwise equality: no difference is excused. Quantised activations add an error of bfloat16's
    relative size (a step of 1/127 of a row's largest value against 2**-7), so they double the bound.
    Raises ValueError for a dtype without a measured bound.
    """
    bounds = {"bfloat16": 0.5, "float32": 1e-3}
    name = str(dtype).removeprefix("torch.")
    if name not in bounds:
        raise ValueError(f"dtype={dtype!r} has no near-tie bound: measure one, or use {' or '.join(bounds)}")
    if exact:
        return 0.0
    return bounds[name] * (2 if quantization else 1)


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, or at which one answer has ended; None for equal answers."""
    for position, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return position
    return None if len(plain) == len(other) else min(len(plain), len(other))


def classify(
    prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], *, margin: Margin, bound: float
) -> Finding:
    """Judge two greedy answers (token ids, the end-of-text id included) to the same prompt.

    An answer that is a strict prefix of the other is a fault: both contain their end-of-text id, so rounding would
    show as another token, not as a missing one. With bound 0 every difference is a fault.
    """
    position = first_difference(plain, other)
    if position is None:
        return Finding(verdict=IDENTICAL)
    if position >= len(plain) or position >= len(other):
        ends = [tokens[position] if position < len(tokens) else None for tokens in (plain, other)]
        return Finding(verdict=FAULT, position=position, plain=ends[0], other=ends[1], bound=bound)
    a, b = plain[position], other[position]
    size = margin([*prompt, *plain[:position]], a, b)
    verdict = TIE if 0 < bound and size <= bound else FAULT
    return Finding(verdict=verdict, position=position, plain=a, other=b, margin=size, bound=bound)


class LogitMargin:
    """`margin` by an LLM: one fresh plain pass over the prefix, its most likely tokens with log-probabilities.

    Log-probabilities are logits minus one number for the whole position, so gaps are the same in both.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.seen: dict[tuple[int, ...], dict[int, float]] = {}

    def __call__(self, prefix: Sequence[int], a: int, b: int) -> float:
        logprobs = self._top(tuple(prefix))
        if a not in logprobs or b not in logprobs:
            return float("inf")
        best = max(logprobs.values())
        return max(best - logprobs[a], best - logprobs[b])

    def _top(self, prefix: tuple[int, ...]) -> dict[int, float]:
        if prefix not in self.seen:
            params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=MAX_LOGPROBS, speculation=False)
            output = self.llm.generate([list(prefix)], params)[0]
            if output.error is not None:
                raise ValueError(f"the oracle could not look at a prefix of {len(prefix)} tokens: {output.error}")
            self.seen[prefix] = {entry.token_id: entry.logprob for entry in output.outputs[0].logprobs[0]}
        return self.seen[prefix]
