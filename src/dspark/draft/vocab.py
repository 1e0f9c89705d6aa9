"""What two vocabularies have in common, and a text of one written in the other, for drafts by models of other families.
It must never take two tokens for the same that stand for different bytes, or rewrite what it has written.

Token-level intersection (Timor et al. 2025, arXiv 2502.05202, section 4): a draft is drawn from the draft model's law
restricted to the shared tokens, and verified as any other, so the answer's law stays the target's.
"""

from __future__ import annotations

import codecs
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

    def __len__(self) -> int:
        return len(self.to_draft)

    def to(self, device: torch.device | str) -> SharedVocabulary:
        """With its ids on a device."""
        self.target_ids, self.draft_ids = self.target_ids.to(device), self.draft_ids.to(device)
        return self

    def spell(self, token: int) -> tuple[int, ...] | None:
        """A target's token in the draft's tokens; None where it holds only part of a character."""
        if token in self.to_draft:
            return (self.to_draft[token],)
        if token not in self._spelled:
            try:
                text = self.target.token_bytes(token).decode("utf-8")
            except UnicodeDecodeError:
                self._spelled[token] = None
            else:
                self._spelled[token] = tuple(self.write(text))
        return self._spelled[token]

    def write(self, text: str) -> list[int]:
        """A piece of a text in the draft's tokens, without what its tokenizer adds at a beginning."""
        if not text:
            return []
        ids = self.draft.encode(text, add_special_tokens=False)
        # SentencePiece may put a space before a text: with a letter before it, what is added can be told and cut.
        if b"".join(map(self.draft.token_bytes, ids)) == text.encode():
            return ids
        marked = self.draft.encode(_MARK + text, add_special_tokens=False)
        mark = self.draft.encode(_MARK, add_special_tokens=False)
        return marked[len(mark) :] if marked[: len(mark)] == mark else ids


_MARK = "\n"


@dataclass
class Reading:
    """One sequence as the draft model reads it. `tokens` (the draft's ids) only ever grow; `held`: bytes of a character
    of which some are still to come, in which state nothing can be drafted."""

    words: SharedVocabulary
    tokens: list[int] = field(default_factory=list)
    num_read: int = 0

    def __post_init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

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
        for token in tokens[self.num_read :]:
            self._append(token)
        self.num_read = len(tokens)

    def _append(self, token: int) -> None:
        spelled = self.words.spell(token) if self.whole else None
        if spelled is not None:
            self.tokens += spelled
            return
        text = self.decoder.decode(self.words.target.token_bytes(token))
        self.tokens += self.words.write(text)


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
