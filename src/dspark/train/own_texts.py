"""OwnTexts: what a draft writes itself while it learns, for on-policy rounds (Agarwal et al. 2024, arXiv 2306.13649).
It must never be learned from by its tokens: only the target's laws at its places count."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dspark.train.answer_log import Answerer
from dspark.train.answers import Example
from dspark.train.lessons import Lesson, make_lesson

MOST_TEXTS = 64
"""A round: they are seen a few times each, and cost a generation."""


class OwnTexts:
    """Round by round, kept in the folder as own-texts-<round>.json: a text is not written twice."""

    def __init__(
        self,
        prompts: Sequence[Example],
        folder: Path,
        *,
        snapshot: Callable[[Path], None],
        answerer: Callable[[Path], Answerer],
        num_columns: int,
        max_tokens: int,
        temperature: float,
        seed: int,
    ) -> None:
        """`prompts`: examples whose answers are not used. `snapshot` writes the draft as it is now into a folder;
        `answerer` gives an engine over that folder."""
        self.prompts = prompts
        self.folder = folder
        self.snapshot = snapshot
        self.answerer = answerer
        self.num_columns = num_columns
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.seed = seed

    def __call__(self, index: int) -> list[Lesson]:
        """The lessons of a round."""
        path = self.folder / f"own-texts-{index}.json"
        start = index * MOST_TEXTS % max(1, len(self.prompts))
        chosen = [self.prompts[(start + i) % len(self.prompts)] for i in range(min(MOST_TEXTS, len(self.prompts)))]
        if not path.exists():
            texts = self._write(chosen, index)
            temporary = path.with_suffix(".part")
            temporary.write_text(json.dumps(texts))
            os.replace(temporary, path)
        texts = json.loads(path.read_text())
        return [
            make_lesson(_example(prompt, text), None, num_columns=self.num_columns, own=True)
            for prompt, text in zip(chosen, texts)
            if text
        ]

    def _write(self, chosen: Sequence[Example], index: int) -> list[list[int]]:
        model = self.folder / "snapshot"
        self.snapshot(model)
        texts: list[list[int]] = [[] for _ in chosen]

        def done(place: int, tokens: list[int]) -> bool:
            texts[place] = tokens
            return True

        answerer = self.answerer(model)
        answerer(
            [list(example.tokens[: example.num_prompt]) for example in chosen],
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seeds=[self.seed * 1_000_003 + 1000 * index + i for i in range(len(chosen))],
            done=done,
        )
        return texts


def _example(prompt: Example, text: Sequence[int]) -> Example:
    return Example(
        tokens=prompt.tokens[: prompt.num_prompt] + tuple(text),
        num_prompt=prompt.num_prompt,
        task=prompt.task,
        temperature=prompt.temperature,
        held_out=prompt.held_out,
    )
