"""Sampled answers: whether what comes out with drafts has the target's law, over the first few tokens together.
It must never report agreement without having shown, on the same prefixes, that it finds an acceptance that is too kind.

The first token of an answer comes from the prompt's own pass, without a draft, so only the tokens behind it show what
drafting does: the law compared is that of the first tokens together (quality/joint).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.params import MAX_ANSWERS, MAX_LOGPROBS, RequestSpeculation, SamplingParams
from dspark.quality.goodness import Fit, fit, holm, together
from dspark.quality.joint import Joint, LogitTap, joint_law
from dspark.types import SpeculationRecord

MANNERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("temperature 1", {"temperature": 1.0}),
    ("temperature 0.7, top_k 12, presence 0.6", {"temperature": 0.7, "top_k": 12, "presence_penalty": 0.6}),
)
ALLOWANCE = 4.0
"""Times the rounding that was seen between two passes: twice its size."""
LEAST_DRAFTED = 50


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`samples` of each prefix, `depth` tokens looked at together, `alpha` over all prefixes. `share` of refusals that
    the control keeps. Cells come from `max_nodes` passes."""

    samples: int = 1000
    depth: int = 3
    alpha: float = 1e-3
    share: float = 0.5
    max_nodes: int = 20
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Token ids, where they come from, and the manner and policy that answers are sampled with."""

    name: str
    tokens: Sequence[int]
    manner: str
    params: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Tested:
    """One prefix: the fit of the answers with drafts, and of the control's. None: the control was not drawn."""

    prefix: Prefix
    fit: Fit
    control: Fit | None
    record: SpeculationRecord


@dataclass(kw_only=True)
class Sampled:
    """Every prefix tested so far. The hypotheses are each prefix, and all together; p-values are Holm's.

    `drafts_told`: whether the side says what it drafted; where it does not, the reader must see to it.
    """

    plan: Plan
    tested: list[Tested] = field(default_factory=list)
    num_overruled: int = 0
    drafts_told: bool = True

    @property
    def p_value(self) -> float:
        """The smallest, corrected for their number."""
        return self._least([t.fit for t in self.tested])

    @property
    def control_p_value(self) -> float:
        """Of the control, by the same test."""
        return self._least([t.control for t in self.tested if t.control is not None])

    def _least(self, fits: Sequence[Fit]) -> float:
        return min(holm([f.p_value for f in fits] + [together(fits).p_value])) if fits else 1.0

    @property
    def detectable(self) -> float:
        """The total variation distance of one prefix's answers that is found with 80% power."""
        level = self.plan.alpha / (len(self.tested) + 1)
        return max((t.fit.detectable(level) for t in self.tested), default=1.0)

    @property
    def record(self) -> SpeculationRecord:
        """What was drafted for the answers."""
        total = SpeculationRecord()
        for one in self.tested:
            total.merge(one.record)
        return total

    @property
    def verdict(self) -> str:
        """pass, fail, or inconclusive: too little was drafted, or the control was not found."""
        if self.p_value < self.plan.alpha:
            return "fail"
        drafted = self.record.num_verified >= LEAST_DRAFTED and self.num_overruled > 0 or not self.drafts_told
        return "pass" if drafted and self.control_p_value < self.plan.alpha else "inconclusive"


def choose_prefixes(llm: Any, texts: Sequence[tuple[str, Sequence[int], int]], *, plan: Plan) -> list[Prefix]:
    """One prefix of each text (name, token ids, where its answer begins), by plain passes alone.

    Of the places in the answer the one where the target is least decided, those first whose last two tokens stand
    earlier in the text: there lookups have something to propose. Manners and policies take turns.
    """
    found = []
    for number, (name, tokens, start) in enumerate(texts):
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=MAX_LOGPROBS, speculation=False)
        (output,) = llm.generate([list(tokens)], params)
        if output.error is not None or len(tokens) - start < 4:
            continue
        best = max(range(start + 2, len(tokens)), key=lambda i: _worth(tokens, i, output.prompt_logprobs[i]))
        manner, values = MANNERS[number % len(MANNERS)]
        # Half of the prefixes under the policy that is configured, half with drafts of a fixed length.
        control = RequestSpeculation(policy="fixed" if number // len(MANNERS) % 2 == 0 else None)
        asked = SamplingParams(**values, max_tokens=plan.depth + 1, speculation=control)
        policy = control.policy or "as configured"
        # Samples share whole pages of the cache: with one token behind the last page each reads that token alone.
        spare = (best - 1) % llm.engine.cache.page_size if best > llm.engine.cache.page_size else 0
        found.append(Prefix(name=name, tokens=list(tokens[spare:best]), manner=f"{manner}, {policy}", params=asked))
    return found


def _worth(tokens: Sequence[int], place: int, row: Sequence[Any]) -> tuple[bool, float]:
    pairs = zip(tokens[: place - 2], tokens[1 : place - 1])
    seen = any(pair == (tokens[place - 2], tokens[place - 1]) for pair in pairs)
    return seen, -max(entry.logprob for entry in row)


def try_samples(
    tap: LogitTap,
    other: Any,
    control: Any | None,
    prefixes: Sequence[Prefix],
    *,
    plan: Plan,
    on_tested: Callable[[Sampled], None] = lambda sampled: None,
) -> Sampled:
    """Sample behind every prefix with `other` and with `control` (spoilt by quality/control; its `generous` counts what
    it overruled), and compare with the joint law of `tap`'s model. `on_tested` hears of each prefix."""
    sampled = Sampled(plan=plan)
    spoilt, generous = control if control is not None else (None, None)
    ends = [*tap.llm.target.facts.eos_token_ids]
    for prefix in prefixes:
        joint = joint_law(tap, prefix.tokens, prefix.params, depth=plan.depth, max_nodes=plan.max_nodes, ends=ends)
        counts, record = draw(other, prefix, joint, samples=plan.samples)
        spoilt_fit = None
        if spoilt is not None and generous is not None:
            spoilt_counts, _ = draw(spoilt, prefix, joint, samples=plan.samples)
            spoilt_fit = _fit(spoilt_counts, joint)
            sampled.num_overruled = generous.num_overruled
        sampled.tested.append(Tested(prefix=prefix, fit=_fit(counts, joint), control=spoilt_fit, record=record))
        on_tested(sampled)
    return sampled


def _fit(counts: Counter, joint: Joint) -> Fit:
    return fit(counts, joint.law, allowance=ALLOWANCE * joint.allowance)


def draw(llm: Any, prefix: Prefix, joint: Joint, *, samples: int) -> tuple[Counter, SpeculationRecord]:
    """So many answers, counted by cell."""
    counts: Counter = Counter()
    record = SpeculationRecord()
    values = {name: getattr(prefix.params, name) for name in ("temperature", "top_k", "presence_penalty", "max_tokens")}
    left = samples
    # The prefix is read once, and found in the cache by all samples, which start together.
    llm.generate([list(prefix.tokens)], SamplingParams(temperature=0.0, max_tokens=1, speculation=False))
    while left > 0:
        params = SamplingParams(**values, n=min(left, MAX_ANSWERS), speculation=prefix.params.control)
        (output,) = llm.generate([list(prefix.tokens)], params)
        if output.error is not None:
            raise ValueError(f"a prefix of {len(prefix.tokens)} tokens was refused: {output.error}")
        for answer in output.outputs:
            counts[joint.cell(answer.token_ids)] += 1
            record.merge(answer.speculation)
        left -= params.n
    return counts, record
