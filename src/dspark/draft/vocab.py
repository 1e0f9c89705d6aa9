"""What two vocabularies have in common, and a text of one written in the other, for drafts by models of other families.
It must never take two tokens for the same that stand for different bytes, or rewrite what it said to be settled.

Two ways to draft (Timor et al. 2025, arXiv 2502.05202), either with the target's law in the answer:
token-level intersection (their section 4), a draft drawn from the draft model's law restricted to the shared tokens and
verified as any other; and string-level exact match (their section 3), the draft model's own likeliest text written in
the target's tokens, which are kept while they are what the target says.
"""

from __future__ import annotations

import bisect
import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


class Words(Protocol):
    """What is needed of a tokenizer (model/tokenizer)."""

    num_tokens: int
    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class SharedVocabulary:
    """Tokens of a target's and a draft's vocabulary that stand for the same bytes; special ones that are written alike.

    `target_ids`, `draft_ids` (S,): the shared tokens as each numbers them. Of several tokens with the same bytes one is
    taken: in vocabularies with byte fallback the piece, and not the byte.
    """

    def __init__(self, target: Words, draft: Words, *, max_target: int, max_draft: int) -> None:
        """`max_target`, `max_draft`: ids from there on have no logit."""
        self.target = target
        self.draft = draft
        ours, theirs = _by_bytes(target, max_target), _by_bytes(draft, max_draft)
        pairs = sorted((index, theirs[key]) for key, index in ours.items() if key in theirs)
        self.to_draft = dict(pairs)
        self.target_ids = torch.tensor([index for index, _ in pairs], dtype=torch.long)
        self.draft_ids = torch.tensor([index for _, index in pairs], dtype=torch.long)
        self.num_draft = len(theirs)
        self._spelled: dict[int, tuple[int, ...] | None] = {}
        self._texts: dict[int, str | None] = {}
        self._from_draft: dict[int, int] | None = None

    def __len__(self) -> int:
        return len(self.to_draft)

    def to(self, device: torch.device | str) -> SharedVocabulary:
        """With its ids on a device."""
        self.target_ids, self.draft_ids = self.target_ids.to(device), self.draft_ids.to(device)
        return self

    def text(self, token: int) -> str | None:
        """A target's token as text; None where it holds only part of a character."""
        if token not in self._texts:
            try:
                self._texts[token] = self.target.token_bytes(token).decode("utf-8")
            except UnicodeDecodeError:
                self._texts[token] = None
        return self._texts[token]

    def spell(self, token: int) -> tuple[int, ...] | None:
        """A target's token in the draft's tokens; None where it holds only part of a character."""
        if token in self.to_draft:
            return (self.to_draft[token],)
        if token not in self._spelled:
            text = self.text(token)
            self._spelled[token] = None if text is None else tuple(self.write(text))
        return self._spelled[token]

    def write(self, text: str) -> list[int]:
        """A piece of a text in the draft's tokens, without what its tokenizer adds at a beginning."""
        return _write(self.draft, text)

    def retell(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """The draft's tokens in the target's, and how many of the draft's each of these stands on. What is no text
        (special tokens, parts of characters) is told token by token, as far as the target has the same ones."""
        num_text, text, ends = self._text_of(tokens)
        told = _write(self.target, text)
        stands, end = [], 0
        for token in told:
            end += len(self.target.token_bytes(token))
            stands.append(min(bisect.bisect_left(ends, end) + 1, len(ends)))
        for index in range(num_text, len(tokens)):
            same = self._to_target().get(tokens[index])
            if same is None:
                break
            told.append(same)
            stands.append(index + 1)
        return told, stands

    def _text_of(self, tokens: Sequence[int]) -> tuple[int, str, list[int]]:
        """How many of the draft's tokens are text together, that text, and where in its bytes each of them ends."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        count, text, pending, ends, size = 0, "", "", [], 0
        for index, token in enumerate(tokens):
            raw = self.draft.token_bytes(token)
            try:
                pending += decoder.decode(raw)
            except UnicodeDecodeError:
                break
            if token in self.draft.special_ids:
                break
            size += len(raw)
            ends.append(size)
            if not decoder.getstate()[0]:
                count, text, pending = index + 1, text + pending, ""
        return count, text, ends[:count]

    def _to_target(self) -> dict[int, int]:
        if self._from_draft is None:
            self._from_draft = {theirs: ours for ours, theirs in self.to_draft.items()}
        return self._from_draft


def _write(words: Words, text: str) -> list[int]:
    """A piece of a text, without what the tokenizer adds at a beginning."""
    if not text:
        return []
    ids = words.encode(text, add_special_tokens=False)
    # SentencePiece may put a space before a text: with a letter before it, what is added can be told and cut.
    if b"".join(map(words.token_bytes, ids)) == text.encode():
        return ids
    marked = words.encode(_MARK + text, add_special_tokens=False)
    mark = words.encode(_MARK, add_special_tokens=False)
    return marked[len(mark) :] if marked[: len(mark)] == mark else ids


_MARK = "\n"
_SETTLE_FROM = 24
"""Characters from which on a tail is looked at for a place to settle."""
_MAX_TAIL = 96
"""Characters that may be rewritten: a text without a place to settle is settled as it stands."""
_WORD_START = re.compile(r"(?<=\S)\s")


@dataclass
class Reading:
    """One sequence as the draft model reads it, as its tokenizer would write the text.

    `tokens` (the draft's ids): the first `num_settled` never change; what comes after them is written anew as the text
    goes on, for how a word is written depends on how it ends.
    """

    words: SharedVocabulary
    tokens: list[int] = field(default_factory=list)
    num_settled: int = 0
    num_read: int = 0

    def __post_init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.tail = ""

    @property
    def whole(self) -> bool:
        """Whether all that was read has been written."""
        return not self.decoder.getstate()[0]

    def extend(self, tokens: Sequence[int], *, num_prompt: int) -> None:
        """Read on: `tokens` are all of the sequence, which begins with what was read before."""
        if self.num_read == 0 and num_prompt:
            text = self.words.target.decode(list(tokens[:num_prompt]), skip_special_tokens=False)
            # A text begins as the draft's tokenizer begins one; the target's own beginning says nothing to it.
            start = next((i for i in range(num_prompt) if tokens[i] not in self.words.target.special_ids), num_prompt)
            known = [token for token in tokens[:start] if token in self.words.to_draft]
            if start and not known:
                text = self.words.target.decode(list(tokens[start:num_prompt]), skip_special_tokens=False)
            self.tokens += self.words.draft.encode(text.removesuffix("\ufffd")) or self.words.write(" ")
            self.num_read = num_prompt
            self.num_settled = len(self.tokens)
        for token in tokens[self.num_read :]:
            special = token in self.words.target.special_ids
            if self.whole and (special or (token in self.words.to_draft and self.words.text(token) is None)):
                self._settle_with(self.words.spell(token) or ())
            else:
                self.tail += self.decoder.decode(self.words.target.token_bytes(token))
        if self.num_read < len(tokens):
            self._write_tail()
        self.num_read = len(tokens)

    def _settle_with(self, tokens: Sequence[int]) -> None:
        """All that was read, and what is no text behind it."""
        self.tokens[self.num_settled :] = [*self.words.write(self.tail), *tokens]
        self.num_settled, self.tail = len(self.tokens), ""

    def _write_tail(self) -> None:
        """The tail in tokens. Up to the start of a word it is settled, where the tokenizer writes both parts apart as
        it writes them together."""
        written = self.words.write(self.tail)
        self.tokens[self.num_settled :] = written
        if len(self.tail) < _SETTLE_FROM:
            return
        for start in reversed([match.start() for match in _WORD_START.finditer(self.tail)][-3:]):
            first, rest = self.words.write(self.tail[:start]), self.words.write(self.tail[start:])
            if [*first, *rest] == written:
                self.num_settled += len(first)
                self.tail = self.tail[start:]
                return
        if len(self.tail) > _MAX_TAIL:
            self.num_settled, self.tail = len(self.tokens), ""


def _by_bytes(words: Words, max_id: int) -> dict[tuple[bool, bytes], int]:
    """Token by what it stands for. The longest id list is a few hundred thousand, read once."""
    found: dict[tuple[bool, bytes], int] = {}
    for index in range(min(words.num_tokens, max_id)):
        raw = words.token_bytes(index)
        if not raw:
            continue
        key = (index in words.special_ids, raw)
        # Bytes of a byte fallback come before the pieces, so that the later one is what text is made of.
        if len(raw) == 1 or key not in found:
            found[key] = index
    return found
