"""TargetLaws: the target's law at each place of a text, over the tokens that a draft can say.
It must never renormalise them: what lies on other tokens is lost to the draft, and the loss must know.

Shapes: R rows of a lesson, V target vocabulary, W columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.model.batch import Span, pack
from dspark.model.cache import KVCache
from dspark.train.lessons import Columns, Lesson

PAGE = 16


class TargetLaws:
    """One pass of the target a lesson, by the runner that serves; nothing is kept."""

    def __init__(self, runner: Any, columns: Columns, *, num_valid: int, temperature: float, max_tokens: int) -> None:
        """`num_valid`: ids from there on are padding and have no part in the law. `max_tokens` of a lesson."""
        assert temperature > 0, "a law of temperature 0 is the answer's token: learn from the labels"
        self.runner = runner
        self.columns = columns
        self.num_valid = num_valid
        self.temperature = temperature
        num_pages = -(-max_tokens // PAGE) + 1
        self.cache = KVCache(
            list(runner.layer_specs),
            num_pages=num_pages,
            page_size=PAGE,
            max_window_pages=num_pages,
            prefix_reuse=False,
            dtype=runner.cache_dtype,
            device=runner.device,
        )

    @torch.no_grad()
    def __call__(self, lesson: Lesson) -> Tensor:
        """(R, W) float32: probabilities, which sum to at most 1."""
        example = lesson.example
        tokens = example.tokens[:-1]
        self.cache.open(0, tokens)
        assert self.cache.reserve(0, len(tokens)), "a lesson is longer than TargetLaws.max_tokens"
        span = Span(seq_id=0, start=0, tokens=tokens, num_logits=example.num_answer)
        logits = self.runner.forward(pack([span], self.cache), self.cache).logits
        self.cache.close(0)
        rows = torch.tensor(lesson.answers, dtype=torch.long, device=logits.device)
        law = torch.softmax(logits[rows, : self.num_valid].float() / self.temperature, dim=-1)
        return law[:, self.columns.target]
