"""Ends: the one function through which every emitted token goes, and everything that may end an answer.
It must never see a block: tokens come one at a time, whether they were drafted or not."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from dspark.types import Sequence


class StopWatcher:
    """Text of one sequence and its stop strings.

    `stream` is a TokenStream (model/tokenizer): text that becomes final token by token. Text that could still turn
    into a stop string is held back from `Sequence.text` until it cannot.
    """

    def __init__(self, stream, *, stop: Seq[str], include_stop: bool) -> None:
        self.stream = stream
        self.stop = stop
        self.include_stop = include_stop
        self.held = ""

    def push(self, seq: Sequence, token: int, *, may_stop: bool) -> str | None:
        """Add a token's text; returns the stop string that it completes, if any (the earliest in the text)."""
        piece = self.stream.push(token)
        if not self.stop:
            seq.text += piece
            return None
        self.held += piece
        found = self._find() if may_stop else None
        if found is not None:
            start, word = found
            seq.text += self.held[: start + (len(word) if self.include_stop else 0)]
            self.held = ""
            return word
        # Held back before min_tokens too: a stop string may begin there and be complete only after.
        keep = self._num_held()
        seq.text += self.held[: len(self.held) - keep]
        self.held = self.held[len(self.held) - keep :]
        return None

    def finish(self, seq: Sequence, *, may_stop: bool) -> str | None:
        """The answer has ended: what was held back is text after all. The stream may have held back a stop string whose
        bytes are complete only now; it is returned, and the text ends there."""
        self.held += self.stream.flush()
        found = self._find() if may_stop and self.stop else None
        start, word = found or (len(self.held), "")
        seq.text += self.held[: start + (len(word) if self.include_stop else 0)]
        self.held = ""
        return word or None

    def _find(self) -> tuple[int, str] | None:
        # The stop string that is complete first wins; of those completed by the same character, the longest.
        hits = [(self.held.find(word), word) for word in self.stop]
        ends = [(start + len(word), start, word) for start, word in hits if start >= 0]
        if not ends:
            return None
        _, start, word = min(ends, key=lambda hit: (hit[0], hit[1]))
        return start, word

    def _num_held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for word in self.stop:
            for size in range(min(len(word) - 1, len(self.held)), longest, -1):
                if word.startswith(self.held[-size:]):
                    longest = size
                    break
        return longest


def append_token(
    seq: Sequence,
    token: int,
    *,
    watcher: StopWatcher,
    eos_token_ids: Seq[int],
    max_context: int,
    complete: bool = False,
) -> bool:
    """Emit one token; True when the answer ends with it. `complete`: with this token nothing more can follow in the
    answer's grammar.

    Order of ends at one token: a stop token (its text is not part of the answer, its id is), then a stop string, then
    the grammar, whatever min_tokens says, then the length. A stop exactly at the budget is a stop.
    """
    params = seq.params
    seq.tokens.append(token)
    may_stop = seq.num_output >= params.min_tokens
    is_eos = token in eos_token_ids and not params.ignore_eos
    if may_stop and (is_eos or token in params.stop_token_ids):
        seq.finish_reason = "stop"
        seq.stop_reason = watcher.finish(seq, may_stop=True) or (None if is_eos else token)
        return True
    word = watcher.push(seq, token, may_stop=may_stop)
    if word is not None:
        seq.finish_reason, seq.stop_reason = "stop", word
        return True
    if complete:
        seq.finish_reason, seq.stop_reason = "stop", watcher.finish(seq, may_stop=may_stop)
        return True
    if seq.num_output == params.max_tokens or len(seq.tokens) >= max_context:
        seq.stop_reason = watcher.finish(seq, may_stop=may_stop)
        seq.finish_reason = "length" if seq.stop_reason is None else "stop"
        return True
    return False
