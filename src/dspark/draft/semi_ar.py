"""SemiAutoregressiveDrafter: a DSpark head at work, one block a row and step.
It must never draft from a context that is not complete, nor let a token's survival depend on the token.

Shapes: R rows, B positions of a block, D hidden, W draft vocabulary, V columns of the target's logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.draft.base import DraftRow, Taps
from dspark.draft.block import BlockRunner
from dspark.draft.draw import cut_illegal, draw_token
from dspark.heads.rope import rope_tables
from dspark.heads.semi_ar import SemiAutoregressiveHead
from dspark.model.cache import KVCache
from dspark.types import Draft, Verdict


@dataclass
class _Job:
    """A row that drafts in this step: where its draft goes, and how long it may be."""

    index: int
    row: DraftRow
    limit: int


class SemiAutoregressiveDrafter:
    """Drafts up to block_size tokens a row in one pass of the head (DSpark, section 3.1).

    The context lies in the target's cache (see draft/block): it survives whatever the cache survives. Greedy rows get
    the likeliest tokens; sampled ones draws from the processed law, handed over as `q`. survival[j] is the product of
    calibrated confidences up to j (section 3.2.1), each known before its token was drawn.
    """

    name = "dspark"

    def __init__(
        self,
        head: SemiAutoregressiveHead,
        cache: KVCache,
        blocks: BlockRunner,
        *,
        layers: Sequence[int],
        vocab_size: int,
        num_valid_tokens: int,
        chain: Any = None,
    ) -> None:
        """`layers`: the cache's layers that the head reads. `vocab_size`: V. `chain`: model/chain.NativeChain, or None
        to use the network's own. `num_valid_tokens`: ids from there on are padding and are never drafted."""
        self.head = head
        self.cache = cache
        self.blocks = blocks
        self.layers = tuple(layers)
        self.chain = chain
        self.vocab_size = vocab_size
        self.taps: Sequence[int] = head.config.taps
        self.num_places = blocks.places
        self.max_positions = head.config.max_positions
        self.features: dict[int, tuple[int, Tensor]] = {}
        """Position and final state of the last cached token of each sequence."""
        self.device = cache.keys[0].device
        self.draft_ids = head.draft_ids.to(self.device)
        padding = self.draft_ids >= num_valid_tokens
        self.padding: Tensor | None = padding if bool(padding.any()) else None
        temperatures = head.config.confidence_temperatures or (1.0,) * head.config.block_size
        self.temperatures = np.array(temperatures, np.float32)
        self.rope = (
            None
            if head.config.context == "target"
            else rope_tables(head.config, head.config.max_positions, device=self.device)
        )

    def propose(
        self,
        rows: Sequence[DraftRow],
        limits: Sequence[int],
        *,
        floors: Sequence[float] | None = None,
    ) -> list[Draft]:
        """See Drafter. `floors` are not consulted: a block costs the same whatever is kept of it."""
        drafts = [Draft(source=self.name) for _ in rows]
        size = self.head.config.block_size
        jobs = [
            _Job(index=i, row=row, limit=min(limit, size))
            for i, (row, limit) in enumerate(zip(rows, limits))
            if limit > 0 and self._can_draft(row)
        ]
        if not jobs:
            return drafts
        logits, hidden = self._run([job.row for job in jobs])
        if self.padding is not None:
            logits[..., self.padding] = -torch.inf
        greedy = [n for n, job in enumerate(jobs) if job.row.sampler is None or job.row.sampler.legal_greedy]
        if greedy:
            self._draft_greedily(jobs, greedy, logits, hidden, drafts)
        for n, job in enumerate(jobs):
            draft = drafts[job.index]
            if n in greedy:
                # Up to the first token that a grammar forbids, the likeliest and the likeliest legal are the same.
                drafts[job.index] = draft = cut_illegal(job.row, draft)
            if len(draft.tokens) < job.limit:
                self._draft_by_law(job, logits[n], hidden[n], draft)
        return drafts

    def observe(self, rows: Sequence[DraftRow], verdicts: Sequence[Verdict | None], taps: Taps | None = None) -> None:
        """Keep what the head needs of the tokens that are now cached: the context's keys and values in the cache
        itself, the last token's final state for the next anchor."""
        if taps is None or not self.taps:
            return
        if self.head.config.context == "fused":
            self._store_context(rows, taps)
        if self.head.config.anchor_feature:
            final = taps.hidden[-1]
            for i, row in enumerate(rows):
                first = int(taps.packed.row_starts[i])
                start = int(taps.packed.positions[first])
                self.features[row.seq_id] = (row.num_cached - 1, final[first + row.num_cached - 1 - start].clone())

    def forget(self, seq_id: int) -> None:
        self.features.pop(seq_id, None)

    # -- inside

    def _can_draft(self, row: DraftRow) -> bool:
        """All but the last token are cached, and the whole block fits."""
        anchor = len(row.tokens) - 1
        complete = row.num_cached == anchor
        if self.head.config.anchor_feature:  # one of before a preemption may be another token's
            known, _ = self.features.get(row.seq_id, (-2, None))
            complete = complete and known == anchor - 1
        return complete and anchor + self.head.config.num_rows <= self.max_positions

    @torch.no_grad()
    def _run(self, rows: Sequence[DraftRow]) -> tuple[Tensor, Tensor]:
        features = None
        if self.head.config.anchor_feature:
            features = torch.stack([self.features[row.seq_id][1] for row in rows])
        anchors = np.array([len(row.tokens) - 1 for row in rows], np.int32)
        return self.blocks([row.seq_id for row in rows], anchors, [row.tokens[-1] for row in rows], features)

    @torch.no_grad()
    def _draft_greedily(
        self, jobs: Sequence[_Job], chosen: Sequence[int], logits: Tensor, hidden: Tensor, drafts: list[Draft]
    ) -> None:
        if len(chosen) < len(jobs):
            logits, hidden = logits[list(chosen)].contiguous(), hidden[list(chosen)].contiguous()
        anchors = [jobs[n].row.tokens[-1] for n in chosen]
        if self.chain is not None:
            limits = np.array([jobs[n].limit for n in chosen], np.int32)
            tokens, sure = self.chain(logits, hidden, np.array(anchors, np.int32), limits)
        else:
            hidden = hidden.to(self.head.dtype)
            found = self.head.draft_greedily(hidden, torch.tensor(anchors, device=self.device), base=logits)
            tokens, sure = found[0].cpu().numpy(), found[1].float().cpu().numpy()
        survival = np.cumprod(1 / (1 + np.exp(-sure / self.temperatures)), axis=1)
        for n, ids, alive in zip(chosen, tokens.tolist(), survival.tolist()):
            job = jobs[n]
            drafts[job.index].tokens = ids[: job.limit]
            drafts[job.index].survival = alive[: job.limit]

    @torch.no_grad()
    def _draft_by_law(self, job: _Job, logits: Tensor, hidden: Tensor, draft: Draft) -> None:
        """Token by token, behind those that the draft has: logits (B, W) and hidden (B, D) of the row."""
        head, row = self.head, job.row
        hidden = hidden.to(head.dtype)
        previous = torch.tensor([row.tokens[-1]], device=self.device)
        state = None if head.markov_head is None else head.markov_head.start(1, hidden)
        laws: list[Tensor] = []
        claim = draft.survival[-1] if draft.survival else 1.0
        for j in range(job.limit):
            at = hidden[j : j + 1]
            known = draft.tokens[j] if j < len(draft.tokens) else None
            words = logits[j]
            if head.markov_head is not None:
                assert state is not None
                state, bias = head.markov_head.step(state, previous, at)
                words = words + bias[0].float()
            if known is not None:
                previous = torch.tensor([known], device=self.device)
                continue
            sure = None
            if head.confidence_head is not None:
                sure = float(torch.sigmoid(head.confidence(at, previous)[0] / float(self.temperatures[j])))
            drawn = draw_token(row, words, self.draft_ids, vocab_size=self.vocab_size, drafted=draft.tokens, laws=laws)
            if drawn is None:
                break
            token, top = drawn
            claim *= top if sure is None else sure
            draft.tokens.append(token)
            draft.survival.append(claim)
            previous = torch.tensor([token], device=self.device)
        if laws:
            draft.q = torch.stack(laws)

    @torch.no_grad()
    def _store_context(self, rows: Sequence[DraftRow], taps: Taps) -> None:
        """Keys and values of the pass's tokens that stay, into the head's layers of the cache."""
        packed = taps.packed
        kept = np.repeat([row.num_cached for row in rows], np.diff(packed.row_starts))
        index = np.flatnonzero(packed.positions < kept)
        if not len(index):
            return
        chosen = torch.from_numpy(index).to(self.device)
        num_states = len(self.head.config.target_layer_ids)
        fused = self.head.fuse([hidden[chosen] for hidden in taps.hidden[:num_states]])
        assert self.rope is not None
        positions = torch.from_numpy(packed.positions[index]).to(self.device).long()
        pairs = self.head.context_of(fused, (self.rope[0][positions], self.rope[1][positions]))
        for layer, (k, v) in zip(self.layers, pairs):
            slots = torch.from_numpy(packed.slots[self.cache.group_of[layer]][index]).to(self.device).long()
            for cache, new in ((self.cache.keys[layer], k), (self.cache.values[layer], v)):
                cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new.to(cache.dtype))
