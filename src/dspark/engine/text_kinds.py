"""TextKinds: what the last tokens of an answer look like, code, markup, numbers, another script or prose.
It must never look at a draft: only at what is committed.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

NUM_RECENT = 16
PROSE = "prose"
LEAST_SHARE = 0.25
"""Of the recent tokens, what must look like something else than prose to be called that."""
CODE = frozenset("{}()[];=\\_$%&+/@~^")
MARKUP = frozenset("<>#*|`")


class TextKinds:
    """The kind of a text by its last NUM_RECENT tokens; a token's own is found once."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """`decode`: ids to text; an id that is no text by itself may become anything."""
        self.decode = decode
        self.by_token: dict[int, str] = {}

    def __call__(self, tokens: Sequence[int]) -> str:
        """One of "code", "markup", "numbers", "script" (letters that are not Latin) and "prose"."""
        known = self.by_token
        recent = tokens[-NUM_RECENT:]
        counts = Counter([known.get(token) or self._look(token) for token in recent])
        del counts[PROSE]
        if not counts:
            return PROSE
        kind, count = max(counts.items(), key=lambda item: (item[1], item[0]))
        return kind if count >= LEAST_SHARE * len(recent) else PROSE

    def _look(self, token: int) -> str:
        kind = self.by_token[token] = kind_of(self.decode([token]))
        return kind


def kind_of(text: str) -> str:
    """Of one token, by its characters."""
    if any(char in MARKUP for char in text):
        return "markup"
    if any(char in CODE for char in text) or (len(text) > 1 and text.isspace()):
        return "code"
    if any(char.isdigit() for char in text):
        return "numbers"
    if any(char.isalpha() and not unicodedata.name(char, "LATIN").startswith("LATIN") for char in text):
        return "script"
    return PROSE
