"""EagleDrafter: an EAGLE-3 style head at work, one token a step of its own.
It must never draft from a context that is not complete, nor let a token's survival depend on the token.

Shapes: R rows, D hidden, W draft vocabulary, V columns of the target's logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.draft.base import DraftRow, Taps
from dspark.draft.draw import draw_token, takes_best
from dspark.heads.blocks import Context
from dspark.heads.eagle import EagleHead
from dspark.heads.rope import rope_tables
from dspark.model.cache import KVCache
from dspark.types import Draft, Verdict


class EagleDrafter:
    """Drafts up to block_size tokens a row, token by token, all rows at once (EAGLE-3, section 3.1).

    The head's layer of the cache holds, at the place of token t, the keys and values of (state of t, token t + 1). A
    page found again by its prefix may hold at its last place those of another following token: a guess gets worse by
    that, nothing else. survival[j]: product of the largest probabilities up to j.
    """

    name = "eagle3"
    num_places = 0

    def __init__(self, head: EagleHead, cache: KVCache, *, layer: int, vocab_size: int, num_valid_tokens: int) -> None:
        """`layer`: the cache's layer that is the head's. `vocab_size`: V. `num_valid_tokens`: ids from there on are
        padding and are never drafted."""
        self.head = head
        self.cache = cache
        self.layer = layer
        self.vocab_size = vocab_size
        self.taps: Sequence[int] = head.config.taps
        self.max_positions = head.config.max_positions
        self.device = cache.keys[0].device
        self.rope = rope_tables(head.config, head.config.max_positions, device=self.device)
        self.draft_ids = head.draft_ids.to(self.device)
        self.padding: Tensor = self.draft_ids >= num_valid_tokens
        self.features: dict[int, tuple[int, Tensor]] = {}
        """Position and fused state of the last cached token of each sequence."""

    @torch.no_grad()
    def propose(
        self,
        rows: Sequence[DraftRow],
        limits: Sequence[int],
        *,
        floors: Sequence[float] | None = None,
    ) -> list[Draft]:
        floors = floors if floors is not None else [0.0] * len(rows)
        drafts = [Draft(source=self.name) for _ in rows]
        size = self.head.config.block_size
        able = [i for i, (row, limit) in enumerate(zip(rows, limits)) if limit > 0 and self._can_draft(row)]
        if not able:
            return drafts
        laws: dict[int, list[Tensor]] = {i: [] for i in able}
        claims, alive = dict.fromkeys(able, 1.0), dict.fromkeys(able, 1.0)
        context = self._context([rows[i] for i in able])
        feature = torch.stack([self.features[rows[i].seq_id][1] for i in able])
        read = torch.tensor([rows[i].tokens[-1] for i in able], device=self.device)
        own = None
        active = set(able)
        for j in range(min(size, max(limits[i] for i in able))):
            place = context.anchors + j
            step = self.head.step(read, feature, (self.rope[0][place], self.rope[1][place]), context, own)
            feature, own = step.hidden, step.rows
            logits = step.logits.float().masked_fill(self.padding, -torch.inf)
            before = dict(claims)
            self._choose(able, active, rows, drafts, logits, laws, claims)
            for i in active:
                if len(drafts[i].tokens):
                    alive[i] *= rows[i].judge(len(drafts[i].tokens) - 1, claims[i] / before[i] if before[i] else 0.0)
            active = {i for i in active if len(drafts[i].tokens) < limits[i] and alive[i] >= floors[i]}
            if not active:
                break
            read = torch.tensor([(drafts[i].tokens or rows[i].tokens)[-1] for i in able], device=self.device)
        for i in able:
            if laws[i]:
                drafts[i].q = torch.stack(laws[i])
        return drafts

    def observe(self, rows: Sequence[DraftRow], verdicts: Sequence[Verdict | None], taps: Taps | None = None) -> None:
        """Keep keys and values of the tokens that are now cached, and the last one's state for the next draft."""
        if taps is not None:
            self._store(rows, taps)

    def forget(self, seq_id: int) -> None:
        self.features.pop(seq_id, None)

    # -- inside

    def _can_draft(self, row: DraftRow) -> bool:
        anchor = len(row.tokens) - 1
        known, _ = self.features.get(row.seq_id, (-2, None))
        complete = row.num_cached == anchor and known == anchor - 1
        return complete and anchor + self.head.config.block_size <= self.max_positions

    def _context(self, rows: Sequence[DraftRow]) -> Context:
        """Rows before the last cached token's, gathered from the cache."""
        group, size = self.cache.group_of[self.layer], self.cache.page_size
        keys, values, lengths = [], [], []
        for row in rows:
            length = row.num_cached - 1
            owned = self.cache.sequences[row.seq_id].tables[group].pages[: -(-length // size)]
            pages = torch.tensor(owned, dtype=torch.long, device=self.device)
            keys.append(self.cache.keys[self.layer][pages].flatten(0, 1)[:length])
            values.append(self.cache.values[self.layer][pages].flatten(0, 1)[:length])
            lengths.append(length)
        return Context(
            keys=keys, values=values, counts=[1] * len(rows), anchors=torch.tensor(lengths, device=self.device)
        )

    def _choose(
        self,
        able: Sequence[int],
        active: set[int],
        rows: Sequence[DraftRow],
        drafts: list[Draft],
        logits: Tensor,
        laws: dict[int, list[Tensor]],
        claims: dict[int, float],
    ) -> None:
        """One token for each active row."""
        top, best = logits.max(dim=-1)
        sure = torch.exp(top - torch.logsumexp(logits, dim=-1)).tolist()
        ids = self.draft_ids[best].tolist()
        for n, i in enumerate(able):
            if i not in active:
                continue
            row, draft = rows[i], drafts[i]
            token, claim = ids[n], sure[n]
            if not takes_best(row.sampler, draft.tokens, token):
                drawn = draw_token(
                    row,
                    logits[n],
                    self.draft_ids,
                    vocab_size=self.vocab_size,
                    drafted=draft.tokens,
                    laws=laws[i],
                )
                if drawn is None:
                    active.discard(i)
                    continue
                token, claim = drawn
            claims[i] *= claim
            draft.tokens.append(token)
            draft.survival.append(claims[i])

    @torch.no_grad()
    def _store(self, rows: Sequence[DraftRow], taps: Taps) -> None:
        packed = taps.packed
        features = self.head.fuse(taps.hidden)
        index: list[int] = []
        following: list[int] = []
        for i, row in enumerate(rows):
            first, stop = packed.row_starts[i : i + 2].tolist()
            start = int(packed.positions[first])
            # The last token of a finished answer is cached and has no token after it.
            count = min(stop - first, row.num_cached - start, len(row.tokens) - 1 - start)
            index += range(first, first + count)
            following += row.tokens[start + 1 : start + 1 + count]
            self.features[row.seq_id] = (start + count - 1, features[first + count - 1].clone())
        positions = torch.from_numpy(packed.positions[index]).long().to(self.device)
        k, v = self.head.keys_values(
            torch.tensor(following, device=self.device),
            features[torch.tensor(index, device=self.device)],
            (self.rope[0][positions], self.rope[1][positions]),
        )
        slots = packed.slots[self.cache.group_of[self.layer]][np.array(index)]
        places = torch.from_numpy(slots).long().to(self.device)
        for cache, new in ((self.cache.keys[self.layer], k), (self.cache.values[self.layer], v)):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, places, new.to(cache.dtype))
