"""Training prompts: JSON-lines files in, checked token rows out.
It must never drop a row without counting it, nor let a held-out prompt into training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.train.recipe import DataRecipe

MAX_CHARACTERS = 100_000
FIELDS = ("prompt", "question", "text", "turns")


@dataclass(frozen=True, kw_only=True)
class TrainPrompt:
    """One prompt: its text, its task (the row's "task", else the file's name), and its tokens by the chat template."""

    text: str
    task: str
    tokens: tuple[int, ...]
    held_out: bool


def read_prompts(
    recipe: DataRecipe, encode: Callable[[str], Sequence[int]]
) -> tuple[list[TrainPrompt], dict[str, int]]:
    """Every distinct prompt in a fixed shuffled order, and how many rows were left out by reason.

    `encode`: text -> token ids, chat template included. Raises ValueError for a row that is no prompt, is empty or
    has over MAX_CHARACTERS characters.
    """
    found: dict[str, str] = {}
    left_out = {"duplicate": 0, "too long": 0}
    for name in recipe.prompts:
        for text, task in _rows(Path(name)):
            if recipe.tasks and task not in recipe.tasks:
                continue
            left_out["duplicate"] += text in found
            found.setdefault(text, task)
    named = set(recipe.weights) | set(recipe.more_temperatures)
    if unknown := sorted(named - set(found.values())):
        raise ValueError(
            f"data.weights or data.more_temperatures name tasks without prompts: {', '.join(unknown)}; "
            f"the prompts are of {', '.join(sorted(set(found.values())))}"
        )
    order = sorted(found, key=lambda text: _digest(text, recipe.seed))
    prompts = []
    for text in order:
        tokens = tuple(encode(text))
        if len(tokens) > recipe.max_prompt_tokens:
            left_out["too long"] += 1
            continue
        share = int(_digest(text, 0)[:8], 16) / 2**32
        prompts.append(TrainPrompt(text=text, task=found[text], tokens=tokens, held_out=share < recipe.held_out))
    if not any(not prompt.held_out for prompt in prompts):
        raise ValueError("no prompt is left to train on: raise data.max_prompt_tokens or give more prompts")
    return prompts[: recipe.max_prompts or None], left_out


def _digest(text: str, seed: int) -> str:
    return hashlib.blake2b(f"{seed} {text}".encode(), digest_size=8).hexdigest()


def _rows(path: Path) -> list[tuple[str, str]]:
    try:
        # Not splitlines: texts may hold other separators.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a file of JSON lines with prompts") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text; give a file of JSON lines with prompts") from None
    return [
        _row(line, where=f"{path.name}:{number}", task=path.stem)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _row(line: str, *, where: str, task: str) -> tuple[str, str]:
    if len(line) > MAX_CHARACTERS:
        raise ValueError(f"{where}: a row of {len(line)} characters; split it, at most {MAX_CHARACTERS} are taken")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}; give one object a line") from None
    if not isinstance(row, dict):
        raise ValueError(f'{where}: not an object; give rows such as {{"prompt": "..."}}')
    text = next((row[name] for name in FIELDS if name in row), None)
    if isinstance(text, list) and text:
        text = text[0]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: an empty prompt; give text under one of {', '.join(FIELDS)}, or remove the row")
    return text, str(row.get("task", task))
