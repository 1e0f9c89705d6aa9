"""Engine: the loop. One step is eight short phases, named as in docs/architecture.md.
It must never know which drafter, policy or model path it runs, or who asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.draft.base import DraftRow, Taps
from dspark.draft.draw import with_forced
from dspark.engine.ends import StopWatcher, append_token
from dspark.engine.scheduler import Scheduler, Work
from dspark.engine.speculator import RowPlan, Speculator
from dspark.engine.totals import Clock, EngineTotals
from dspark.law import largest
from dspark.model.batch import Packed, Span, pack
from dspark.model.cache import KVCache
from dspark.sampling import RowSampler, largest_legal, packed_laws, raw_logprobs
from dspark.types import TARGET_PHASES, Draft, RowStep, Sequence, StepStats, Verdict
from dspark.verify.rejection import accept, accept_greedy


@dataclass(kw_only=True)
class _Row:
    """A sequence with what the loop keeps for it."""

    seq: Sequence
    sampler: RowSampler
    watcher: StopWatcher
    plan: RowPlan

    def draft_row(self) -> DraftRow:
        seq = self.seq
        return DraftRow(
            seq_id=seq.id,
            tokens=seq.tokens,
            num_prompt=seq.num_prompt,
            num_cached=seq.num_cached,
            params=seq.params,
            sampler=self.sampler,
            thrifty=self.plan.limit.thrifty,
            weight=self.plan.weight,
            judge=self.plan.judge,
        )


class Engine:
    """Continuous batching with speculation over one model and one cache."""

    def __init__(
        self,
        runner: Any,
        cache: KVCache,
        *,
        speculator: Speculator,
        scheduler: Scheduler,
        eos_token_ids: Seq[int],
        num_valid_tokens: int,
        max_context: int,
        check: bool = False,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.speculator = speculator
        self.scheduler = scheduler
        self.eos_token_ids = tuple(eos_token_ids)
        self.num_valid_tokens = num_valid_tokens
        self.max_context = max_context
        self.check = check
        self.rows: dict[int, _Row] = {}
        self.sinks: list[Callable[[StepStats], None]] = []
        self.row_sinks: list[Callable[[RowStep], None]] = []  # one with a method `aborted` hears of aborts too
        self.totals = EngineTotals()
        self.taps = tuple(speculator.drafter.taps)

    # -- the page

    def step(self) -> list[Sequence]:
        """Advance every running sequence; returns those that emitted tokens."""
        clock = Clock()
        works = self._admit()
        clock.mark("admit")
        self._limit(works)
        clock.mark("limit")
        drafts = self._draft(works)
        clock.mark("draft")
        kept = self._plan(works, drafts)
        clock.mark("plan")
        packed = self._pack(works, kept)
        clock.mark("pack")
        output = self.runner.forward(packed, self.cache, taps=self.taps)
        clock.mark("run")
        verdicts = self._verify(works, kept, output.logits)
        clock.mark("verify")
        stats = self._commit(works, drafts, kept, verdicts, packed, output)
        clock.mark("commit")
        self.speculator.time(works, drafts, seconds=clock.seconds)
        self.scheduler.admission.time(sum(clock.seconds.values()) - sum(clock.seconds[name] for name in TARGET_PHASES))
        self._report(stats, works, packed, clock.seconds)
        return [work.seq for work in works if work.samples]

    @property
    def has_work(self) -> bool:
        return bool(self.rows)

    def add(self, seq: Sequence, sampler: RowSampler, watcher: StopWatcher) -> None:
        """Queue a sequence. Its prompt must be shorter than the context, its policy known (checked at the door,
        engine/llm)."""
        plan = self.speculator.begin(seq, drafts=self._want_drafts(seq) > 0)
        self.rows[seq.id] = _Row(seq=seq, sampler=sampler, watcher=watcher, plan=plan)
        self.scheduler.add(seq)

    def abort(self, seq_id: int) -> None:
        """Stop a sequence wherever it is; its pages are free at once. Unknown ids are ignored: it may have ended."""
        if (row := self.rows.get(seq_id)) is not None:
            row.seq.finish_reason = "abort"
            self._stop(row)

    def recover(self, error: Exception) -> list[Sequence]:
        """After a step that raised `error`: end every sequence that ran with it, so that those who wait may go on, and
        return the ended. Where none ran, those who wait are what cannot go on. Raises what the cache's check finds."""
        failed = list(self.scheduler.running) or list(self.scheduler.waiting)
        for row in [self.rows[seq.id] for seq in failed]:
            if row.seq.finish_reason is None:
                row.seq.finish_reason, row.seq.stop_reason = "error", f"{type(error).__name__}: {error}"
            self._stop(row)
        self.cache.check()
        return failed

    def _stop(self, row: _Row) -> None:
        """End a sequence between steps."""
        row.watcher.finish(row.seq, may_stop=False)
        if row.seq.text_ends:
            row.seq.text_ends[-1] = len(row.seq.text)
        self._retire(row.seq)
        for sink in self.row_sinks:
            if (hear := getattr(sink, "aborted", None)) is not None:
                hear(row.seq)

    # -- the phases

    def _admit(self) -> list[Work]:
        works = self.scheduler.admit(self._want_drafts)
        assert works, "nothing can run although sequences wait: the cache is smaller than one context"
        return works

    def _want_drafts(self, seq: Sequence) -> int:
        """Drafts that could be emitted: not past the budget of tokens or the context, one place left for the target's
        own token."""
        control = seq.params.control
        if not control.enabled:
            return 0
        room = self.max_context - len(seq.tokens)
        if seq.params.max_tokens is not None:
            room = min(room, seq.params.max_tokens - seq.num_output)
        longest = self.speculator.max_tokens
        if control.max_tokens is not None:
            longest = min(longest, control.max_tokens)
        return max(0, min(room - 1, longest))

    def _limit(self, works: list[Work]) -> None:
        """Each row's policy lowers its largest draft."""
        self.speculator.limit(works, [self.rows[work.seq.id].plan for work in works])

    def _draft(self, works: list[Work]) -> list[Draft]:
        """One draft a work, empty for those that may not draft."""
        drafts = [Draft() for _ in works]
        chosen = [i for i, work in enumerate(works) if work.max_drafts > 0]
        if chosen:
            rows = [self.rows[works[i].seq.id] for i in chosen]
            limits = [works[i].max_drafts for i in chosen]
            proposals = self.speculator.drafter.propose(
                [row.draft_row() for row in rows], limits, floors=[row.plan.limit.floor for row in rows]
            )
            for i, row, limit, proposal in zip(chosen, rows, limits, proposals):
                drafts[i] = with_forced(row.sampler, proposal, limit)
                assert len(drafts[i].tokens) <= limit and len(drafts[i].survival) == len(drafts[i].tokens)
        return drafts

    def _plan(self, works: list[Work], drafts: list[Draft]) -> list[Draft]:
        """The prefix of each draft to verify."""
        plans = [self.rows[work.seq.id].plan for work in works]
        return self.speculator.keep(works, plans, drafts, max_tokens=self.scheduler.max_tokens)

    def _pack(self, works: list[Work], kept: list[Draft]) -> Packed:
        spans = []
        for work, draft in zip(works, kept):
            seq, start = work.seq, work.seq.num_cached
            tokens = seq.tokens[start : start + work.num_tokens] + draft.tokens
            num_logits = 1 + len(draft.tokens) if work.samples else 0
            if seq.params.prompt_logprobs is not None and start < seq.num_prompt:
                num_logits = len(tokens)
            spans.append(Span(seq_id=seq.id, start=start, tokens=tokens, num_logits=num_logits))
        return pack(spans, self.cache)

    def _verify(self, works: list[Work], kept: list[Draft], logits: Tensor) -> list[Verdict | None]:
        """A verdict for each row that samples."""
        best = largest(logits, self.num_valid_tokens) if len(logits) else []
        verdicts: list[Verdict | None] = [None] * len(works)
        drawn: list[int] = []
        ranges = self._logit_ranges(works, kept)
        for i, (_, stop) in enumerate(ranges):
            if works[i].samples:
                sampler, start = self.rows[works[i].seq.id].sampler, stop - 1 - len(kept[i].tokens)
                if sampler.legal_greedy:
                    choice = best[start:stop]
                    if sampler.grammar is not None:
                        choice = largest_legal(logits[start:stop], choice, kept[i].tokens, sampler.grammar)
                    verdicts[i] = accept_greedy(choice, kept[i])
                else:
                    drawn.append(i)
        if drawn:
            rows = [self.rows[works[i].seq.id] for i in drawn]
            blocks = [logits[ranges[i][1] - 1 - len(kept[i].tokens) : ranges[i][1]] for i in drawn]
            laws = packed_laws(
                [row.sampler for row in rows],
                torch.cat(blocks),
                tokens_before=[row.seq.tokens for row in rows],
                drafts=[kept[i].tokens for i in drawn],
            )
            for i, row, law in zip(drawn, rows, laws.split([len(block) for block in blocks])):
                verdicts[i] = accept(law, kept[i], row.sampler.noise, position=len(row.seq.tokens))
        return verdicts

    def _commit(
        self,
        works: list[Work],
        drafts: list[Draft],
        kept: list[Draft],
        verdicts: list[Verdict | None],
        packed: Packed,
        output: Any,
    ) -> StepStats:
        """Append what was decided, roll the cache back to it, and tell everybody."""
        stats = StepStats(step=self.totals.num_steps, predicted_seconds=self.speculator.predicted())
        rows, finished = [], []
        ranges = self._logit_ranges(works, kept)
        for work, draft, keep, verdict, (start, stop) in zip(works, drafts, kept, verdicts, ranges):
            row, seq = self.rows[work.seq.id], work.seq
            if seq.params.prompt_logprobs is not None and seq.num_cached < seq.num_prompt:
                self._store_prompt_logprobs(seq, output.logits[start:stop])
            if verdict is None:
                seq.num_cached += work.num_tokens
                stats.num_prefill_tokens += work.num_tokens
            else:
                stats.num_prefill_tokens += work.num_tokens - 1
                before = len(seq.tokens)
                self._emit(row, keep.source, verdict, output.logits[stop - 1 - len(keep.tokens) : stop])
                emitted = len(seq.tokens) - before
                accepted = min(emitted, verdict.num_accepted)
                seq.num_cached = before + accepted
                self.scheduler.emitted(seq, emitted, packed=1 + len(keep.tokens))
                self._count(seq, stats, drafted=draft, verified=keep, accepted=accepted, emitted=emitted)
                self.speculator.learn(seq.id, row.plan, draft, keep, verdict)
                for sink in self.row_sinks:
                    sink(self._row_step(row, draft, keep, accepted=accepted, emitted=emitted, packed=packed.num_tokens))
            self.cache.commit(seq.id, seq.tokens, seq.num_cached)
            rows.append(row.draft_row())
            if seq.finish_reason is not None:
                finished.append(seq)
        taps = Taps(packed=packed, hidden=output.taps) if self.taps else None
        self.speculator.drafter.observe(rows, verdicts, taps)
        for seq in finished:
            self._retire(seq)
        return stats

    # -- parts of phases

    def _logit_ranges(self, works: list[Work], kept: list[Draft]) -> list[tuple[int, int]]:
        """The rows of the logits that belong to each work; mirrors `_pack`."""
        ranges, start = [], 0
        for work, draft in zip(works, kept):
            count = 1 + len(draft.tokens) if work.samples else 0
            if work.seq.params.prompt_logprobs is not None and work.seq.num_cached < work.seq.num_prompt:
                count = work.num_tokens + len(draft.tokens)
            ranges.append((start, start + count))
            start += count
        return ranges

    def _emit(self, row: _Row, source: str, verdict: Verdict, logits: Tensor) -> None:
        """Append the verdict's tokens one by one until one ends the answer."""
        seq = row.seq
        before = len(seq.tokens)
        now = time.perf_counter()
        for token, origin in zip(verdict.tokens, verdict.origins(source)):
            try:
                ended = self._append(row, token)
            except Exception as error:  # what is wrong with one answer must not end the others
                if self.check:
                    raise
                seq.finish_reason, seq.stop_reason, ended = "error", f"{type(error).__name__}: {error}", True
            if len(seq.origins) < seq.num_output:  # a fault may have come before the token was appended
                seq.origins.append(origin)
                seq.text_ends.append(len(seq.text))
            if ended:
                seq.finish_time = now
                break
        if seq.first_token_time is None:
            seq.first_token_time = now
        if seq.params.logprobs is not None:
            emitted = seq.tokens[before:]
            seq.logprobs.extend(raw_logprobs(logits[: len(emitted)], emitted, seq.params.logprobs))

    def _append(self, row: _Row, token: int) -> bool:
        """One token; whether it ends the answer."""
        row.sampler.advance(token)
        grammar = row.sampler.grammar
        ended = append_token(
            row.seq,
            token,
            watcher=row.watcher,
            eos_token_ids=self.eos_token_ids,
            max_context=self.max_context,
            complete=grammar is not None and grammar.ended,
        )
        if grammar is not None and grammar.fault is not None:
            if not ended:
                row.watcher.finish(row.seq, may_stop=False)
            row.seq.finish_reason, row.seq.stop_reason, ended = "error", grammar.fault, True
        return ended

    def _store_prompt_logprobs(self, seq: Sequence, logits: Tensor) -> None:
        """Rows predict positions num_cached + 1 ..; position 0 has no prediction. After a preemption what is there
        stays."""
        if not seq.prompt_logprobs:
            seq.prompt_logprobs.append(None)
        skip = len(seq.prompt_logprobs) - 1 - seq.num_cached
        targets = seq.tokens[len(seq.prompt_logprobs) : min(seq.num_cached + len(logits) + 1, seq.num_prompt)]
        if targets:
            assert seq.params.prompt_logprobs is not None
            rows = logits[skip : skip + len(targets)]
            seq.prompt_logprobs.extend(raw_logprobs(rows, targets, seq.params.prompt_logprobs))

    def _count(
        self, seq: Sequence, stats: StepStats, *, drafted: Draft, verified: Draft, accepted: int, emitted: int
    ) -> None:
        num_drafted, num_verified = len(drafted.tokens), len(verified.tokens)
        for record in (seq.record, self.totals.record):
            record.add(drafted=num_drafted, verified=num_verified, accepted=accepted, emitted=emitted)
        stats.num_rows += 1
        stats.num_drafted += num_drafted
        stats.num_verified += num_verified
        stats.num_accepted += accepted
        stats.num_emitted += emitted

    def _row_step(self, row: _Row, draft: Draft, keep: Draft, *, accepted: int, emitted: int, packed: int) -> RowStep:
        return RowStep(
            seq=row.seq,
            policy=row.plan.name,
            allowed=row.plan.allowed,
            position=row.seq.num_output - emitted,
            text_kind=row.plan.text_kind,
            source=draft.source,
            limit=row.plan.limit.max_tokens,
            tokens=list(draft.tokens),
            claims=list(draft.survival),
            survival=list(row.plan.survival),
            verified=len(keep.tokens),
            accepted=accepted,
            emitted=emitted,
            packed=packed,
        )

    def _retire(self, seq: Sequence) -> None:
        row = self.rows.pop(seq.id)
        self.scheduler.remove(seq)
        self.speculator.drafter.forget(seq.id)
        self.speculator.forget(seq.id, row.plan)

    def _report(self, stats: StepStats, works: list[Work], packed: Packed, seconds: dict[str, float]) -> None:
        totals = self.totals
        stats.seconds = seconds
        stats.num_packed_tokens = packed.num_tokens
        stats.num_running = len(self.scheduler.running)
        stats.num_waiting = len(self.scheduler.waiting)
        stats.num_preempted = self.scheduler.num_preempted - totals.num_preempted
        if self.sinks:
            stats.plain_seconds = self.speculator.plain_seconds(works, num_emitted=stats.num_emitted)
        totals.num_steps += 1
        totals.num_prompt_tokens += stats.num_prefill_tokens
        totals.num_output_tokens += stats.num_emitted
        totals.num_preempted = self.scheduler.num_preempted
        for name, value in seconds.items():
            totals.seconds[name] += value
        if self.check:
            self._check_invariants(stats)
        for sink in self.sinks:
            sink(stats)

    def _check_invariants(self, stats: StepStats) -> None:
        """The step laws of docs/architecture.md."""
        assert stats.num_drafted >= stats.num_verified >= stats.num_accepted
        assert stats.num_accepted <= stats.num_emitted <= stats.num_accepted + stats.num_rows
        self.cache.check()
        for row in self.rows.values():
            seq = row.seq
            assert seq.finish_reason is None
            assert seq.num_cached <= len(seq.tokens) - 1, "the last token must be pending"
            assert seq.record.num_emitted == seq.num_output
            row.sampler.check(seq.tokens)
            if seq.params.logprobs is not None:
                assert len(seq.logprobs) == seq.num_output
            if seq in self.scheduler.running:
                for table in self.cache.sequences[seq.id].tables:
                    assert len(table.pages) == -(-seq.num_cached // self.cache.page_size), "pages outlive a rollback"
