"""Scoring: whether an answer to a question of a known task is right, and what can be counted of one that has no key.
It must never ask a model, nor be kinder to one answer than to another with the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from dspark.quality.sandbox import Ran, run_program

REFUSALS = (
    *("i can't", "i cannot", "i can not", "i'm sorry", "i am sorry", "i'm unable", "i am unable", "as an ai"),
    *("i won't", "i will not", "i'm not able", "i am not able"),
)
OPENING = 200
"""Characters of an answer in which a refusal is looked for."""
GRAM = 4
FENCE = re.compile(r"```[ \t]*[A-Za-z0-9_+-]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
LETTER = re.compile(r"\b([A-J])\b")


def program_of(text: str, row: Mapping[str, Any]) -> str:
    """The program that tests an answer to a HumanEval row: the answer's code, behind the prompt unless it defines the
    function itself, then the row's tests."""
    blocks = FENCE.findall(text)
    defines = re.compile(rf"^[ \t]*def[ \t]+{re.escape(row['entry_point'])}\b", re.MULTILINE)
    code = next((block for block in blocks if defines.search(block)), blocks[0] if blocks else text)
    found = defines.search(code)
    if found:
        head = row["prompt"].split(f"def {row['entry_point']}")[0]  # imports and helpers that the function may use
        code = head + "\n" + code
    else:
        code = row["prompt"] + code
    return f"{code}\n\n{row['test']}\n\ncheck({row['entry_point']})\n"


def score_humaneval(text: str, row: Mapping[str, Any], *, run: Callable[[str], Ran] = run_program) -> bool:
    """pass@1: the tests of the row hold."""
    return run(program_of(text, row)).passed


def score_gsm8k(text: str, row: Mapping[str, Any]) -> bool:
    """Exact match of the number behind the last "####", or else of the last number, with that of the row."""
    tail = text.rpartition("####")[2] if "####" in text else text
    numbers = NUMBER.findall(tail)
    if not numbers:
        return False
    found = numbers[0] if "####" in text else numbers[-1]
    return _number(found) == _number(str(row["answer"]))


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").replace("$", ""))
    except ValueError:
        return None


def score_mmlu(text: str, row: Mapping[str, Any]) -> bool:
    """The first letter behind "answer", or else the first that stands alone, is that of the row."""
    tail = re.split(r"(?i)\banswer\b", text)
    letters = LETTER.findall(tail[1]) if len(tail) > 1 else []
    letters = letters or LETTER.findall(text)
    return bool(letters) and letters[0] == letter_of(row)


def letter_of(row: Mapping[str, Any]) -> str:
    """The right one."""
    return chr(ord("A") + int(row["answer"]))


def likeliest_letter(logprobs: Mapping[str, float]) -> str | None:
    """Of a mapping from letter to log-probability; ties go to the first letter, none where nothing is known."""
    return min(logprobs, key=lambda letter: (-logprobs[letter], letter)) if logprobs else None


def score_json(text: str, row: Mapping[str, Any]) -> bool:
    """Valid JSON under the row's schema. Raises ValueError where jsonschema is not installed."""
    try:
        import jsonschema
    except ImportError:
        raise ValueError(
            "the task jsonschema needs jsonschema: install it, or dspark with its extra: pip install 'dspark[bench]'"
        ) from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    schema = row["schema"]
    schema = json.loads(schema) if isinstance(schema, str) else schema
    try:
        return bool(jsonschema.validators.validator_for(schema)(schema).is_valid(value))
    except Exception:  # a reference elsewhere, or a schema that is none: what can be said is that it is JSON
        return True


def refuses(text: str) -> bool:
    """Whether it begins like a refusal."""
    opening = text[:OPENING].lower().replace("\u2019", "'")
    return any(word in opening for word in REFUSALS)


def repetition(text: str) -> float:
    """Share of the runs of four words that stand in the text before."""
    words = text.split()
    grams = [tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


SCORES: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "humaneval": score_humaneval,
    "gsm8k": score_gsm8k,
    "mmlu": score_mmlu,
    "jsonschema": score_json,
}
"""Of tasks whose answers are right or wrong; MMLU by log-likelihood is dspark.quality.checks' own."""
