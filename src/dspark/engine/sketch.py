"""sketch: a prompt as a short list of numbers, near for prompts that share words.
It must never cost more than a fraction of the prompt's own pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark.plan.classes import NUM_NUMBERS

MAX_TOKENS = 1024
"""Tokens of a prompt that are looked at: its first half and its last."""
MULTIPLIER = 2654435761
"""Knuth's multiplicative hash, 2**32 over the golden ratio."""


def sketch(tokens: Sequence[int]) -> list[float]:
    """The signed feature hashing of the square roots of the tokens' counts (Weinberger et al. 2009), NUM_NUMBERS long.

    Roots, as the hundredth "the" says less than the first. The scale is left as it is.
    """
    if len(tokens) > MAX_TOKENS:
        tokens = [*tokens[: MAX_TOKENS // 2], *tokens[-MAX_TOKENS // 2 :]]
    ids, counts = np.unique(np.asarray(tokens, dtype=np.uint64), return_counts=True)
    hashed = (ids * np.uint64(MULTIPLIER)) & np.uint64(0xFFFFFFFF)
    signs = np.where(hashed >> np.uint64(31), 1.0, -1.0)
    places = (hashed >> np.uint64(8)) % np.uint64(NUM_NUMBERS)
    return np.bincount(places.astype(np.int64), weights=signs * np.sqrt(counts), minlength=NUM_NUMBERS).tolist()
