"""ModelDrafter: a smaller language model with the target's vocabulary, and a cache of its own.
It must never assume that it saw every step: what its cache holds is compared with the committed tokens each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dspark.draft.base import DraftRow
from dspark.draft.draw import FORCED_CLAIM, draw_token, takes_best
from dspark.model.batch import Span, pack
from dspark.model.cache import KVCache
from dspark.types import Draft, Verdict


@dataclass
class _State:
    """What the draft cache holds of one sequence: the first `num_known` committed tokens, then `guesses`."""

    num_known: int = 0
    guesses: list[int] = field(default_factory=list)


@dataclass
class _Guess:
    """One row while its draft grows. `claim`: survival after the last token by the probabilities of the likeliest ones,
    `alive`: the same as the row judges them."""

    row: DraftRow
    limit: int
    floor: float
    draft: Draft
    laws: list[Tensor] = field(default_factory=list)
    claim: float = 1.0
    alive: float = 1.0
    stuck: bool = False

    @property
    def grows(self) -> bool:
        return not self.stuck and len(self.draft.tokens) < self.limit and self.alive >= self.floor

    def force(self, vocab_size: int) -> None:
        """Append what alone may follow, without asking the model. The law of such a token has it alone."""
        sampler = self.row.sampler
        if sampler is None or sampler.grammar is None:
            return
        for token in sampler.grammar.forced(self.draft.tokens, self.limit - len(self.draft.tokens)):
            self.alive *= self.row.judge(len(self.draft.tokens), FORCED_CLAIM)
            self.claim *= FORCED_CLAIM
            self.draft.tokens.append(token)
            self.draft.survival.append(self.claim)
            if not self.row.params.greedy:
                law = torch.zeros(vocab_size)
                law[token] = 1.0
                self.laws.append(law)


class ModelDrafter:
    """Drafts token by token, all rows in one packed pass.

    Greedy requests get argmax drafts (no law needed), sampled ones draws from the draft's processed law, which is
    handed over as `q` (Leviathan et al. 2023). `survival[j]` is the product over i <= j of the largest probability of
    the draft's law at i: known before token i is drawn. Past the draft's own context a row goes on without drafts.
    """

    name = "model"
    taps: Sequence[int] = ()
    num_places = 0

    def __init__(
        self, runner: Any, cache: KVCache, *, vocab_size: int, num_valid_tokens: int, max_chunk: int = 512
    ) -> None:
        """`vocab_size`: columns of the target's logits, which `q` must match (padded vocabularies may differ).
        `num_valid_tokens`: ids from there on are padding and are never drafted."""
        self.runner = runner
        self.cache = cache
        self.vocab_size = vocab_size
        self.num_valid_tokens = min(num_valid_tokens, runner.vocab_size)
        self.max_chunk = max_chunk
        self.states: dict[int, _State] = {}

    def propose(
        self,
        rows: Sequence[DraftRow],
        limits: Sequence[int],
        *,
        floors: Sequence[float] | None = None,
    ) -> list[Draft]:
        floors = floors if floors is not None else [0.0] * len(rows)
        guesses = [
            _Guess(row=row, limit=limit, floor=floor, draft=Draft(source=self.name))
            for row, limit, floor in zip(rows, limits, floors)
        ]
        active = [guess for guess in guesses if guess.limit > 0 and self._open(guess, rows)]
        for guess in active:
            guess.force(self.vocab_size)
        active = [guess for guess in active if guess.grows]
        while active:
            logits = self._forward(active)
            self._draw(active, logits)
            for guess in active:
                guess.force(self.vocab_size)
            active = [guess for guess in active if guess.grows]
        for guess in guesses:
            if guess.laws:
                guess.draft.q = torch.stack([law.to(guess.laws[-1].device) for law in guess.laws])
        return [guess.draft for guess in guesses]

    def observe(self, rows: Sequence[DraftRow], verdicts: Sequence[Verdict | None], taps: Any = None) -> None:
        return None  # the next propose compares tokens and rolls back

    def forget(self, seq_id: int) -> None:
        if self.states.pop(seq_id, None) is not None:
            self.cache.close(seq_id)

    # -- inside

    def _open(self, guess: _Guess, rows: Sequence[DraftRow]) -> bool:
        """Roll the cache back to the committed tokens and reserve places; False when the row must go without."""
        row = guess.row
        length = len(row.tokens) + guess.limit
        if length > self.runner.max_context:
            self.forget(row.seq_id)
            return False
        state = self.states.get(row.seq_id)
        if state is None:
            state = self.states[row.seq_id] = _State(num_known=self.cache.open(row.seq_id, row.tokens))
        else:
            self._roll_back(state, row)
        keep = {other.seq_id for other in rows}
        return self._catch_up(row, state, keep) and self._reserve(row.seq_id, length, keep)

    def _reserve(self, seq_id: int, length: int, keep: set[int]) -> bool:
        """Places for `length` tokens, taken from sequences that do not draft now where there are none free."""
        while not self.cache.reserve(seq_id, length):
            if not self._evict(keep):
                return False
        return True

    def _roll_back(self, state: _State, row: DraftRow) -> None:
        """Guesses that were committed are known; the rest leave the cache."""
        for token in state.guesses:
            if state.num_known == len(row.tokens) - 1 or row.tokens[state.num_known] != token:
                break
            state.num_known += 1
        state.guesses = []
        self.cache.commit(row.seq_id, row.tokens, state.num_known)

    def _evict(self, keep: set[int]) -> bool:
        """Free the cache of a sequence that is not drafting now (waiting or preempted)."""
        for seq_id in self.states:
            if seq_id not in keep:
                self.forget(seq_id)
                return True
        return False

    def _catch_up(self, row: DraftRow, state: _State, keep: set[int]) -> bool:
        """Bring a long unknown stretch (a prompt) into the cache, all but its last chunk. Chunk by chunk, so that
        layers with a window never need more than a window and a chunk."""
        while len(row.tokens) - state.num_known > self.max_chunk:
            stop = state.num_known + self.max_chunk
            if not self._reserve(row.seq_id, stop, keep):
                return False
            chunk = self._readable(row.tokens[state.num_known : stop])
            span = Span(seq_id=row.seq_id, start=state.num_known, tokens=chunk, num_logits=0)
            self.runner.forward(pack([span], self.cache), self.cache)
            state.num_known = stop
            self.cache.commit(row.seq_id, row.tokens, stop)
        return True

    def _readable(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that the draft has no row for (special ones of the target) become token 0: it is only a guess that
        gets worse."""
        return [token if token < self.runner.vocab_size else 0 for token in tokens]

    def _forward(self, active: list[_Guess]) -> Tensor:
        """Everything each row's cache lacks, in one pass; logits (rows, V) of each row's last token."""
        spans = []
        for guess in active:
            row, state = guess.row, self.states[guess.row.seq_id]
            start = state.num_known + len(state.guesses)
            known = row.tokens[state.num_known :] if not state.guesses else []
            new = self._readable([*known, *guess.draft.tokens[len(state.guesses) :]])
            spans.append(Span(seq_id=row.seq_id, start=start, tokens=new, num_logits=1))
            state.num_known = len(row.tokens)
            state.guesses = list(guess.draft.tokens)
        return self.runner.forward(pack(spans, self.cache), self.cache).logits

    def _draw(self, active: list[_Guess], logits: Tensor) -> None:
        """One token a row: argmax for greedy rows, a draw from the processed law for others."""
        valid = logits[:, : self.num_valid_tokens]
        top, best = valid.max(dim=-1)
        confidence = torch.exp(top - torch.logsumexp(valid, dim=-1)).tolist()
        for i, (guess, token, claim) in enumerate(zip(active, best.tolist(), confidence)):
            sampler = guess.row.sampler
            if not takes_best(sampler, guess.draft.tokens, token):
                drawn = draw_token(
                    guess.row,
                    valid[i],
                    slice(valid.shape[1]),
                    vocab_size=self.vocab_size,
                    drafted=guess.draft.tokens,
                    laws=guess.laws,
                )
                if drawn is None:
                    guess.stuck = True
                    continue
                token, claim = drawn
            guess.alive *= guess.row.judge(len(guess.draft.tokens), claim)
            guess.claim *= claim
            guess.draft.tokens.append(token)
            guess.draft.survival.append(guess.claim)
