"""`dspark generate --compare`: the same prompt decoded plainly and with drafts, by turns, over the same weights.
It must never let a run profit from an earlier one: each speculative run has a drafter that saw only this prompt."""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspark.cli.generate import Question, decode_rate, load
from dspark.config import Config, SpeculationConfig
from dspark.params import SamplingParams
from dspark.types import RequestOutput, SpeculationRecord

if TYPE_CHECKING:
    from dspark.engine.llm import LLM

WARM_UP = Question(text="Count from one to twenty in words.", raw=True)
WARM_UP_TOKENS = 24
CONTEXT_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Side:
    """The measured runs of one side."""

    runs: list[RequestOutput]

    @property
    def tokens(self) -> list[int]:
        return list(self.runs[0].outputs[0].token_ids)

    @property
    def text(self) -> str:
        return self.runs[0].outputs[0].text

    @property
    def rate(self) -> float:
        """Median over the runs of decode tokens a second, (n - 1) / (finished - first_token)."""
        return statistics.median(decode_rate(run) for run in self.runs)

    @property
    def first_token_seconds(self) -> float:
        """Median time from arrival to the first token."""
        return statistics.median(run.timings["first_token"] - run.timings["arrival"] for run in self.runs)

    @property
    def record(self) -> SpeculationRecord:
        """The counts of all runs together."""
        total = SpeculationRecord()
        for run in self.runs:
            total.merge(run.outputs[0].speculation)
        return total


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both sides of one prompt."""

    plain: Side
    speculative: Side
    speculation: SpeculationConfig

    @property
    def first_difference(self) -> int | None:
        """Index of the first token in which any speculative run leaves the first plain run; None when all are equal."""
        found = [first_difference(self.plain.tokens, run.outputs[0].token_ids) for run in self.speculative.runs]
        return min((index for index in found if index is not None), default=None)

    @property
    def speedup(self) -> float:
        """Ratio of the medians of tokens a second."""
        return self.speculative.rate / self.plain.rate if self.plain.rate else 0.0


def run(ask: Question, *, params: SamplingParams, config: Config, model: str, repeat: int, as_json: bool) -> int:
    """Measure and print both sides. 1 when they differ although exact mode promises equality, else 0."""
    check(params, config=config, repeat=repeat)
    # Each run reads its whole prompt, or the runs after the first would find it in the cache; one row needs no more
    # cache than one context.
    engine = dataclasses.replace(config.engine, prefix_reuse=False, max_num_seqs=1)
    config = dataclasses.replace(config, engine=engine)
    plain = load(model, config=config, speculation=SpeculationConfig())
    comparison = measure(plain, ask=ask, params=params, config=config, repeat=repeat)
    if as_json:
        print(json.dumps(describe(comparison, info=plain.info()), ensure_ascii=False, default=str))
    else:
        print_answers(comparison, params=params, tokenizer=plain.tokenizer)
        print_table(comparison, repeat=repeat)
    reproducible = params.greedy or params.seed is not None
    return int(config.engine.exact and reproducible and comparison.first_difference is not None)


def check(params: SamplingParams, *, config: Config, repeat: int) -> None:
    """Refuse what cannot be compared."""
    if config.speculation.method == "none":
        raise ValueError(
            "--compare needs a drafter to compare with plain decoding: give --draft ngram, suffix or a model"
        )
    if params.n != 1:
        raise ValueError(f"-n {params.n} cannot be compared: --compare measures one answer, leave -n out")
    if repeat < 1:
        raise ValueError(f"--repeat {repeat} is not usable: give a whole number of at least 1")


def measure(plain: LLM, *, ask: Question, params: SamplingParams, config: Config, repeat: int) -> Comparison:
    """`repeat` runs of each side, by turns, each warmed up on another prompt."""
    warm = SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0, ignore_eos=True)
    runs: dict[str, list[RequestOutput]] = {"plain": [], "speculative": []}
    for turn in range(repeat):
        # A new drafter each time: one that remembers the answer of the turn before would only copy it.
        gc.collect()  # the variant of the turn before, and its cache with it
        speculative = plain.variant(speculation=config.speculation)
        sides = [("plain", plain), ("speculative", speculative)]
        for name, llm in sides if turn % 2 == 0 else reversed(sides):
            WARM_UP.put(llm, params=warm)
            runs[name].append(ask.put(llm, params=params))
            print(f"dspark: {name} run {turn + 1} of {repeat}", file=sys.stderr)
        del speculative, sides, llm
    return Comparison(
        plain=Side(runs=runs["plain"]), speculative=Side(runs=runs["speculative"]), speculation=config.speculation
    )


def first_difference(left: list[int], right: list[int]) -> int | None:
    """The first index at which two lists of tokens differ (one may have ended); None when they are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def print_answers(comparison: Comparison, *, params: SamplingParams, tokenizer: Any) -> None:
    """The answer once if all runs agree, else both and where they part."""
    index = comparison.first_difference
    if index is None:
        print(comparison.plain.text)
        print(f"\nplain and speculative: identical, all {len(comparison.plain.tokens)} tokens")
        return
    other = next(
        run.outputs[0]
        for run in comparison.speculative.runs
        if first_difference(comparison.plain.tokens, run.outputs[0].token_ids) == index
    )
    print(f"[plain]\n{comparison.plain.text}\n\n[speculative]\n{other.text}\n")
    before = tokenizer.decode(comparison.plain.tokens[max(0, index - CONTEXT_TOKENS) : index])
    sides = [tokenizer.decode(list(tokens[index : index + 1])) for tokens in (comparison.plain.tokens, other.token_ids)]
    print(
        f"plain and speculative: different from token {index} on: after {before!r}, {sides[0]!r} against {sides[1]!r}"
    )
    print(_why(params))


def print_table(comparison: Comparison, *, repeat: int) -> None:
    """Figures of both sides, with the formula of each where it is not plain from its name."""
    speculative, plain = comparison.speculative, comparison.plain
    name = comparison.speculation.model or comparison.speculation.method
    record = speculative.record
    print(f"\n{'':<26}{'plain':>10}{name:>{max(12, len(name) + 2)}}")
    width = max(12, len(name) + 2)
    rows = [
        ("tokens/s (decode)", f"{plain.rate:.1f}", f"{speculative.rate:.1f}"),
        ("ms a token", _milliseconds(plain.rate), _milliseconds(speculative.rate)),
        (
            "ms to the first token",
            f"{1000 * plain.first_token_seconds:.0f}",
            f"{1000 * speculative.first_token_seconds:.0f}",
        ),
        ("speedup", "1.00", f"{comparison.speedup:.2f}"),
        ("mean accepted length", f"{plain.record.mean_accepted_length:.2f}", f"{record.mean_accepted_length:.2f}"),
        ("accepted / verified", "-", f"{record.num_accepted}/{record.num_verified}"),
    ]
    for label, left, right in rows:
        print(f"{label:<26}{left:>10}{right:>{width}}")
    if acceptance := by_position(record):
        print("acceptance by position    " + "  ".join(f"{share:.2f}" for share in acceptance))
    print(f"medians over {repeat} runs of each side, by turns; mean accepted length = tokens emitted / target passes;")
    print("acceptance at j = blocks whose drafts up to j were all accepted / blocks in which draft j was verified")


def by_position(record: SpeculationRecord) -> list[float]:
    """accepted_at[j] / verified_at[j]: of the blocks that had a draft at j, the share that kept it."""
    return [a / v for a, v in zip(record.accepted_at, record.verified_at, strict=True) if v]


def describe(comparison: Comparison, *, info: dict[str, Any]) -> dict[str, Any]:
    """The comparison for JSON. Times in seconds."""
    sides = {"plain": comparison.plain, "speculative": comparison.speculative}
    return {
        "info": info,
        "speculation": dataclasses.asdict(comparison.speculation),
        "identical": comparison.first_difference is None,
        "first_difference": comparison.first_difference,
        "speedup": comparison.speedup,
        "acceptance_by_position": by_position(comparison.speculative.record),
    } | {name: _describe_side(side) for name, side in sides.items()}


def _describe_side(side: Side) -> dict[str, Any]:
    return {
        "text": side.text,
        "token_ids": side.tokens,
        "decode_tokens_per_second": side.rate,
        "decode_tokens_per_second_of_runs": [decode_rate(run) for run in side.runs],
        "time_to_first_token": side.first_token_seconds,
        "record": side.record.as_dict(),
    }


def _milliseconds(rate: float) -> str:
    return f"{1000 / rate:.1f}" if rate else "-"


def _why(params: SamplingParams) -> str:
    if not params.greedy and params.seed is None:
        return "Sampled answers differ by chance; with --seed they are the same, with any drafter."
    return "In normal mode two near-equal logits may change places (docs/losslessness.md); --exact rules that out."
