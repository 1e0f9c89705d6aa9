"""Sampling: from raw logits to the law a token is drawn from, by the same road for target and drafter.
It must never change the logits it is given, count a token that is not committed, or let a row feel its neighbours.

Order: penalties, logit_bias, min_tokens, bad_words, vocabulary padding, allowed mask; then (dspark.law) temperature,
min_p, top_k, top_p. Shapes: R rows, W width of the logits, V vocabulary, S distinct tokens seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark.law import probabilities, raw_logprobs
from dspark.noise import STREAM_DRAFT, Noise
from dspark.params import SamplingParams

__all__ = [
    "Noise",
    "Processors",
    "RowSampler",
    "largest_legal",
    "packed_laws",
    "packed_process",
    "probabilities",
    "raw_logprobs",
]

NEG_INF = float("-inf")


@dataclass(frozen=True, kw_only=True)
class Processors:
    """What a request does to its logits before temperature: built once, only what is active.

    `end_ids` are masked until `min_tokens` tokens are out; `bad_words` are token sequences whose last token is masked
    when the output ends with the tokens before it (the prompt does not count). Ids from `num_valid` on are padding.
    """

    vocab_size: int
    num_valid: int
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def build(
        cls,
        params: SamplingParams,
        *,
        vocab_size: int,
        num_valid_tokens: int | None = None,
        eos_token_ids: Iterable[int] = (),
        bad_words_ids: Iterable[Sequence[int]] = (),
    ) -> Processors:
        """From a request. `vocab_size` is the width of the logits, `num_valid_tokens` (default: all) that of the
        tokenizer. Raises ValueError when an id of logit_bias, stop_token_ids, eos or bad_words is no token."""
        num_valid = vocab_size if num_valid_tokens is None else num_valid_tokens
        assert 0 < num_valid <= vocab_size, (num_valid, vocab_size)
        words = tuple(tuple(word) for word in bad_words_ids)
        if not all(words):
            raise ValueError("bad_words holds a word without tokens: remove it")
        end_ids = sorted({*eos_token_ids, *params.stop_token_ids})
        _check_ids("logit_bias", params.logit_bias, num_valid=num_valid)
        _check_ids("stop_token_ids", params.stop_token_ids, num_valid=num_valid)
        _check_ids("eos_token_ids", end_ids, num_valid=num_valid)
        _check_ids("bad_words", (token for word in words for token in word), num_valid=num_valid)
        return cls(
            vocab_size=vocab_size,
            num_valid=num_valid,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            bias_ids=tuple(params.logit_bias),
            bias_values=tuple(params.logit_bias.values()),
            min_tokens=params.min_tokens if end_ids else 0,
            end_ids=tuple(end_ids) if params.min_tokens else (),
            bad_words=words,
        )

    @property
    def penalised(self) -> bool:
        """Whether token counts are needed."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0

    @property
    def idle(self) -> bool:
        """Whether logits without padding pass unchanged."""
        return not (self.penalised or self.bias_ids or self.min_tokens or self.bad_words)


def _check_ids(name: str, ids: Iterable[int], *, num_valid: int) -> None:
    for token in ids:
        if not 0 <= token < num_valid:
            raise ValueError(f"{name} holds token id {token}: the vocabulary has ids 0 to {num_valid - 1}")


class Constraint(Protocol):
    """What a grammar says of one sequence (verify/grammar.Matcher).

    `name`: the same for all sequences under the same grammar. `examples`: texts of their shape, as token ids.
    """

    name: str
    examples: Sequence[Sequence[int]]

    def advance(self, token: int) -> None:
        """One token more is committed."""
        ...

    def legal(self, tokens: Sequence[int]) -> int:
        """How many of these may follow the committed ones."""
        ...

    def allowed(self, drafts: Sequence[int], *, rows: int) -> Tensor:
        """(rows, V) bool: what may follow committed tokens and legal drafts, for the last `rows` prefixes of these."""
        ...

    def forced(self, drafts: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that spell what alone can follow the drafts."""
        ...

    def over(self, drafts: Sequence[int]) -> bool:
        """Whether nothing can follow these legal drafts."""
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing can follow the committed tokens."""
        ...

    @property
    def fault(self) -> str | None:
        """Why it can no longer be followed; None while it can."""
        ...


def largest_legal(logits: Tensor, best: Sequence[int], drafts: Sequence[int], grammar: Constraint) -> list[int]:
    """Index of the largest logit of each row, (K + 1, V), among what the grammar allows behind the drafts before it, up
    to the first row that differs from its draft; `best`, of all that are valid, from there on.

    Mostly the best is legal, and to ask for one token takes a fraction of what a mask takes.
    """
    found = list(best)
    for i, token in enumerate(best):
        if grammar.legal([*drafts[:i], token]) <= i:
            allowed = grammar.allowed(drafts[:i], rows=1)[0].to(logits.device)
            found[i] = int(logits[i].masked_fill(~allowed, NEG_INF).argmax())
        if i == len(drafts) or found[i] != drafts[i]:
            break
    return found


class RowSampler:
    """Everything random and everything remembered about the sampling of one sequence (`DraftRow.sampler`).

    `tokens` are prompt and output so far; `advance` is called for every token committed, so that the penalty counts
    never see a rejected draft. `index` is the answer's number among the request's n. `grammar` stands at the beginning.
    """

    def __init__(
        self,
        params: SamplingParams,
        processors: Processors,
        *,
        tokens: Sequence[int],
        num_prompt: int,
        index: int = 0,
        noise: Noise | None = None,
        grammar: Constraint | None = None,
    ) -> None:
        assert grammar is None or len(tokens) == num_prompt, "a grammar begins with the answer"
        self.grammar: Constraint | None = None
        self.params = params
        self.processors = processors
        self.noise = Noise.for_answer(params.seed, index=index) if noise is None else noise
        self._num_draft_draws = 0
        self.rebuild(tokens, num_prompt=num_prompt)
        self.grammar = grammar

    @property
    def plain_greedy(self) -> bool:
        """The token is the argmax of the raw logits over the valid vocabulary."""
        return self.grammar is None and self.legal_greedy

    @property
    def legal_greedy(self) -> bool:
        """The token is the argmax of the raw logits over what the grammar, if there is one, allows."""
        return self.params.greedy and self.processors.idle

    def check(self, tokens: Sequence[int]) -> None:
        """Assert that what is remembered agrees with the committed tokens."""
        assert self._num_tokens == len(tokens), "the sampler has missed a token"
        output = tokens[self._num_prompt :]
        if self.processors.penalised:
            counted = {token: self._counts[column] for token, column in self._column.items() if self._counts[column]}
            assert counted == {token: output.count(token) for token in set(output)}, "penalty counts are stale"

    def rebuild(self, tokens: Sequence[int], *, num_prompt: int) -> None:
        """Recount from scratch. The number of draft draws is kept: their noise must stay fresh."""
        self._num_prompt = num_prompt
        self._num_tokens = num_prompt
        # Presence and frequency look at the output only: a token of the prompt is seen, with a count of 0.
        prompt = tokens[:num_prompt] if self.processors.repetition != 1 else ()
        self._column = {token: n for n, token in enumerate(dict.fromkeys(prompt))}
        self._counts = [0] * len(self._column)
        self._seen_S: tuple[Tensor, Tensor] | None = None
        for token in tokens[num_prompt:]:
            self.advance(token)

    def advance(self, token: int) -> None:
        """One token more has been committed."""
        self._num_tokens += 1
        if self.grammar is not None:
            self.grammar.advance(token)
        if self.processors.penalised:
            column = self._column.setdefault(token, len(self._counts))
            if column == len(self._counts):
                self._counts.append(0)
            self._counts[column] += 1
            self._seen_S = None

    def process(
        self, logits: Tensor, tokens_before: Sequence[int], drafts: Sequence[int] = (), *, allowed: Tensor | None = None
    ) -> Tensor:
        """Processed logits, (R, W) float32; the input itself when there is nothing to do, else a copy.

        `logits`: (R, W). Row i sees `tokens_before` (all committed tokens) and the drafts before it; with R <
        len(drafts) + 1 these are the *last* R rows, so a drafter passes one row and what it has drafted so far.
        W is normally the vocabulary's size, but a drafter's may be padded differently. `allowed`: (R, V) bool, False
        where a grammar forbids the token; asked of the sequence's own where it is not given. Where min_tokens and
        bad_words would leave nothing, they yield.
        """
        assert self._num_tokens == len(tokens_before), (self._num_tokens, len(tokens_before))
        assert 1 <= logits.shape[0] <= len(drafts) + 1, (tuple(logits.shape), len(drafts))
        rules = self.processors
        if allowed is None and self.grammar is not None:
            allowed = self.grammar.allowed(drafts, rows=logits.shape[0])
        if rules.idle and allowed is None and rules.num_valid >= logits.shape[1]:
            return logits.float()
        out = logits.to(torch.float32, copy=True)
        if rules.penalised:
            self._penalise(out, drafts)
        if rules.bias_ids:
            ids, values = _within(rules.bias_ids, rules.bias_values, width=out.shape[1])
            out[:, torch.tensor(ids, device=out.device, dtype=torch.long)] += torch.tensor(values, device=out.device)
        out[:, rules.num_valid :] = NEG_INF
        if allowed is not None:
            allowed = allowed.to(out.device)
            width = min(out.shape[1], allowed.shape[1])
            out[:, :width].masked_fill_(~allowed[:, :width], NEG_INF)
            out[:, width:] = NEG_INF
        if rules.min_tokens or rules.bad_words:
            self._mask(out, tokens_before, drafts)
        return out

    def _penalise(self, out: Tensor, drafts: Sequence[int]) -> None:
        """Repetition, then frequency and presence, in place; only columns of seen or drafted tokens are touched."""
        rules = self.processors
        ids_S, counts_RS, seen_RS = self._counts_in_block(drafts, device=out.device)
        counts_RS, seen_RS = counts_RS[-out.shape[0] :], seen_RS[-out.shape[0] :]
        inside = ids_S < out.shape[1]
        if not bool(inside.all()):
            ids_S, counts_RS, seen_RS = ids_S[inside], counts_RS[:, inside], seen_RS[:, inside]
        values = out[:, ids_S]
        if rules.repetition != 1:
            shrunk = torch.where(values > 0, values / rules.repetition, values * rules.repetition)
            values = torch.where(seen_RS, shrunk, values)
        values -= rules.frequency * counts_RS
        values -= rules.presence * (counts_RS > 0)
        out[:, ids_S] = values

    def _counts_in_block(self, drafts: Sequence[int], *, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens seen or drafted (S,), how often each is in the output (K+1, S), and whether it has been seen (K+1, S):
        row i counts the committed tokens and drafts[:i]."""
        ids_S, counts_S = self._seen(device)
        fresh = [token for token in dict.fromkeys(drafts) if token not in self._column]
        num_seen, column = len(self._column), {token: len(self._column) + n for n, token in enumerate(fresh)}
        ids_S = torch.cat([ids_S, torch.tensor(fresh, device=device, dtype=torch.long)])
        counts_RS = torch.cat([counts_S, counts_S.new_zeros(len(fresh))]).repeat(len(drafts) + 1, 1)
        seen_RS = torch.ones_like(counts_RS, dtype=torch.bool)
        seen_RS[:, num_seen:] = False
        for i, token in enumerate(drafts):
            place = self._column.get(token, column.get(token, -1))
            counts_RS[i + 1 :, place] += 1
            seen_RS[i + 1 :, place] = True
        return ids_S, counts_RS, seen_RS

    def _seen(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Ids of the tokens seen and how often each is in the output, (S,) and (S,) float32."""
        if self._seen_S is None or self._seen_S[0].device != device:
            ids = torch.tensor(list(self._column), device=device, dtype=torch.long)
            counts = torch.tensor(self._counts, device=device, dtype=torch.float32)
            self._seen_S = ids, counts
        return self._seen_S

    def _mask(self, out: Tensor, tokens_before: Sequence[int], drafts: Sequence[int]) -> None:
        """min_tokens and bad_words, in place, row by row, unless nothing would be left of the row."""
        first = len(drafts) + 1 - out.shape[0]
        reach = max((len(word) for word in self.processors.bad_words), default=1) - 1
        num_output = len(tokens_before) - self._num_prompt
        recent = list(tokens_before[len(tokens_before) - min(reach, num_output) :]) if reach else []
        for row in range(out.shape[0]):
            behind = first + row
            tail = [*recent, *drafts[:behind]]
            ids = self._masked_ids(tail, num_output=num_output + behind)
            ids = [token for token in ids if token < out.shape[1]]
            if not ids:
                continue
            masked = out[row].index_fill(0, torch.tensor(ids, device=out.device), NEG_INF)
            if bool((masked > NEG_INF).any()):
                out[row] = masked

    def _masked_ids(self, tail: list[int], *, num_output: int) -> list[int]:
        rules = self.processors
        ids = [word[-1] for word in rules.bad_words if _ends_with(tail, word[:-1])]
        if num_output < rules.min_tokens:
            ids.extend(rules.end_ids)
        return ids

    def law(
        self, logits: Tensor, tokens_before: Sequence[int], drafts: Sequence[int] = (), *, allowed: Tensor | None = None
    ) -> Tensor:
        """(R, W) float32 probabilities of the rows of `process`; one-hot for greedy requests."""
        return self.law_of(self.process(logits, tokens_before, drafts, allowed=allowed))

    def law_of(self, processed: Tensor) -> Tensor:
        """(R, W) float32 probabilities of processed logits."""
        count, params = processed.shape[0], self.params
        return probabilities(
            processed,
            temperature=[params.temperature] * count,
            top_k=[params.top_k] * count,
            top_p=[params.top_p] * count,
            min_p=[params.min_p] * count,
        )

    def draw_draft(self, q_V: Tensor, position: int) -> int:
        """A draft token for `position` (index in the sequence) from the law (V,).

        Seeded requests share the target's noise. All others take a stream that was never used before, for two reasons.
        The verifier's numbers must be independent of the draft, or min(1, p/q) is not the chance of keeping it. And a
        draft that was discarded unseen (an earlier one was rejected) has been shown to length policies: were the
        position drafted again with the same number, whether it is verified would depend on the token it will hold,
        which is the anticipation that docs/losslessness.md shows to be biased.
        """
        stream = STREAM_DRAFT + self._num_draft_draws
        self._num_draft_draws += 1
        return self.noise.draw(q_V, position, stream)


def _ends_with(tokens: Sequence[int], ending: Sequence[int]) -> bool:
    size = len(ending)
    return size <= len(tokens) and list(tokens[len(tokens) - size :]) == list(ending)


def _within(ids: Sequence[int], values: Sequence[float], *, width: int) -> tuple[list[int], list[float]]:
    pairs = [(token, value) for token, value in zip(ids, values, strict=True) if token < width]
    return [token for token, _ in pairs], [value for _, value in pairs]


def packed_process(
    samplers: Sequence[RowSampler],
    logits: Tensor,
    *,
    tokens_before: Sequence[Sequence[int]],
    drafts: Sequence[Sequence[int]],
    allowed: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """`RowSampler.process` for a whole step. `logits`: (R, V), sequence after sequence, len(drafts[s]) + 1 rows each.
    Returns (R, V) float32: the input itself when no sequence has anything to do."""
    sizes = [len(draft) + 1 for draft in drafts]
    masks = [None] * len(sizes) if allowed is None else allowed
    blocks = logits.split(sizes)
    done = [
        sampler.process(block, before, draft, allowed=mask)
        for sampler, block, before, draft, mask in zip(samplers, blocks, tokens_before, drafts, masks, strict=True)
    ]
    untouched = all(new.data_ptr() == old.data_ptr() for new, old in zip(done, blocks, strict=True))
    return logits if untouched else torch.cat(done)


def packed_laws(
    samplers: Sequence[RowSampler],
    logits: Tensor,
    *,
    tokens_before: Sequence[Sequence[int]],
    drafts: Sequence[Sequence[int]],
    allowed: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """`RowSampler.law` for a whole step: (R, V) float32, rows as in `packed_process`."""
    processed = packed_process(samplers, logits, tokens_before=tokens_before, drafts=drafts, allowed=allowed)
    rows = [s.params for s, draft in zip(samplers, drafts, strict=True) for _ in range(len(draft) + 1)]
    return probabilities(
        processed,
        temperature=[row.temperature for row in rows],
        top_k=[row.top_k for row in rows],
        top_p=[row.top_p for row in rows],
        min_p=[row.min_p for row in rows],
    )
