"""Questions: what `dspark verify` asks, from the rows of known tasks, with the parameters that each is asked under.
It must never ask the two sides different things: a question is made once.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.params import MAX_LOGPROBS, SamplingParams

TASKS = ("humaneval", "gsm8k", "mmlu", "mtbench", "jsonschema")
LETTERS, PENALTIES, SEEDED = "mmlu-letters", "mtbench-penalties", "mtbench-seeded"
FIELDS: Mapping[str, tuple[str, ...]] = {
    "humaneval": ("prompt", "test", "entry_point"),
    "gsm8k": ("question", "answer"),
    "mmlu": ("question", "choices", "answer"),
    "mtbench": ("turns",),
    "jsonschema": ("schema",),
}
STOPS = ("\n\n\n", "In conclusion", "Overall,", "###")
"""Of the questions that watch the ends: strings that answers do write, so that some end in the midst of a block."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """`messages` of a chat, the `params` of the request, and the `row` that it was made from, for scoring."""

    task: str
    id: str
    messages: tuple[Mapping[str, str], ...]
    params: SamplingParams
    row: Mapping[str, Any]


def read_rows(folder: str | Path, task: str, *, per_task: int | None = None, seed: int = 0) -> list[Mapping[str, Any]]:
    """The rows of FOLDER/<task>.jsonl, or `per_task` of them by chance, the same for the same seed.

    Each row has an "id". Raises ValueError, one line, for what is no such file.
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r} is not known: choose of {', '.join(TASKS)}")
    path = Path(folder) / f"{task}.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--data: {path} cannot be read ({error}); give a folder with {task}.jsonl in it") from None
    rows = [_row(line, where=f"{path.name}:{i}", task=task, place=i) for i, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ValueError(f"{path}: no row in it; give JSON lines with {', '.join(FIELDS[task])}")
    if per_task is not None and per_task < len(rows):
        chosen = sorted(random.Random(f"{seed} {task}").sample(range(len(rows)), per_task))
        rows = [rows[i] for i in chosen]
    return rows


def _row(line: str, *, where: str, task: str, place: int) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); give one object a line") from None
    missing = [name for name in FIELDS[task] if not isinstance(row, dict) or name not in row]
    if missing:
        raise ValueError(f"{where}: no {', '.join(missing)} in this row; rows of {task} have {', '.join(FIELDS[task])}")
    names = [row[key] for key in ("id", "task_id", "question_id") if key in row]
    return {**row, "id": str(names[0] if names else place)}


def questions_of(task: str, rows: Sequence[Mapping[str, Any]], *, max_tokens: int, seed: int = 0) -> list[Question]:
    """All that is asked of these rows, greedily unless a name says otherwise.

    mmlu: the answer in words, and the letters' log-probabilities. mtbench: the first turn greedily, then under
    penalties with stop strings and a least length, then sampled with a seed; the last two watch the parts of the road
    that plain greedy answers do not go.
    """
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    found = []
    for number, row in enumerate(rows):
        if task == "jsonschema":
            shape: Mapping[str, object] = {"json": row["schema"]}
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, structured_outputs=shape)
            found.append(_ask(task, row, _words(task, row), params))
            continue
        found.append(_ask(task, row, _words(task, row), greedy))
        if task == "mmlu":
            letters = SamplingParams(temperature=0.0, max_tokens=1, logprobs=MAX_LOGPROBS)
            found.append(_ask(LETTERS, row, _words(LETTERS, row), letters))
        if task == "mtbench":
            found.append(_ask(PENALTIES, row, _words(task, row), _penalised(max_tokens)))
            drawn = SamplingParams(temperature=0.8, max_tokens=max_tokens, seed=seed + number)
            found.append(_ask(SEEDED, row, _words(task, row), drawn))
    return found


def _penalised(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=min(8, max_tokens),
        presence_penalty=0.3,
        frequency_penalty=0.4,
        stop=STOPS,
    )


def _ask(task: str, row: Mapping[str, Any], text: str, params: SamplingParams) -> Question:
    return Question(task=task, id=row["id"], messages=({"role": "user", "content": text},), params=params, row=row)


def _words(task: str, row: Mapping[str, Any]) -> str:
    if task == "humaneval":
        return f"Complete this Python function. Answer with code only.\n```python\n{row['prompt']}```"
    if task == "gsm8k":
        return f"{row['question']}\nThink step by step, then write the answer as #### and the number."
    if task in ("mmlu", LETTERS):
        choices = "\n".join(f"{chr(ord('A') + i)}. {choice}" for i, choice in enumerate(row["choices"]))
        ask = (
            "Answer with the letter alone." if task == LETTERS else "Explain briefly, then give 'Answer:' and a letter."
        )
        return f"{row['question']}\n{choices}\n{ask}"
    if task == "mtbench":
        return str(row["turns"][0])
    schema = row["schema"]
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return f"Write one JSON object that is valid under this JSON schema. Answer with JSON only.\n{text}"
