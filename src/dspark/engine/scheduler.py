"""Scheduler: which sequences take part in a step, and with how many tokens.
It must never look at logits, and never let a sequence hold a place without the pages for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dspark.model.cache import KVCache
from dspark.types import Sequence


@dataclass(kw_only=True)
class Work:
    """One sequence's part of a step: `num_tokens` of its pending tokens, and whether that reaches its end (so that it
    samples). `max_drafts`: drafts it has pages and budget for."""

    seq: Sequence
    num_tokens: int
    samples: bool
    max_drafts: int = 0


class Scheduler:
    """First come, first served, by priority; running sequences before waiting ones.

    A step has at most `max_tokens` packed tokens. Sequences that only need their last token come first, then prompt
    chunks share what is left. When pages run out, the youngest running sequence is preempted: its pages are given back
    and it waits at the front, to be computed again (from its prefix, where that is still cached).
    """

    def __init__(self, cache: KVCache, *, max_seqs: int, max_tokens: int, num_places: int = 0) -> None:
        """`num_places`: places behind the cached tokens that a drafting sequence needs at least (Drafter)."""
        self.cache = cache
        self.num_places = num_places
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preempted = 0

    def add(self, seq: Sequence) -> None:
        """Queue behind everything of the same or a higher priority (a smaller number is more urgent, as in vLLM)."""
        index = len(self.waiting)
        while index and self.waiting[index - 1].request.priority > seq.request.priority:
            index -= 1
        self.waiting.insert(index, seq)

    def remove(self, seq: Sequence) -> None:
        """The sequence has ended or was aborted: give its place and pages back."""
        if seq in self.running:
            self.running.remove(seq)
            self.cache.close(seq.id)
        else:
            self.waiting.remove(seq)

    def admit(self, want_drafts: Callable[[Sequence], int]) -> list[Work]:
        """The works of this step. `want_drafts(seq)`: the most drafts a decoding sequence could use; fewer are granted
        where tokens or pages are short, since a draft must never push another sequence out."""
        works: list[Work] = []
        budget = self.max_tokens
        num_preempted = self.num_preempted
        for seq in sorted(self.running, key=lambda seq: seq.num_pending > 1):
            if self.num_preempted > num_preempted and seq not in self.running:
                continue  # preempted by an earlier one
            count = min(seq.num_pending, budget)
            if count and self._make_room(seq, seq.num_cached + count):
                works.append(Work(seq=seq, num_tokens=count, samples=count == seq.num_pending))
                budget -= count
        if self.num_preempted > num_preempted:
            works = [work for work in works if work.seq in self.running]
        while self.waiting and len(self.running) < self.max_seqs and budget > 0:
            work = self._start(self.waiting[0], budget)
            if work is None:
                break
            works.append(work)
            budget -= work.num_tokens
        for work in works:
            if work.samples and work.num_tokens == 1:
                work.max_drafts = self._grant(work.seq, min(want_drafts(work.seq), budget))
                budget -= work.max_drafts
        return works

    def _start(self, seq: Sequence, budget: int) -> Work | None:
        """Move the first waiting sequence to running, if a first chunk of it fits without preempting anyone."""
        reuse = seq.params.prompt_logprobs is None
        seq.num_cached = self.cache.open(seq.id, seq.tokens if reuse else seq.tokens[:1])
        count = min(seq.num_pending, budget)
        # A place is taken only when the whole prompt fits beside what runs: half a prompt would have to be preempted.
        if not self.cache.reserve(seq.id, seq.num_cached + count, ahead=len(seq.tokens)):
            self.cache.close(seq.id)
            seq.num_cached = 0
            return None
        self.waiting.popleft()
        if not seq.num_output and not seq.num_preemptions:
            seq.num_prefix_hits = seq.num_cached
        self.running.append(seq)
        return Work(seq=seq, num_tokens=count, samples=count == seq.num_pending)

    def _make_room(self, seq: Sequence, length: int) -> bool:
        """Reserve pages for `seq`, preempting the youngest others (or at last itself)."""
        while not self.cache.reserve(seq.id, length):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def _grant(self, seq: Sequence, wanted: int) -> int:
        """The largest number of drafts up to `wanted` whose positions, and the drafter's places, have pages."""
        for count in range(wanted, 0, -1):
            if self.cache.reserve(seq.id, max(len(seq.tokens) + count, seq.num_cached + self.num_places)):
                return count
        return 0

    def preempt(self, seq: Sequence) -> None:
        """Give back the pages; everything emitted stays and is computed again later."""
        self.running.remove(seq)
        self.cache.close(seq.id)
        seq.num_cached = 0
        seq.num_preemptions += 1
        self.num_preempted += 1
        self.waiting.appendleft(seq)
