"""Lesson: what a draft model learns from one answer, in its own tokens, row by row as the engine will ask it.
It must never score a token that the engine could not draft, nor one of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.draft.vocab import Reading, SharedVocabulary
from dspark.train.answers import Example


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The tokens that can be drafted, W of them: `target` and `draft` pick them among either's logits."""

    target: Tensor | slice
    draft: Tensor | slice
    num_columns: int


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """`tokens`: prompt and answer as the draft reads them. `rows` (R,): places in them after which the target's next
    token is guessed; `labels` (R,): its column, -1 where the draft does not have it, or has nothing to learn from it;
    `answers` (R,): which token of the target's answer that is. `example`: the same in the target's tokens."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    labels: tuple[int, ...]
    answers: tuple[int, ...]
    example: Example


def columns_of(words: SharedVocabulary | None, *, num_target: int, num_draft: int) -> Columns:
    """All that both have logits for, where the tokenizers agree (`words` None), else the shared tokens."""
    if words is None:
        both = slice(0, min(num_target, num_draft))
        return Columns(target=both, draft=both, num_columns=both.stop)
    return Columns(target=words.target_ids, draft=words.draft_ids, num_columns=len(words))


def make_lesson(example: Example, words: SharedVocabulary | None, *, num_columns: int, own: bool = False) -> Lesson:
    """`own`: the text is the draft's, so that only the target's laws can be learned from it."""
    if words is None:
        made = _same(example, num_columns)
    else:
        made = _foreign(example, words)
    tokens, rows, labels, answers = made
    if own:
        labels = [-1] * len(labels)
    return Lesson(tokens=tuple(tokens), rows=tuple(rows), labels=tuple(labels), answers=tuple(answers), example=example)


def _same(example: Example, num_columns: int) -> tuple[Sequence[int], Sequence[int], list[int], Sequence[int]]:
    rows = range(example.num_prompt - 1, len(example.tokens) - 1)
    following = example.tokens[example.num_prompt :]
    labels = [token if token < num_columns else -1 for token in following]
    # As ModelDrafter reads: a token without a row is token 0.
    read = [token if token < num_columns else 0 for token in example.tokens]
    return read, rows, labels, range(example.num_answer)


def _foreign(example: Example, words: SharedVocabulary) -> tuple[list[int], list[int], list[int], list[int]]:
    """As ModelDrafter reads another family's tokens: it guesses where all that was read has been written."""
    column = _column_of(words)
    reading = Reading(words)
    rows, labels, answers = [], [], []
    for place in range(example.num_prompt, len(example.tokens)):
        reading.extend(example.tokens[:place], num_prompt=example.num_prompt)
        if reading.whole:
            rows.append(len(reading.tokens) - 1)
            labels.append(column.get(example.tokens[place], -1))
            answers.append(place - example.num_prompt)
    reading.extend(example.tokens, num_prompt=example.num_prompt)
    return reading.tokens, rows, labels, answers


def _column_of(words: SharedVocabulary) -> dict[int, int]:
    """Target's id -> column. Made anew a lesson: a few milliseconds, against seconds of training."""
    return dict(zip(words.to_draft, range(len(words))))


@dataclass(frozen=True, kw_only=True)
class LessonBatch:
    """Lessons side by side: tokens (N, T), padded behind, where nothing that counts can see; places (R,) into N * T,
    and labels (R,), lesson by lesson; `counts`: rows of each."""

    lessons: Sequence[Lesson]
    tokens: Tensor
    places: Tensor
    labels: Tensor
    counts: list[int]


def batch_of(lessons: Sequence[Lesson], device: torch.device) -> LessonBatch:
    """Shapes as LessonBatch."""
    longest = max(len(lesson.tokens) for lesson in lessons)
    tokens = torch.zeros(len(lessons), longest, dtype=torch.long)
    places: list[int] = []
    for index, lesson in enumerate(lessons):
        tokens[index, : len(lesson.tokens)] = torch.tensor(lesson.tokens)
        places += [index * longest + row for row in lesson.rows]
    return LessonBatch(
        lessons=lessons,
        tokens=tokens.to(device),
        places=torch.tensor(places, dtype=torch.long, device=device),
        labels=torch.tensor([label for lesson in lessons for label in lesson.labels], device=device),
        counts=[len(lesson.rows) for lesson in lessons],
    )
