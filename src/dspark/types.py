"""The nouns that pass between layers: Request, Sequence, Draft, Verdict, StepStats, RequestOutput.
They must never import torch or know who reads them: plain dataclasses with counts that add up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dspark.params import SamplingParams


@dataclass(kw_only=True)
class Request:
    """One prompt and what is asked of it. `prompt_token_ids` must be non-empty and shorter than the context."""

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    arrival: float = 0.0
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log-probability (natural logarithm, raw logits) of a token; `rank` 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int


@dataclass(kw_only=True)
class Draft:
    """Guessed continuation of one sequence.

    `tokens`: K ids. `q`: the law each token was drawn from after every processor, shape (K, V) float32, or None when
    the guess was deterministic (lookup, argmax). `survival[j]`: the estimate that tokens 0..j are all accepted,
    computed before token j was drawn (ARCHITECTURE.md, non-anticipation). `source`: the drafter's name.
    """

    tokens: list[int] = field(default_factory=list)
    q: Any = None
    survival: list[float] = field(default_factory=list)
    source: str = ""

    def prefix(self, num_tokens: int) -> Draft:
        """The first `num_tokens` guesses."""
        if num_tokens >= len(self.tokens):
            return self
        q = None if self.q is None else self.q[:num_tokens]
        return Draft(tokens=self.tokens[:num_tokens], q=q, survival=self.survival[:num_tokens], source=self.source)


class TokenOrigin(NamedTuple):
    """Where a token of an answer came from. `source`: "drafted" and accepted, "forced" the same where a grammar left
    nothing else, "corrected" the target's own where it rejected a draft, "bonus" its own behind a whole block that
    held, "target" its own where nothing was verified. `drafter`: who drafted it."""

    source: str
    drafter: str | None = None


FORCED = "grammar"
"""The source of drafts that a grammar forces."""
PLAIN, BONUS, CORRECTED = TokenOrigin("target"), TokenOrigin("bonus"), TokenOrigin("corrected")


@dataclass(kw_only=True)
class Verdict:
    """What the verifier keeps of `num_verified` drafts: the first `num_accepted`, then one token of the target's own.

    `tokens` = accepted drafts + [corrected or bonus token], so len(tokens) == num_accepted + 1.
    """

    num_verified: int
    num_accepted: int
    tokens: list[int]

    def origins(self, drafter: str) -> list[TokenOrigin]:
        """One for each of `tokens`; `drafter`: the source of the draft."""
        own = PLAIN if not self.num_verified else BONUS if self.num_accepted == self.num_verified else CORRECTED
        drafted = TokenOrigin("forced" if drafter == FORCED else "drafted", drafter)
        return [drafted] * self.num_accepted + [own]


@dataclass(kw_only=True)
class SpeculationRecord:
    """What speculation did for one request, or for a whole run.

    drafted >= verified >= accepted. `num_steps` counts target passes that emitted tokens for the request, with a draft
    or not; mean accepted length (bonus included) = tokens emitted / num_steps. `accepted_at[j]` counts verified blocks
    whose draft j was accepted, `verified_at[j]` those in which draft j was looked at, so accepted_at[j] over
    verified_at[0] is the survival at j and accepted_at[j] over accepted_at[j-1] the conditional acceptance.
    """

    num_steps: int = 0
    num_emitted: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    verified_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, *, drafted: int, verified: int, accepted: int, emitted: int) -> None:
        """Count one target pass of one row."""
        assert drafted >= verified >= accepted >= 0, (drafted, verified, accepted)
        self.num_steps += 1
        self.num_emitted += emitted
        self.num_drafted += drafted
        self.num_verified += verified
        self.num_accepted += accepted
        while len(self.verified_at) < verified:
            self.verified_at.append(0)
            self.accepted_at.append(0)
        for j in range(verified):
            self.verified_at[j] += 1
        for j in range(accepted):
            self.accepted_at[j] += 1

    def copy(self) -> SpeculationRecord:
        """One that does not grow with this one."""
        return replace(self, verified_at=list(self.verified_at), accepted_at=list(self.accepted_at))

    def merge(self, other: SpeculationRecord) -> None:
        """Add another record to this one."""
        for name in ("num_steps", "num_emitted", "num_drafted", "num_verified", "num_accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("verified_at", "accepted_at"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine.extend([0] * (len(theirs) - len(mine)))
            for j, count in enumerate(theirs):
                mine[j] += count

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted a target pass, the target's own token included; 1.0 is plain decoding."""
        return self.num_emitted / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / verified draft tokens."""
        return self.num_accepted / self.num_verified if self.num_verified else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = (
            "num_steps",
            "num_emitted",
            "num_drafted",
            "num_verified",
            "num_accepted",
            "verified_at",
            "accepted_at",
        )
        return {name: getattr(self, name) for name in names} | {
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance_rate": self.acceptance_rate,
        }


@dataclass(kw_only=True, eq=False)
class Sequence:
    """One running answer: the mutable state of a request (of one of its n samples) inside the engine. Equal only to
    itself.

    `tokens` = prompt + everything emitted. `num_cached` = how many of them have keys and values in the target's cache;
    the rest is pending. Only engine/loop.commit appends to `tokens`. `prompt_class`: what acceptance is learned by
    (plan/history). Of each token of the answer: `origins` where it came from, `text_ends` how long the text was with
    it (a token whose text is held back adds nothing, the one that sets it free adds all).
    """

    id: int
    request: Request
    index: int
    tokens: list[int]
    num_prompt: int
    prompt_class: str = ""
    num_cached: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str = ""
    origins: list[TokenOrigin] = field(default_factory=list)
    text_ends: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprob] | None] = field(default_factory=list)
    record: SpeculationRecord = field(default_factory=SpeculationRecord)
    num_preemptions: int = 0
    num_prefix_hits: int = 0
    start_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_cached


TARGET_PHASES = ("plan", "pack", "run", "verify", "commit")
"""Phases of a step whose time goes with the rows of the target's pass."""


@dataclass(kw_only=True)
class StepStats:
    """One engine step, for the sinks. Times in seconds by phase; counts over the whole batch.

    `num_rows` sequences sampled in this step, `num_emitted` = `num_accepted` + `num_rows` minus what an end cut off.
    `predicted_seconds` of the target's phases, as foreseen when the step was planned; `plain_seconds` that plain
    decoding would have needed for the same tokens, by the measured costs. None where nothing is measured.
    """

    step: int
    num_running: int = 0
    num_waiting: int = 0
    num_rows: int = 0
    num_packed_tokens: int = 0
    num_prefill_tokens: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_preempted: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    predicted_seconds: float | None = None
    plain_seconds: float | None = None

    @property
    def target_seconds(self) -> float:
        """What `predicted_seconds` foretells."""
        return sum(self.seconds[name] for name in TARGET_PHASES)


@dataclass(frozen=True, kw_only=True)
class RowStep:
    """What was decided for one sequence in one step, and how it ended: for `dspark generate --explain` and profiles.

    `allowed`: whether drafts were possible at all, before the policy was asked: not where the request, the engine or
    what is left of the answer admits none. `position`: tokens of the answer before the step, `text_kind`: what the last
    of them look like. `limit`: drafts that the policy allowed, `claims` the survivals that the drafter named for the
    `tokens` it drafted, `survival` what these were judged to be worth. The first `verified` of them were looked at,
    `accepted` of these held, `emitted` tokens came out. `packed`: rows of the target pass, of all sequences together.
    """

    seq: Sequence
    policy: str
    allowed: bool
    position: int
    text_kind: str
    source: str
    limit: int
    tokens: list[int]
    claims: list[float]
    survival: list[float]
    verified: int
    accepted: int
    emitted: int
    packed: int


@dataclass(kw_only=True)
class CompletionOutput:
    """One of the n answers of a request. `origins`, `text_ends`: of each token, see Sequence."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[list[TokenLogprob]] | None
    speculation: SpeculationRecord
    origins: list[TokenOrigin] = field(default_factory=list)
    text_ends: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class RequestOutput:
    """Everything about a finished (or, in a stream, growing) request. `error` is set when the request was refused."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    finished: bool = True
    error: str | None = None
    num_cached_prompt_tokens: int = 0
    timings: dict[str, float] = field(default_factory=dict)
