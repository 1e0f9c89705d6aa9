"""AnswerStore: the most recently useful finished answers, indexed for lookup by others.
It must never hold more than its bound, keep part of an answer after evicting it, or store a prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from dspark.draft.occurrences import OccurrenceIndex


class AnswerStore:
    """Whole answers under a bound on their tokens; the least recently used answer leaves first.

    An answer counts as used when it is stored and when a draft was taken from it (`touch`). One longer than the whole
    bound keeps its last `max_tokens` tokens.
    """

    def __init__(self, *, max_tokens: int, orders: Sequence[int]) -> None:
        self.max_tokens = max_tokens
        self.index = OccurrenceIndex(orders)
        self.num_tokens = 0
        self._next_id = 0
        self._seq_of: OrderedDict[int, int] = OrderedDict()
        self._text_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._seq_of)

    def add(self, seq_id: int, answer: Sequence[int]) -> None:
        """Store an answer, then evict until the bound holds. One too short to hold any n-gram is not stored."""
        answer = answer[max(0, len(answer) - self.max_tokens) :]
        if len(answer) <= self.index.orders[0]:
            return
        text_id = self._next_id
        self._next_id += 1
        self.index.extend(text_id, answer)
        self._seq_of[text_id] = seq_id
        self._text_of[seq_id] = text_id
        self.num_tokens += len(answer)
        while self.num_tokens > self.max_tokens:
            self._remove(next(iter(self._seq_of)))

    def take_back(self, seq_id: int, answer: Sequence[int]) -> None:
        """Drop what `seq_id` stored if `answer` goes on from it: the sequence was preempted and has come back."""
        text_id = self._text_of.get(seq_id)
        if text_id is None:
            return
        text = self.index.text(text_id)
        if len(text) <= len(answer) and list(answer[: len(text)]) == list(text):
            self._remove(text_id)

    def touch(self, position: int) -> None:
        """Mark the answer that holds `position` (of `index`) as just used."""
        self._seq_of.move_to_end(self.index.text_id(position))

    def _remove(self, text_id: int) -> None:
        seq_id = self._seq_of.pop(text_id)
        if self._text_of.get(seq_id) == text_id:
            del self._text_of[seq_id]
        self.num_tokens -= len(self.index.text(text_id))
        self.index.remove(text_id)
