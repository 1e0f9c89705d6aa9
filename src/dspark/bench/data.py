"""Prompts of a benchmark: rows (task, id, messages) read from JSON lines, and their token ids.
It must never guess: a line that is no prompt is an error that names file and line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

MAX_LINE_CHARACTERS = 1_000_000
MAX_PROMPT_TOKENS = 1500
FIELDS = "prompt, turns, messages, question or schema"


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One prompt. `messages` are chat messages (role, content); `task` groups the figures, `id` names the row."""

    task: str
    id: str
    messages: tuple[Mapping[str, str], ...]


def load_rows(
    paths: Sequence[str | Path],
    *,
    per_task: int | None = None,
    tasks: Sequence[str] | None = None,
    check_task: Callable[[str], object] = lambda task: None,
) -> list[PromptRow]:
    """Rows of files, folders (every *.jsonl in it, by name) and "-" (stdin), in their order.

    `per_task` keeps the first N rows of each task, `tasks` only these tasks. A multi-turn row asks its first turn.
    Raises ValueError, one line, for a missing or empty file, broken JSON, a line over a million characters, a row
    without a prompt, or whose task `check_task` raises it for, and a task that no row has.
    """
    if per_task is not None and per_task < 1:
        raise ValueError(f"per-task={per_task} leaves no prompt: give at least 1, or leave it out for all of them")
    rows = [row for name, stream in _streams(paths) for row in _read(stream, name=name, check_task=check_task)]
    known = list(dict.fromkeys(row.task for row in rows))
    if tasks is not None and (unknown := sorted(set(tasks) - set(known))):
        raise ValueError(f"no prompt has the task {', '.join(unknown)}: the data has {', '.join(known)}")
    counts: dict[str, int] = {}
    kept = []
    for row in rows:
        if tasks is not None and row.task not in tasks:
            continue
        counts[row.task] = counts.get(row.task, 0) + 1
        if per_task is None or counts[row.task] <= per_task:
            kept.append(row)
    return kept


def files_of(path: str | Path) -> list[Path]:
    """The files of one path of data: of a folder every *.jsonl in it, by name."""
    path = Path(path)
    return sorted(path.glob("*.jsonl")) if path.is_dir() else [path]


def printable(name: str) -> str:
    """A task's or a row's name on one line, as any terminal and page can show it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def interleave(rows: Sequence[PromptRow]) -> list[PromptRow]:
    """The first row of each task, then the second of each, as mixed traffic comes."""
    by_task: dict[str, list[PromptRow]] = {}
    for row in rows:
        by_task.setdefault(row.task, []).append(row)
    longest = max((len(listed) for listed in by_task.values()), default=0)
    return [listed[i] for i in range(longest) for listed in by_task.values() if i < len(listed)]


def encode_rows(rows: Sequence[PromptRow], tokenizer: Any, *, max_tokens: int = MAX_PROMPT_TOKENS) -> list[list[int]]:
    """Token ids by the model's chat template with the generation prompt, the first `max_tokens` of them.

    A model without a template is given the bare text of the messages. Cutting at the end may cut the generation prompt
    off; peers are measured on the same ids, so the comparison stands.
    """
    encode = _chat_encoder(tokenizer) if rows else tokenizer.encode
    return [list(encode(row))[:max_tokens] for row in rows]


def _chat_encoder(tokenizer: Any) -> Callable[[PromptRow], Sequence[int]]:
    def by_template(row: PromptRow) -> Sequence[int]:
        return tokenizer.apply_chat_template([dict(message) for message in row.messages], add_generation_prompt=True)

    def bare(row: PromptRow) -> Sequence[int]:
        return tokenizer.encode("\n".join(message["content"] for message in row.messages))

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    except ValueError as error:
        print(f"dspark bench: {error}; prompts are given as bare text", file=sys.stderr)
        return bare
    return by_template


def _streams(paths: Sequence[str | Path]) -> Iterator[tuple[str, TextIO]]:
    if not paths:
        raise ValueError("no data: give a file of JSON lines, a folder of them, or - for stdin")
    for path in paths:
        if str(path) == "-":
            yield "stdin", sys.stdin
            continue
        files = files_of(path)
        if not files:
            raise ValueError(f"{path}: no *.jsonl in this folder; give a folder or a file of JSON lines")
        for file in files:
            try:
                stream = file.open(encoding="utf-8")
            except OSError as error:
                raise ValueError(f"{file}: {error.strerror}; give a file of JSON lines, a folder, or -") from None
            with stream:
                yield file.name, stream


def _read(stream: TextIO, *, name: str, check_task: Callable[[str], object]) -> list[PromptRow]:
    rows: list[PromptRow] = []
    number = 0
    try:
        while line := stream.readline(MAX_LINE_CHARACTERS + 1):
            number += 1
            if len(line) > MAX_LINE_CHARACTERS:
                raise ValueError(
                    f"{name}:{number}: a line of over {MAX_LINE_CHARACTERS} characters; "
                    "give one JSON object a line, each a prompt"
                )
            if line.strip():
                rows.append(_row(_parse(line, where=f"{name}:{number}"), number=number, name=name))
                _check_task(rows[-1].task, check_task, where=f"{name}:{number}")
    except UnicodeDecodeError:
        raise ValueError(f"{name}: not UTF-8 text after line {number}; give a file of JSON lines") from None
    if not rows:
        raise ValueError(f"{name}: no prompt in it; give JSON lines with {FIELDS}")
    return rows


def _parse(line: str, *, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        detail = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise ValueError(f"{where}: not JSON ({detail}); give one object a line") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a JSON {type(value).__name__}, not an object; give one object with {FIELDS}")
    return value


def _row(value: dict[str, Any], *, number: int, name: str) -> PromptRow:
    where = f"{name}:{number}"
    names = [value[key] for key in ("id", "task_id", "question_id") if key in value]
    return PromptRow(
        task=str(value.get("task", Path(name).stem)),
        id=str(names[0] if names else number),
        messages=_messages(value, where=where),
    )


def _check_task(task: str, check: Callable[[str], object], *, where: str) -> None:
    try:
        check(task)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _messages(value: dict[str, Any], *, where: str) -> tuple[Mapping[str, str], ...]:
    messages = value.get("messages")
    if messages is not None:
        usable = isinstance(messages, list) and messages and all(_is_message(message) for message in messages)
        if not usable:
            raise ValueError(f"{where}: messages must be a non-empty list of objects with role and content strings")
        return tuple({"role": message["role"], "content": message["content"]} for message in messages)
    text = _text(value)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: no prompt in this row; give {FIELDS}, not empty")
    return ({"role": "user", "content": text},)


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _text(value: dict[str, Any]) -> object:
    """The user's words of the known row kinds; None for others."""
    if "turns" in value:
        turns = value["turns"]
        return turns[0] if isinstance(turns, list) and turns else None
    if "prompt" in value and "entry_point" in value:  # HumanEval: the head of a function
        return f"Complete this Python function. Answer with code only.\n```python\n{value['prompt']}```"
    if "prompt" in value:
        return value["prompt"]
    if "question" in value and isinstance(value.get("choices"), list):  # MMLU
        choices = "\n".join(f"{chr(ord('A') + i)}. {choice}" for i, choice in enumerate(value["choices"]))
        return f"{value['question']}\n{choices}\nExplain briefly, then give the letter of the right answer."
    if "question" in value:
        return value["question"]
    if "schema" in value:
        schema = json.dumps(value["schema"])
        return f"Write one JSON object that is valid under this JSON schema. Answer with JSON only.\n{schema}"
    return None
