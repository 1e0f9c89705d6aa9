"""Proposer: the class that vLLM takes as `speculative_config.model` (method "custom_class").
It must never raise into vLLM's worker, or draw a draft: vLLM verifies each as certain, at any temperature.

vLLM 0.32 tells a proposer what was sampled and the tokens of each row, but neither request ids nor sampling settings,
and rows move. A request is known again by its tokens: its number of tokens before this step, and those at its start and
end. Two that are mixed up have the same of all these; it costs drafts, never text.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.integrations.vllm.companion import Companion
from dspark.integrations.vllm.guard import Guard, logger
from dspark.integrations.vllm.settings import Settings, read_settings, unsupported

PROBE_TOKENS = 32
"""At each end of a request's tokens, by which it is known again."""
FORGET_AFTER = 8
"""Calls without a request after which it is taken for ended; pipelined batches come in turns."""
LONGEST_STEP = 60.0
"""Seconds; what takes longer was no step."""


@dataclass(kw_only=True)
class _Known:
    """A running request: its number at the companion, its length and ends when last seen, and at which call."""

    number: int
    length: int
    start: list[int]
    end: list[int]
    seen: int


class Proposer:
    """Suffix lookups of a length of its own for each request, by our policy and budget, over step times as they come.

    With our Scheduler in place that drafts, and this proposes nothing.
    """

    def __init__(self, vllm_config: Any, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """`vllm_config`: a VllmConfig. Raises ValueError for settings that are wrong."""
        settings = read_settings(vllm_config)
        self.clock = clock
        self.guard = Guard(unsupported())
        self.active = not settings.scheduled
        if self.active:
            self.companion = build_companion(settings, clock=clock)
            atexit.register(self.companion.close)
        self.max_known = 4 * settings.max_seqs
        self.known: dict[int, _Known] = {}
        self.slots: dict[int, int] = {}
        self.num_calls = 0
        self.proposed_at: float | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Called with the target; lookups need none."""

    def propose(self, sampled: Sequence[Sequence[int]], *rest: Any, **more: Any) -> list[list[int]]:
        """Drafts for each row; none for rows that sampled nothing. As vLLM 0.32 calls it: `rest` are the rows' numbers
        of tokens, `sampled` among them, and their tokens, arrays of (rows) and (rows, context)."""
        nothing: list[list[int]] = [[] for _ in sampled]
        if not self.active:
            return nothing
        return self.guard(lambda: self._propose(sampled, *rest[:2]), nothing)

    def _propose(self, sampled: Sequence[Sequence[int]], lengths: Any, tokens: Any) -> list[list[int]]:
        began = self.clock()
        self.num_calls += 1
        drafting = [i for i, new in enumerate(sampled) if len(new)]
        found = self._recognise(drafting, sampled, lengths, tokens)
        before = {work.seq.id for work in self.companion.works}
        numbers = [self._follow(i, found.get(i), sampled[i], tokens[i], int(lengths[i])) for i in drafting]
        # A step tells a price where it decoded what was proposed for, and read no prompt.
        whole = len(found) == len(sampled) and before == set(numbers)
        if whole and self.proposed_at is not None and began - self.proposed_at < LONGEST_STEP:
            self.companion.time(began - self.proposed_at)
        drafts: list[list[int]] = [[] for _ in sampled]
        for i, draft in zip(drafting, self.companion.propose(numbers)):
            drafts[i] = draft
        self.slots = dict(zip(drafting, numbers))
        self._forget()
        self.proposed_at = self.clock()
        return drafts

    def _recognise(self, rows: Sequence[int], sampled: Any, lengths: Any, tokens: Any) -> dict[int, int]:
        """Row -> number of the request that it goes on with; rows of new requests are left out."""
        found: dict[int, int] = {}
        taken: set[int] = set()
        by_length: dict[int, list[int]] = {}
        for number, known in self.known.items():
            by_length.setdefault(known.length, []).append(number)
        for i in rows:
            before = int(lengths[i]) - len(sampled[i])
            candidates = [number for number in by_length.get(before, ()) if number not in taken]
            if (last := self.slots.get(i)) in candidates:
                candidates.insert(0, last)
            for number in candidates:
                if self._fits(self.known[number], tokens[i], before):
                    found[i] = number
                    taken.add(number)
                    break
        return found

    @staticmethod
    def _fits(known: _Known, tokens: Any, length: int) -> bool:
        return (
            tokens[max(0, length - PROBE_TOKENS) : length].tolist() == known.end
            and tokens[: min(length, PROBE_TOKENS)].tolist() == known.start
        )

    def _follow(self, i: int, number: int | None, sampled: Sequence[int], tokens: Any, length: int) -> int:
        """Tell the companion what row i emitted; returns the request's number."""
        if number is None:
            number = self.companion.begin(tokens[: length - len(sampled)].tolist())
            start = tokens[: min(length, PROBE_TOKENS)].tolist()
            self.known[number] = _Known(number=number, length=length, start=start, end=[], seen=self.num_calls)
        self.companion.commit(number, [int(token) for token in sampled])
        known = self.known[number]
        known.length, known.seen = length, self.num_calls
        if len(known.start) < PROBE_TOKENS:
            known.start = tokens[: min(length, PROBE_TOKENS)].tolist()
        known.end = tokens[max(0, length - PROBE_TOKENS) : length].tolist()
        return number

    def _forget(self) -> None:
        """Requests that have not been seen for long, and the longest unseen beyond what is kept at most."""
        unseen = [known for known in self.known.values() if known.seen <= self.num_calls - FORGET_AFTER]
        if (excess := len(self.known) - len(unseen) - self.max_known) > 0:
            others = sorted((k for k in self.known.values() if k not in unseen), key=lambda k: k.seen)
            unseen += others[:excess]
        for known in unseen:
            del self.known[known.number]
            self.companion.end(known.number)


def build_companion(settings: Settings, *, clock: Callable[[], float] = time.perf_counter) -> Companion:
    """As the settings say, which is told to the log."""
    speculation, where = settings.speculation, "scheduler" if settings.scheduled else "proposer"
    told = speculation.method, speculation.policy, speculation.num_speculative_tokens, where
    logger.info("dspark drafts by %s, policy %s, at most %d tokens, in the %s", *told)
    return Companion(
        settings=settings.speculation,
        max_context=settings.max_context,
        max_tokens=settings.max_tokens,
        profile=settings.profile,
        info={"engine": "vllm", "model": settings.model},
        clock=clock,
    )
