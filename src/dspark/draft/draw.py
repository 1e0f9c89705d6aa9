"""One token of a draft by the row's own law: what every drafter that samples does with its logits.
It must never return a law other than the one that the token was drawn from, or a token that the grammar forbids.

Shapes: W draft vocabulary, V columns of the target's logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dspark.draft.base import DraftRow
from dspark.types import FORCED, Draft

FORCED_CLAIM = 0.97
"""Of a token that a grammar forces: the target may spell the same text otherwise."""


def draw_token(
    row: DraftRow, words: Tensor, places: Tensor | slice, *, vocab_size: int, drafted: Sequence[int], laws: list[Tensor]
) -> tuple[int, float] | None:
    """The next token after `drafted`, and the largest probability of the law it comes from, known before it is drawn;
    None behind the end of a grammar, and where the draft has no word for anything that is allowed.

    words (W,): the draft's logits; `places`: which of the V = `vocab_size` ids they belong to, the others being
    impossible. Sampled rows append the law (V,) to `laws`; greedy ones take the likeliest token of what their
    processors and grammar leave.
    """
    grammar = row.sampler.grammar
    if grammar is not None and grammar.over(drafted):
        return None
    logits = words.new_full((vocab_size,), float("-inf"))
    logits[places] = words
    processed = row.sampler.process(logits[None], row.tokens, drafted)
    largest = float(processed.max())
    if largest == float("-inf"):
        return None
    if row.params.greedy:
        return int(processed[0].argmax()), math.exp(largest - float(processed[0].logsumexp(-1)))
    law = row.sampler.law_of(processed)[0]
    laws.append(law)
    return row.sampler.draw_draft(law, len(row.tokens) + len(drafted)), float(law.max())


def takes_best(sampler: Any, drafted: Sequence[int], token: int) -> bool:
    """Whether a draft's likeliest token is what the row wants behind `drafted`: greedy rows without processors, where
    the grammar, if there is one, allows it."""
    if sampler is None or sampler.plain_greedy:
        return True
    return sampler.legal_greedy and sampler.grammar.legal([*drafted, token]) > len(drafted)


def with_forced(sampler: Any, draft: Draft, limit: int) -> Draft:
    """The draft, or what the row's grammar forces, where the drafter has nothing or goes the same way less far."""
    grammar = None if sampler is None else sampler.grammar
    if grammar is None or draft.q is not None:
        return draft
    forced = grammar.forced((), limit)
    if len(forced) <= len(draft.tokens) or forced[: len(draft.tokens)] != draft.tokens:
        return draft
    claims = [FORCED_CLAIM ** (j + 1) for j in range(len(forced))]
    return Draft(tokens=forced, survival=claims, source=FORCED)


def cut_illegal(row: DraftRow, draft: Draft) -> Draft:
    """A deterministic draft up to its first token that the row's grammar forbids."""
    grammar = None if row.sampler is None else row.sampler.grammar
    if grammar is None or not draft.tokens:
        return draft
    assert draft.q is None, "to cut what was drawn would anticipate: sampled drafts are masked as they are drawn"
    return draft.prefix(grammar.legal(draft.tokens))
