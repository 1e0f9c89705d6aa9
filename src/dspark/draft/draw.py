"""One token of a draft by the row's own law: what every drafter that samples does with its logits.
It must never return a law other than the one that the token was drawn from.

Shapes: W draft vocabulary, V columns of the target's logits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dspark.draft.base import DraftRow


def draw_token(
    row: DraftRow, words: Tensor, places: Tensor | slice, *, vocab_size: int, drafted: Sequence[int], laws: list[Tensor]
) -> tuple[int, float]:
    """The next token after `drafted`, and the largest probability of the law it comes from, known before it is drawn.

    words (W,): the draft's logits; `places`: which of the V = `vocab_size` ids they belong to, the others being
    impossible. Sampled rows append the law (V,) to `laws`; greedy ones, whose processors need the law as well, take
    its likeliest token.
    """
    logits = words.new_full((vocab_size,), float("-inf"))
    logits[places] = words
    law = row.sampler.law(logits[None], row.tokens, drafted)[0]
    claim = float(law.max())
    if row.params.greedy:
        return int(law.argmax()), claim
    laws.append(law)
    return row.sampler.draw_draft(law, len(row.tokens) + len(drafted)), claim
