"""Lookup drafters: guesses copied from the sequence's own text (n-gram) or from finished answers too (suffix).
They must never run a network, look at a token that is not committed, or let one sequence read another's prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.draft.acceptance import MATCH_BUCKETS, AcceptanceTable, Guess, bucket
from dspark.draft.answer_store import AnswerStore
from dspark.draft.base import DraftRow
from dspark.draft.draw import cut_illegal
from dspark.draft.occurrences import OccurrenceIndex
from dspark.sampling import Constraint
from dspark.types import Draft, Verdict

_OWN, _OTHERS = 0, 1
MAX_GRAMMARS = 256


@dataclass(kw_only=True)
class _Row:
    """One open sequence: its own text as far as it is indexed, `latest` as it was last shown, and the guess that waits
    for the truth."""

    index: OccurrenceIndex
    num_prompt: int
    latest: Sequence[int] = ()
    guess: Guess | None = None

    @property
    def tokens(self) -> Sequence[int]:
        """All that was committed up to the last call."""
        return self.index.text(0)

    def follow(self, tokens: Sequence[int], table: AcceptanceTable) -> None:
        """Take in the tokens committed since the last call, however many calls were missed."""
        known = len(self.tokens)
        assert len(tokens) >= known, "a sequence lost tokens without forget()"
        if len(tokens) == known:
            return
        if self.guess is not None:
            table.settle(self.guess, tokens)
            self.guess = None
        self.index.extend(0, tokens[known:])


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} is not usable: give a whole number of at least {least}")


def _prior(num_child: int, num_node: int, length: int) -> float:
    """Conditional acceptance before anything was learned: smoothed frequency, less sure after a short context.

    `num_child` of `num_node` occurrences of a context of `length` tokens went on with the guess.
    """
    return (num_child + 0.5) / (num_node + 1.0) * (length + 0.5) / (length + 1.0)


class NgramDrafter:
    """Prompt lookup: what followed the last n tokens when they occurred before in the same sequence.

    The longest n in `prompt_lookup_max`..`prompt_lookup_min` that has an earlier occurrence wins, as in vLLM's "ngram"
    method. `occurrence` says which one is copied: "first" is vLLM's choice, and its draft ends where the text ends;
    "last" follows the most recent occurrence and reads on periodically at the end of the text, so that a loop is
    proposed at full length. One dictionary look-up for each n and step.
    """

    taps: Sequence[int] = ()
    num_places = 0

    def __init__(
        self,
        *,
        num_speculative_tokens: int = 8,
        prompt_lookup_max: int = 4,
        prompt_lookup_min: int = 2,
        occurrence: str = "last",
    ) -> None:
        _check_count("num_speculative_tokens", num_speculative_tokens, 1)
        _check_count("prompt_lookup_min", prompt_lookup_min, 1)
        _check_count("prompt_lookup_max", prompt_lookup_max, prompt_lookup_min)
        if occurrence not in ("first", "last"):
            raise ValueError(f"occurrence={occurrence!r} is not usable: give 'first' or 'last'")
        self.name = "ngram"
        self.num_speculative_tokens = num_speculative_tokens
        self.occurrence = occurrence
        self.orders = range(prompt_lookup_min, prompt_lookup_max + 1)
        self.table = AcceptanceTable()
        self._rows: dict[int, _Row] = {}

    def propose(
        self,
        rows: Sequence[DraftRow],
        limits: Sequence[int],
        *,
        floors: Sequence[float] | None = None,
    ) -> list[Draft]:
        """One draft a row (see Drafter), cut where it breaks a grammar. Guesses cost nothing, so `floors` are not
        consulted."""
        return [cut_illegal(row, self._propose(row, limit)) for row, limit in zip(rows, limits, strict=True)]

    def observe(self, rows: Sequence[DraftRow], verdicts: Sequence[Verdict | None], taps: Any = None) -> None:
        """Guesses are judged by the text itself (AcceptanceTable.settle); without one, nothing is indexed before it is
        needed."""
        for row in rows:
            state = self._rows.get(row.seq_id)
            if state is None or state.guess is not None:
                self._sync(row)
            else:
                state.latest = row.tokens

    def forget(self, seq_id: int) -> None:
        """Free what is held for a sequence; unknown ids are fine."""
        self._rows.pop(seq_id, None)

    def _sync(self, row: DraftRow) -> _Row:
        state = self._rows.get(row.seq_id)
        if state is None:
            state = self._rows[row.seq_id] = _Row(index=OccurrenceIndex(self.orders), num_prompt=row.num_prompt)
        state.follow(row.tokens, self.table)
        return state

    def _propose(self, row: DraftRow, limit: int) -> Draft:
        state = self._sync(row)
        num_tokens = min(limit, self.num_speculative_tokens)
        if num_tokens <= 0:
            return Draft(source=self.name)
        last, tail = self.occurrence == "last", state.tokens[-self.orders[-1] :]
        for order, positions in state.index.occurrences(tail):
            position = positions[-1 if last else 0]
            if state.index.match_length(position, tail) < order:
                continue
            tokens = list(state.index.continuation(position, num_tokens, periodic=last))
            kind = (row.params.temperature == 0.0, order, len(positions) > 1)
            kinds: list[Hashable] = [kind] * len(tokens)
            survival = self.table.survival(kinds, [_prior(1, 1, order + j) for j in range(len(tokens))])
            state.guess = Guess(start=len(state.tokens), tokens=tokens, kinds=kinds)
            return Draft(tokens=tokens, survival=survival, source=self.name)
        return Draft(source=self.name)


@dataclass(frozen=True, kw_only=True)
class Path:
    """A walk down the continuations of a match.

    `counts[j]` = (occurrences that went on with token j, occurrences that reached it), `match_length` tokens of the
    sequence's end had occurred before, `newest` is the most recent place where they did.
    """

    tokens: list[int]
    counts: list[tuple[int, int]]
    match_length: int
    newest: int


def most_frequent_path(
    continuations: Sequence[Sequence[int]], *, min_prob: float
) -> tuple[list[int], list[tuple[int, int]]]:
    """Greedy walk by frequency: (tokens, [(count of the child, count of its siblings and itself)]).

    Stops before the product of count(child) / count(node) falls under `min_prob`, and where all continuations end.
    Of equally frequent tokens the one in the earlier continuation wins.
    """
    weights: dict[Sequence[int], int] = {}
    for continuation in continuations:
        weights[continuation] = weights.get(continuation, 0) + 1
    tokens: list[int] = []
    counts: list[tuple[int, int]] = []
    alive, prob, j = list(weights.items()), 1.0, 0
    while alive:
        if len(alive) == 1:
            only, weight = alive[0]
            tokens.extend(only[j:])
            counts.extend([(weight, weight)] * (len(only) - j))
            break
        tally: dict[int, int] = {}
        for continuation, weight in alive:
            if len(continuation) > j:
                tally[continuation[j]] = tally.get(continuation[j], 0) + weight
        if not tally:
            break
        best, total = max(tally, key=tally.__getitem__), sum(tally.values())
        prob *= tally[best] / total
        if prob < min_prob:
            break
        tokens.append(best)
        counts.append((tally[best], total))
        alive = [(c, weight) for c, weight in alive if len(c) > j and c[j] == best]
        j += 1
    return tokens, counts


def _evidence(num_child: int, num_node: int) -> int:
    """Bucket of a pair of counts: 0 a single occurrence, 1..2 unanimous, 3..5 divided ever more."""
    if num_child == num_node:
        return 0 if num_node == 1 else 1 if num_node < 4 else 2
    share = num_child / num_node
    return 3 if share >= 0.75 else 4 if share >= 0.5 else 5


class SuffixDrafter:
    """SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975, section 4): frequent continuations of the longest match.

    The longest end of the sequence (at most `max_depth`, at least `min_match` tokens) that occurred before is looked
    up in the sequence's own text and in finished answers of all sequences; from its most recent occurrences the most
    frequent continuation is followed while its empirical path probability stays at or above `min_token_prob`, for at
    most `max_spec_factor` tokens for each matched token. Of the two drafts the one with more expected accepted tokens
    (sum of survival) is proposed. Frequencies come from at most `max_candidates` occurrences of the longest indexed
    n-gram (`index_orders`) that was found. Finished answers hold about 0.5 kB of memory for each of at most
    `max_cached_tokens` tokens; 0 keeps none.
    """

    taps: Sequence[int] = ()
    num_places = 0

    def __init__(
        self,
        *,
        num_speculative_tokens: int = 24,
        max_depth: int = 24,
        min_match: int = 1,
        max_spec_factor: float = 4.0,
        min_token_prob: float = 0.1,
        max_cached_tokens: int = 100_000,
        max_candidates: int = 32,
    ) -> None:
        _check_count("num_speculative_tokens", num_speculative_tokens, 1)
        _check_count("min_match", min_match, 1)
        _check_count("max_depth", max_depth, min_match)
        _check_count("max_cached_tokens", max_cached_tokens, 0)
        _check_count("max_candidates", max_candidates, 1)
        if not max_spec_factor > 0.0:
            raise ValueError(f"max_spec_factor={max_spec_factor!r} is not usable: give a number above 0")
        if not 0.0 <= min_token_prob <= 1.0:
            raise ValueError(f"min_token_prob={min_token_prob!r} is not usable: give a number from 0 to 1")
        self.name = "suffix"
        self.num_speculative_tokens = num_speculative_tokens
        self.max_depth = max_depth
        self.max_spec_factor = max_spec_factor
        self.min_token_prob = min_token_prob
        self.max_candidates = max_candidates
        self.orders = index_orders(min_match, max_depth)
        self.table = AcceptanceTable()
        self.answers = AnswerStore(max_tokens=max_cached_tokens, orders=self.orders)
        self._rows: dict[int, _Row] = {}
        self.grammars: OrderedDict[str, None] = OrderedDict()
        self.num_examples = 0

    def propose(
        self,
        rows: Sequence[DraftRow],
        limits: Sequence[int],
        *,
        floors: Sequence[float] | None = None,
    ) -> list[Draft]:
        """One draft a row (see Drafter), cut where it breaks a grammar. Guesses cost nothing, so `floors` are not
        consulted."""
        return [cut_illegal(row, self._propose(row, limit)) for row, limit in zip(rows, limits, strict=True)]

    def observe(self, rows: Sequence[DraftRow], verdicts: Sequence[Verdict | None], taps: Any = None) -> None:
        """Guesses are judged by the text itself (AcceptanceTable.settle); without one, nothing is indexed before it is
        needed."""
        for row in rows:
            state = self._rows.get(row.seq_id)
            if state is None or state.guess is not None:
                self._sync(row)
            else:
                state.latest = row.tokens

    def forget(self, seq_id: int) -> None:
        """Free what is held for a sequence and keep its answer, as far as seen, for others; unknown ids are fine."""
        state = self._rows.pop(seq_id, None)
        if state is not None:
            if len(state.latest) > len(state.tokens):
                state.follow(state.latest, self.table)
            self.answers.add(seq_id, state.tokens[state.num_prompt :])

    def _sync(self, row: DraftRow) -> _Row:
        state = self._rows.get(row.seq_id)
        if state is None:
            state = self._rows[row.seq_id] = _Row(index=OccurrenceIndex(self.orders), num_prompt=row.num_prompt)
            if row.sampler is not None and row.sampler.grammar is not None:
                self._know(row.sampler.grammar)
            # Preempted and back: its own half answer must not count twice.
            self.answers.take_back(row.seq_id, row.tokens[row.num_prompt :])
        state.follow(row.tokens, self.table)
        return state

    def _know(self, grammar: Constraint) -> None:
        """The shapes of a grammar are material like finished answers, once for each grammar of late."""
        if grammar.name in self.grammars:
            self.grammars.move_to_end(grammar.name)
            return
        self.grammars[grammar.name] = None
        if len(self.grammars) > MAX_GRAMMARS:
            self.grammars.popitem(last=False)
        for example in grammar.examples:
            self.num_examples += 1
            self.answers.add(-self.num_examples, example)  # no sequence has such a number

    def _propose(self, row: DraftRow, limit: int) -> Draft:
        state = self._sync(row)
        num_tokens, draft = min(limit, self.num_speculative_tokens), Draft(source=self.name)
        if num_tokens <= 0:
            return draft
        tail = state.tokens[-self.max_depth :]
        best, source_of_best, newest = 0.0, _OWN, 0
        for source, index in ((_OWN, state.index), (_OTHERS, self.answers.index)):
            path = self._path(index, tail, num_tokens, periodic=source == _OWN)
            if path is None:
                continue
            kinds, survival = self._judge(path, source, greedy=row.params.temperature == 0.0)
            if sum(survival) > best:
                best, source_of_best, newest = sum(survival), source, path.newest
                draft = Draft(tokens=path.tokens, survival=survival, source=self.name)
                state.guess = Guess(start=len(state.tokens), tokens=path.tokens, kinds=kinds)
        if source_of_best == _OTHERS:
            self.answers.touch(newest)
        return draft

    def _path(self, index: OccurrenceIndex, tail: Sequence[int], num_tokens: int, *, periodic: bool) -> Path | None:
        """The most frequent continuation of the longest match of `tail` in `index`, or None without a match."""
        for order, positions in index.occurrences(tail):
            recent = positions[-1 : -self.max_candidates - 1 : -1]
            lengths = [index.match_length(position, tail) for position in recent]
            longest = max(lengths)
            if longest < order:
                continue
            matched = [position for position, length in zip(recent, lengths, strict=True) if length == longest]
            num_tokens = min(num_tokens, int(self.max_spec_factor * longest))
            continuations = [index.continuation(position, num_tokens, periodic=periodic) for position in matched]
            tokens, counts = most_frequent_path(continuations, min_prob=self.min_token_prob)
            if tokens:
                return Path(tokens=tokens, counts=counts, match_length=longest, newest=matched[0])
        return None

    def _judge(self, path: Path, source: int, *, greedy: bool) -> tuple[list[Hashable], list[float]]:
        """(kinds, survival) of a path: what its guesses are filed under, and how likely they are to be accepted."""
        match = bucket(path.match_length, MATCH_BUCKETS)
        kinds: list[Hashable] = [(greedy, source, match, _evidence(*counts)) for counts in path.counts]
        priors = [_prior(*counts, path.match_length + j) for j, counts in enumerate(path.counts)]
        return kinds, self.table.survival(kinds, priors)


def index_orders(min_match: int, max_depth: int) -> tuple[int, ...]:
    """n-gram lengths to index: from `min_match`, each twice the one before, to `max_depth`."""
    orders = [min_match]
    while orders[-1] < max_depth:
        orders.append(min(max_depth, orders[-1] * 2))
    return tuple(orders)
