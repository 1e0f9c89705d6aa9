"""advice: which draft length pays at which number of running requests, from a server's counters and step times.
It must never say anything of a length that the server has not tried, or call a guess a measurement.

A request drafts in a share f of its steps, and S_j of those drafts hold up to place j. With drafts cut at k a step of n
requests emits n (1 + f sum of S_j, j < k) tokens from n (1 + f min(k, m)) packed rows, m the mean length as drafted.
What rows cost is a line through the steps that were timed, at least two sizes of them: a step's time is the time a
token of one user, times the tokens that a step brings him.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dspark.bench.remote_run import Figures

LEAST_GAIN = 1.02
"""Below which a longer draft is not worth a change."""
VLLM_TABLE = "num_speculative_tokens_per_batch_size"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of one run: how many run together, rows packed a step, seconds of it, and of drafts f, S and m."""

    requests: int
    rows: float
    seconds: float
    share: float
    survival: Sequence[float]
    mean_length: float


@dataclass(frozen=True, kw_only=True)
class Expected:
    """By the number of requests: k -> tokens/s foretold over those of k = 0."""

    gains: Mapping[int, Mapping[int, float]]

    def best(self, requests: int) -> int:
        """The shortest length that comes within LEAST_GAIN of the best."""
        gains = self.gains[requests]
        most = max(gains.values())
        return min(k for k, gain in gains.items() if gain * LEAST_GAIN >= most)


def facts(figures: Figures) -> Facts:
    """Raises ValueError, naming the cure, where the server tells too little."""
    counters = figures.counters
    if not counters.drafts or counters.accepted is None or not counters.accepted_at or not counters.drafted:
        raise ValueError(
            "this server's metrics tell no acceptance by position of new drafts: start it with drafts on, or let "
            "candidates be measured (--command)"
        )
    if figures.tpot is None:
        raise ValueError("the answers have one token each: raise --max-tokens")
    steps = max(1.0, figures.num_tokens - counters.accepted)
    share = min(1.0, counters.drafts / steps)
    mean_length = counters.drafted / counters.drafts
    return Facts(
        requests=figures.concurrency,
        rows=figures.concurrency * (1 + share * mean_length),
        seconds=figures.tpot * figures.num_tokens / steps,
        share=share,
        survival=[min(1.0, accepted / counters.drafts) for accepted in counters.accepted_at],
        mean_length=mean_length,
    )


def expect(runs: Sequence[Facts]) -> Expected:
    """Raises ValueError for steps of one size only."""
    base, slope = line([(run.rows, run.seconds) for run in runs])
    gains = {}
    for run in runs:
        rates = {}
        for k in range(len(run.survival) + 1):
            tokens = run.requests * (1 + run.share * sum(run.survival[:k]))
            rates[k] = tokens / (base + slope * run.requests * (1 + run.share * min(k, run.mean_length)))
        gains[run.requests] = {k: rate / rates[0] for k, rate in rates.items()}
    return Expected(gains=gains)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(base, slope) of least squares, neither below 0, the base above it."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread < 1e-9:
        raise ValueError(
            "steps of one size tell no price of a row: give several numbers of clients, --concurrency 1,4,8"
        )
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    slope = min(max(0.0, slope), 0.999 * mean_y / mean_x)
    return mean_y - slope * mean_x, slope


def batch_table(best: Mapping[int, int]) -> list[list[int]]:
    """vLLM's `num_speculative_tokens_per_batch_size`: [first, last, k] without gaps from 1 on, from the best k by the
    number of running requests; between two that were measured the change is halfway. The last also stands for more."""
    sizes = sorted(best)
    found: list[list[int]] = []
    for index, size in enumerate(sizes):
        first = found[-1][1] + 1 if found else 1
        last = size if index + 1 == len(sizes) else max(size, (size + sizes[index + 1]) // 2)
        if found and found[-1][2] == best[size]:
            found[-1][1] = last
        else:
            found.append([first, last, best[size]])
    return found


def proposal(best: Mapping[int, int], *, engine: str) -> str:
    """In the words of the server's own options."""
    lengths = set(best.values())
    if engine == "tgi":
        return f"--speculate {max(lengths)} (TGI is in maintenance: vLLM or SGLang for new servers)"
    if lengths == {0}:
        return "no drafts: leave speculation off"
    if engine == "dspark":
        return f"--num-speculative-tokens {max(lengths)} (policy adaptive chooses below it)"
    if engine == "sglang":
        steps = f"--speculative-num-steps {max(lengths)} --speculative-num-draft-tokens {max(lengths) + 1}"
        return f"{steps} (with --speculative-eagle-topk 1)"
    if engine == "llama.cpp":
        return f"--draft-max {max(lengths)}"
    if len(lengths) == 1:
        return f'"num_speculative_tokens": {max(lengths)}'
    return f'"num_speculative_tokens": {max(lengths)}, "{VLLM_TABLE}": {batch_table(best)}'
