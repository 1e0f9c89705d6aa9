"""AnswerStore: the target's own answers on disk, in shards that an interrupted run can continue.
It must never mix answers of different settings, nor leave half a shard behind."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.train.prompts import TrainPrompt
from dspark.train.recipe import DataRecipe

Generate = Callable[[Sequence[Sequence[int]], int, float, int], list[list[int]]]
"""(prompts, max_tokens, temperature, seed) -> answers: what the engine is for training."""
Progress = Callable[[str, int, int], None]
SHARD = 1024


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt with one answer of the target: tokens[num_prompt:] are the answer, its end token included."""

    tokens: tuple[int, ...]
    num_prompt: int
    task: str
    temperature: float
    held_out: bool

    @property
    def num_answer(self) -> int:
        return len(self.tokens) - self.num_prompt


def make_answers(
    prompts: Sequence[TrainPrompt],
    recipe: DataRecipe,
    *,
    target: str,
    folder: Path,
    generate: Generate,
    progress: Progress | None = None,
) -> list[Example]:
    """Read what `folder` holds and let the target answer the rest, shard by shard, all prompts at one temperature
    before the next. A shard made with other settings is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = [
        (temperature, start, asked[start : start + SHARD])
        for temperature, asked in _asked(prompts, recipe)
        for start in range(0, len(asked), SHARD)
    ]
    examples: list[Example] = []
    for done, (temperature, start, part) in enumerate(shards):
        settings = _settings(recipe, target, part)
        path = folder / f"answers-t{temperature:g}-{start:06d}.json"
        if not path.exists():
            if progress is not None:
                progress("answers of the target", done, len(shards))
            seed = recipe.seed * 1_000_003 + start
            answers = generate([p.tokens for p in part], recipe.max_answer_tokens, temperature, seed)
            _write(path, {"settings": settings, "answers": answers})
        answers = _read(path, settings)
        examples += [
            Example(
                tokens=prompt.tokens + tuple(answer),
                num_prompt=len(prompt.tokens),
                task=prompt.task,
                temperature=temperature,
                held_out=prompt.held_out,
            )
            for prompt, answer in zip(part, answers)
        ]
    if progress is not None:
        progress("answers of the target", len(shards), len(shards))
    return examples


def _asked(prompts: Sequence[TrainPrompt], recipe: DataRecipe) -> list[tuple[float, Sequence[TrainPrompt]]]:
    """Which prompts are answered at which temperature."""
    found: list[tuple[float, Sequence[TrainPrompt]]] = [(temperature, prompts) for temperature in recipe.temperatures]
    more = sorted({t for listed in recipe.more_temperatures.values() for t in listed} - set(recipe.temperatures))
    for temperature in more:
        tasks = [task for task, listed in recipe.more_temperatures.items() if temperature in listed]
        asked = [prompt for prompt in prompts if prompt.task in tasks]
        found.append((temperature, asked[: recipe.more_prompts] if recipe.more_prompts else asked))
    return found


def _settings(recipe: DataRecipe, target: str, prompts: Sequence[TrainPrompt]) -> dict[str, Any]:
    """What a shard's answers depend on."""
    digest = hashlib.blake2b(json.dumps([prompt.tokens for prompt in prompts]).encode(), digest_size=16).hexdigest()
    return {
        "target": target,
        "prompts": digest,
        "max_answer_tokens": recipe.max_answer_tokens,
        "seed": recipe.seed,
    }


def _read(path: Path, settings: Mapping[str, Any]) -> list[list[int]]:
    shard = json.loads(path.read_text())
    if shard["settings"] != settings:
        raise ValueError(
            f"{path} holds answers made with other settings (target, prompts, max_answer_tokens or seed): "
            "choose another output folder, or delete the file"
        )
    return shard["answers"]


def _write(path: Path, value: object) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(value))
    os.replace(temporary, path)
