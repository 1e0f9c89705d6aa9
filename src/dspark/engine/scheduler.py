"""Scheduler: which sequences take part in a step, and with how many tokens.
It must never look at logits, and never let a sequence hold a place without the pages for it."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dspark.model.cache import KVCache
from dspark.plan.admit import LOOK_AHEAD, Admission, Applicant
from dspark.types import Sequence


@dataclass(kw_only=True)
class Work:
    """One sequence's part of a step: `num_tokens` of its pending tokens, and whether that reaches its end (so that it
    samples). `max_drafts`: drafts it has pages and budget for. `weight`: what a token of it is worth (plan/pace)."""

    seq: Sequence
    num_tokens: int
    samples: bool
    max_drafts: int = 0
    weight: float = 1.0


class Scheduler:
    """First come, first served, by priority; running sequences before waiting ones. `admission` may know better.

    A step has at most `max_tokens` packed tokens. Sequences that only need their last token come first, then prompt
    chunks share what is left. When pages run out, the youngest running sequence of the least urgent is preempted: its
    pages are given back and it waits at the front, to be computed again (from its prefix, where that is still cached).
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_seqs: int,
        max_tokens: int,
        num_places: int = 0,
        admission: Admission | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`num_places`: places behind the cached tokens that a drafting sequence needs at least (Drafter). `clock`:
        seconds."""
        self.cache = cache
        self.admission = admission or Admission()
        self.clock = clock
        self.num_places = num_places
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preempted = 0

    def add(self, seq: Sequence) -> None:
        """Queue behind everything of the same or a higher priority (a smaller number is more urgent, as in vLLM), and
        behind what has been overtaken often enough."""
        index = len(self.waiting)
        while index and self._may_pass(self.waiting[index - 1], seq):
            index -= 1
        self.admission.begin(seq.id, floor=seq.params.min_tokens_per_second, priority=seq.request.priority)
        self.admission.pass_over([passed.id for passed in list(self.waiting)[index:]])
        self.waiting.insert(index, seq)

    def _may_pass(self, other: Sequence, seq: Sequence) -> bool:
        return other.request.priority > seq.request.priority and self.admission.may_overtake(other.id)

    def remove(self, seq: Sequence) -> None:
        """The sequence has ended or was aborted: give its place and pages back."""
        self.admission.forget(seq.id)
        if seq in self.running:
            self.running.remove(seq)
            self.cache.close(seq.id)
        else:
            self.waiting.remove(seq)

    def emitted(self, seq: Sequence, count: int, *, packed: int) -> None:
        """A step gave the sequence `count` tokens for `packed` rows of the pass."""
        self.admission.pace.emitted(seq.id, count, packed=packed, now=self.clock())

    def admit(self, want_drafts: Callable[[Sequence], int]) -> list[Work]:
        """The works of this step. `want_drafts(seq)`: the most drafts a decoding sequence could use; fewer are granted
        where tokens or pages are short, since a draft must never push another sequence out."""
        works: list[Work] = []
        budget, now = self.max_tokens, self.clock()
        decoding = [seq.id for seq in self.running if seq.num_pending == 1]
        weights = self.admission.pace.weights(decoding, now)
        resting = self.admission.resting(decoding, weights)
        prompts = self.admission.prompt_tokens([i for i in decoding if i not in resting], most=budget, now=now)
        num_preempted = self.num_preempted
        for seq in sorted(self.running, key=lambda seq: seq.num_pending > 1):
            if seq.id in resting or (self.num_preempted > num_preempted and seq not in self.running):
                continue  # preempted by an earlier one
            reads = seq.num_pending > 1
            count = min(seq.num_pending, budget, prompts) if reads else min(1, budget)
            if count and self._make_room(seq, seq.num_cached + count):
                works.append(Work(seq=seq, num_tokens=count, samples=count == seq.num_pending))
                budget -= count
                prompts -= count if reads else 0
        if self.num_preempted > num_preempted:
            works = [work for work in works if work.seq in self.running]
        while self.waiting and len(self.running) < self.max_seqs and min(budget, prompts) > 0:
            work = self._start(self._next(), min(budget, prompts))
            if work is None:
                break
            works.append(work)
            budget -= work.num_tokens
            prompts -= work.num_tokens
        if not works and self.num_preempted > num_preempted:
            return self.admit(want_drafts)  # who was to take part had to give way, and others sat out for it
        worth = dict(zip(decoding, weights)) if weights is not None else {}
        for work in works:
            if work.samples and work.num_tokens == 1:
                work.weight = worth.get(work.seq.id, 1.0)
                work.max_drafts = self._grant(work.seq, min(want_drafts(work.seq), budget))
                budget -= work.max_drafts
        return works

    def _next(self) -> Sequence:
        """The waiting sequence that is to run next."""
        if len(self.waiting) == 1:
            return self.waiting[0]
        waiting = [
            Applicant(seq_id=seq.id, priority=seq.request.priority, num_tokens=seq.num_pending)
            for seq in itertools.islice(self.waiting, LOOK_AHEAD)
        ]
        index = self.admission.next_waiting(waiting, [seq.id for seq in self.running])
        return self.waiting[index]

    def _start(self, seq: Sequence, budget: int) -> Work | None:
        """Move a waiting sequence to running, if a first chunk of it fits without preempting anyone."""
        reuse = seq.params.prompt_logprobs is None
        seq.num_cached = self.cache.open(seq.id, seq.tokens if reuse else seq.tokens[:1])
        count = min(seq.num_pending, budget)
        # A place is taken only when the whole prompt fits beside what runs: half a prompt would have to be preempted.
        if not self.cache.reserve(seq.id, seq.num_cached + count, ahead=len(seq.tokens)):
            self.cache.close(seq.id)
            seq.num_cached = 0
            return None
        index = self.waiting.index(seq)
        self.admission.pass_over([passed.id for passed in itertools.islice(self.waiting, index)])
        del self.waiting[index]
        if seq.start_time is None:
            seq.start_time, seq.num_prefix_hits = self.clock(), seq.num_cached
        self.running.append(seq)
        return Work(seq=seq, num_tokens=count, samples=count == seq.num_pending)

    def _make_room(self, seq: Sequence, length: int) -> bool:
        """Reserve pages for `seq`, preempting the youngest of the least urgent others (or at last itself)."""
        while not self.cache.reserve(seq.id, length):
            victim = max(reversed(self.running), key=lambda other: other.request.priority)
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
