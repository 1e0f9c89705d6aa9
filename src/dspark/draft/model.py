"""ModelDrafter: a smaller language model, and a cache of its own.
It must never assume that it saw every step: what its cache holds is compared with the committed tokens each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dspark.draft.base import DraftRow
from dspark.draft.draw import FORCED_CLAIM, draw_token, takes_best
from dspark.draft.vocab import Reading, SharedVocabulary
from dspark.model.batch import Span, pack
from dspark.model.cache import KVCache
from dspark.types import Draft, Verdict


@dataclass
class _State:
    """What the draft cache holds of one sequence, in the draft's own tokens: the first `num_known` committed ones, then
    `guesses`. Of the committed ones those from `base` on, `tail`, may be written otherwise the next time."""

    num_known: int = 0
    guesses: list[int] = field(default_factory=list)
    base: int = 0
    tail: list[int] = field(default_factory=list)

    def know(self, view: Sequence[int], length: int, num_settled: int) -> None:
        """The cache holds `length` of `view`."""
        self.num_known, self.guesses = length, []
        self.base = min(length, num_settled)
        self.tail = list(view[self.base : length])


@dataclass
class _Guess:
    """One row while its draft grows. `view`: its committed tokens, and `own` its drafted ones, as the draft model
    writes them, of which `num_settled` will stay. `claim`: survival after the last token by the probabilities of the
    likeliest ones, `alive`: the same as the row judges them. `by_text`: the draft is what the draft model would write,
    told in the target's tokens when it has ended (string-level exact match); `claims` are of its own tokens."""

    row: DraftRow
    view: Sequence[int]
    num_settled: int
    limit: int
    floor: float
    draft: Draft
    by_text: bool = False
    claims: list[float] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    claim: float = 1.0
    alive: float = 1.0
    stuck: bool = False

    @property
    def grows(self) -> bool:
        length = len(self.own) if self.by_text else len(self.draft.tokens)
        return not self.stuck and length < self.limit and self.alive >= self.floor

    def append_text(self, token: int, claim: float, *, ends: bool) -> None:
        """One of the draft model's own tokens."""
        self.alive *= self.row.judge(len(self.own), claim)
        self.claim *= claim
        self.own.append(token)
        self.claims.append(self.claim)
        self.stuck = ends

    def tell(self, words: SharedVocabulary) -> None:
        """Its own tokens in the target's."""
        tokens, stands = words.retell(self.own)
        self.draft.tokens = tokens[: self.limit]
        self.draft.survival = [self.claims[stand - 1] for stand in stands[: self.limit]]

    def force(self, vocab_size: int, words: SharedVocabulary | None) -> None:
        """Append what alone may follow, without asking the model. The law of such a token has it alone. What the draft
        model cannot write by itself ends the draft before it."""
        sampler = self.row.sampler
        if sampler is None or sampler.grammar is None or self.stuck:
            return
        for token in sampler.grammar.forced(self.draft.tokens, self.limit - len(self.draft.tokens)):
            own = (token,) if words is None else words.spell(token)
            if own is None or len(self.own) + len(own) > self.limit:  # for more there are no places
                self.stuck = True
                return
            self.own += own
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

    A draft model of another family (`words`, draft/vocab) writes its own text for greedy rows, told in the target's
    tokens; for sampled rows and under a grammar it drafts the tokens that both vocabularies have, by its law restricted
    to them.
    """

    name = "model"
    taps: Sequence[int] = ()
    num_places = 0

    def __init__(
        self,
        runner: Any,
        cache: KVCache,
        *,
        vocab_size: int,
        num_valid_tokens: int,
        max_chunk: int = 512,
        words: SharedVocabulary | None = None,
    ) -> None:
        """`vocab_size`: columns of the target's logits, which `q` must match (padded vocabularies may differ).
        `num_valid_tokens`: ids of the draft from there on are padding and are never drafted. `words`: where the draft
        has another vocabulary than the target."""
        self.runner = runner
        self.cache = cache
        self.vocab_size = vocab_size
        self.num_valid_tokens = min(num_valid_tokens, runner.vocab_size)
        self.max_chunk = max_chunk
        self.words = words if words is None else words.to(runner.device)
        self.readings: dict[int, Reading] = {}
        self.states: dict[int, _State] = {}

    def propose(
        self,
        rows: Sequence[DraftRow],
        limits: Sequence[int],
        *,
        floors: Sequence[float] | None = None,
    ) -> list[Draft]:
        floors = floors if floors is not None else [0.0] * len(rows)
        guesses = [self._guess(row, limit=limit, floor=floor) for row, limit, floor in zip(rows, limits, floors)]
        active = [guess for guess in guesses if guess.limit > 0 and self._open(guess, rows)]
        for guess in active:
            guess.force(self.vocab_size, self.words)
        active = [guess for guess in active if guess.grows]
        while active:
            logits = self._forward(active)
            self._draw(active, logits)
            for guess in active:
                guess.force(self.vocab_size, self.words)
            active = [guess for guess in active if guess.grows]
        for guess in guesses:
            if guess.by_text and guess.own:
                assert self.words is not None
                guess.tell(self.words)
            if guess.laws:
                guess.draft.q = torch.stack([law.to(guess.laws[-1].device) for law in guess.laws])
        return [guess.draft for guess in guesses]

    def observe(self, rows: Sequence[DraftRow], verdicts: Sequence[Verdict | None], taps: Any = None) -> None:
        return None  # the next propose compares tokens and rolls back

    def forget(self, seq_id: int) -> None:
        self.readings.pop(seq_id, None)
        self._close(seq_id)

    # -- inside

    def _close(self, seq_id: int) -> None:
        if self.states.pop(seq_id, None) is not None:
            self.cache.close(seq_id)

    def _guess(self, row: DraftRow, *, limit: int, floor: float) -> _Guess:
        """An empty one, behind the row's committed tokens as the draft model writes them."""
        draft = Draft(source=self.name)
        if self.words is None:
            return _Guess(row=row, view=row.tokens, num_settled=len(row.tokens), limit=limit, floor=floor, draft=draft)
        reading = self.readings.get(row.seq_id)
        if reading is None:
            reading = self.readings[row.seq_id] = Reading(self.words)
        reading.extend(row.tokens, num_prompt=row.num_prompt)
        return _Guess(
            row=row,
            view=reading.tokens,
            num_settled=reading.num_settled,
            limit=limit,
            floor=floor,
            draft=draft,
            # A text that is drawn has no law over the target's tokens, and a grammar is one of the target's tokens.
            by_text=row.params.greedy and (row.sampler is None or row.sampler.grammar is None),
        )

    def _open(self, guess: _Guess, rows: Sequence[DraftRow]) -> bool:
        """Roll the cache back to the committed tokens and reserve places; False when the row must go without."""
        seq_id, view = guess.row.seq_id, guess.view
        length = len(view) + guess.limit
        if length > self.runner.max_context:
            self._close(seq_id)
            return False
        state = self.states.get(seq_id)
        if state is None:
            state = self.states[seq_id] = _State()
            state.know(view, self.cache.open(seq_id, view[: guess.num_settled + 1]), guess.num_settled)
        else:
            self._roll_back(state, seq_id, guess)
        if self.words is not None and not self.readings[seq_id].whole:
            return False
        keep = {other.seq_id for other in rows}
        return self._catch_up(seq_id, guess, state, keep) and self._reserve(seq_id, length, keep)

    def _reserve(self, seq_id: int, length: int, keep: set[int]) -> bool:
        """Places for `length` tokens, taken from sequences that do not draft now where there are none free."""
        while not self.cache.reserve(seq_id, length):
            if not self._evict(keep):
                return False
        return True

    def _roll_back(self, state: _State, seq_id: int, guess: _Guess) -> None:
        """Guesses that were committed are known; the rest, and what is written otherwise now, leave the cache."""
        view = guess.view
        # A token that holds part of a character adds nothing to the view, and the last of it must be left to read.
        known = min(state.base, len(view) - 1)
        for token in (*state.tail, *state.guesses):
            if known == len(view) - 1 or view[known] != token:
                break
            known += 1
        state.know(view, known, guess.num_settled)
        self.cache.commit(seq_id, view, known, num_final=guess.num_settled)

    def _evict(self, keep: set[int]) -> bool:
        """Free the cache of a sequence that is not drafting now (waiting or preempted)."""
        for seq_id in self.states:
            if seq_id not in keep:
                self._close(seq_id)
                return True
        return False

    def _catch_up(self, seq_id: int, guess: _Guess, state: _State, keep: set[int]) -> bool:
        """Bring a long unknown stretch (a prompt) into the cache, all but its last chunk. Chunk by chunk, so that
        layers with a window never need more than a window and a chunk."""
        view = guess.view
        while len(view) - state.num_known > self.max_chunk:
            stop = state.num_known + self.max_chunk
            if not self._reserve(seq_id, stop, keep):
                return False
            chunk = self._readable(view[state.num_known : stop])
            span = Span(seq_id=seq_id, start=state.num_known, tokens=chunk, num_logits=0)
            self.runner.forward(pack([span], self.cache), self.cache)
            state.know(view, stop, guess.num_settled)
            self.cache.commit(seq_id, view, stop, num_final=guess.num_settled)
        return True

    def _readable(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that the draft has no row for (special ones of the target) become token 0: it is only a guess that
        gets worse."""
        return [token if token < self.runner.vocab_size else 0 for token in tokens]

    def _forward(self, active: list[_Guess]) -> Tensor:
        """Everything each row's cache lacks, in one pass; logits (rows, V) of each row's last token."""
        spans = []
        for guess in active:
            seq_id, state = guess.row.seq_id, self.states[guess.row.seq_id]
            start = state.num_known + len(state.guesses)
            known = guess.view[state.num_known :] if not state.guesses else []
            new = self._readable([*known, *guess.own[len(state.guesses) :]])
            spans.append(Span(seq_id=seq_id, start=start, tokens=new, num_logits=1))
            if not state.guesses:
                state.know(guess.view, len(guess.view), guess.num_settled)
            state.guesses = list(guess.own)
        return self.runner.forward(pack(spans, self.cache), self.cache).logits

    def _draw(self, active: list[_Guess], logits: Tensor) -> None:
        """One token a row: argmax for greedy rows, a draw from the processed law for others."""
        valid = logits[:, : self.num_valid_tokens]
        mass = torch.logsumexp(valid, dim=-1)
        if self.words is not None and any(guess.by_text for guess in active):
            self._write_on(active, valid, mass)
            chosen = [i for i, guess in enumerate(active) if not guess.by_text]
            if not chosen:
                return
            active, valid, mass = [active[i] for i in chosen], valid[chosen], mass[chosen]
        places: slice | Tensor = slice(valid.shape[1])
        if self.words is not None:
            valid, places = valid[:, self.words.draft_ids], self.words.target_ids
        top, best = valid.max(dim=-1)
        if self.words is not None:
            best = self.words.target_ids[best]
        # In another vocabulary, of all that the draft model would say: what is not shared cannot be right.
        confidence = torch.exp(top - mass).tolist()
        for i, (guess, token, claim) in enumerate(zip(active, best.tolist(), confidence)):
            sampler = guess.row.sampler
            if not takes_best(sampler, guess.draft.tokens, token):
                drawn = draw_token(
                    guess.row,
                    valid[i],
                    places,
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
            guess.own.append(token if self.words is None else self.words.to_draft[token])
            guess.draft.tokens.append(token)
            guess.draft.survival.append(guess.claim)

    def _write_on(self, active: list[_Guess], valid: Tensor, mass: Tensor) -> None:
        """The draft model's likeliest token of all for rows that are drafted for by text."""
        assert self.words is not None
        top, best = valid.max(dim=-1)
        claims = torch.exp(top - mass).tolist()
        for guess, token, claim in zip(active, best.tolist(), claims):
            if guess.by_text:
                guess.append_text(token, claim, ends=token in self.words.draft.special_ids)
