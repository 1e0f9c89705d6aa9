"""Scoring of answers, the sandbox that runs them, and the questions they answer."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dspark.quality.questions import LETTERS, PENALTIES, SEEDED, questions_of, read_rows
from dspark.quality.sandbox import run_program
from dspark.quality.scoring import (
    likeliest_letter,
    program_of,
    refuses,
    repetition,
    score_gsm8k,
    score_humaneval,
    score_json,
    score_mmlu,
)

TASK = {
    "prompt": 'import math\n\n\ndef half(x):\n    """x / 2"""\n',
    "entry_point": "half",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n",
}


@pytest.mark.parametrize(
    "answer",
    [
        "    return x / 2\n",
        "```python\ndef half(x):\n    return x / 2\n```\nDone.",
        "Here you are:\n```py\ndef half(x):\n    return math.floor(x) / 2\n```",
        "```python\ndef half(x):\n    return x / 2\n",  # cut off by the budget
        "First:\n```\nhelp\n```\nthen\n```python\ndef half(x):\n    return x / 2\n```",
    ],
)
def test_right_programs_pass(answer):
    assert score_humaneval(answer, TASK), program_of(answer, TASK)


@pytest.mark.parametrize(
    "answer", ["    return x\n", "", "I cannot do that.", "```python\ndef half(x):\n  return\n```"]
)
def test_wrong_programs_fail(answer):
    assert not score_humaneval(answer, TASK)


def test_the_sandbox_ends_what_does_not_end():
    start = time.monotonic()
    ran = run_program("import time\nwhile True: time.sleep(1)", seconds=1.0)
    assert not ran.passed and "1 s" in ran.reason
    assert time.monotonic() - start < 60  # it returned at all


def test_the_sandbox_ends_what_its_program_started(tmp_path):
    """Where it may start anything: the limit of processes does not count for root."""
    note = tmp_path / "pid"
    source = (
        f"import os, time\npid = os.fork()\nif pid: open({str(note)!r}, 'w').write(str(pid))\nelse: time.sleep(600)"
    )
    ran = run_program(source, seconds=2.0)
    assert not ran.passed
    if note.exists():
        pid = int(note.read_text())
        for _ in range(100):
            if not alive(pid):
                break
            time.sleep(0.05)
        assert not alive(pid)


def alive(pid):
    """Running, not waiting to be read off."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_sandbox_bounds_memory():
    ran = run_program("x = bytearray(8 * 2**30)")
    assert not ran.passed and "MemoryError" in ran.reason


@pytest.mark.parametrize(
    "source",
    [
        "import socket; socket.create_connection(('127.0.0.1', 9), timeout=1)",
        "import socket; socket.socket()",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
        "import _socket; _socket.socket()",
    ],
)
def test_the_sandbox_has_no_network(source):
    ran = run_program(source)
    assert not ran.passed and "no network" in ran.reason


def test_the_sandbox_has_nothing_of_ours(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hidden")
    assert run_program("import os; assert 'SECRET_KEY' not in os.environ and 'PATH' not in os.environ").passed
    assert run_program("import os; assert sorted(os.listdir('.')) == ['program.py']").passed
    assert not run_program("open('big', 'wb').write(b'0' * 2**22)").passed


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("4 + 4 = 8\n#### 8", True),
        ("#### $1,008.00 in all", False),
        ("so it is 8.", True),
        ("8 apples, then 9", False),
        ("#### 8 apples of 12", True),
        ("none", False),
    ],
)
def test_gsm8k(text, right):
    assert score_gsm8k(text, {"answer": "8"}) is right
    assert score_gsm8k("#### $1,008.00 in all", {"answer": "1008"})


@pytest.mark.parametrize(
    ("text", "right"), [("B", True), ("It is A bird. Answer: B", True), ("Answer: C, not B", False), ("no", False)]
)
def test_mmlu(text, right):
    assert score_mmlu(text, {"answer": 1}) is right


def test_likeliest_letter():
    assert likeliest_letter({"A": -2.0, "B": -1.0}) == "B" and likeliest_letter({}) is None
    assert likeliest_letter({"B": -1.0, "A": -1.0}) == "A"


def test_json_validity():
    row = {"schema": {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}}
    assert score_json('{"a": 1}', row) and score_json('{"a": 1}', {"schema": json.dumps(row["schema"])})
    assert not score_json('{"a": "1"}', row) and not score_json('{"a": 1', row) and not score_json("{}", row)


def test_what_is_counted_without_a_key():
    assert refuses("I\u2019m sorry, but I can't") and not refuses("Sure. " * 60 + "I can't")
    assert repetition("a b c d e f") == 0 and repetition("a b c d " * 5) > 0.7 and repetition("") == 0


def rows_of(tmp_path, task, rows):
    (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_rows_are_chosen_by_seed_and_keep_their_order(tmp_path):
    folder = rows_of(tmp_path, "gsm8k", [{"question": str(i), "answer": str(i)} for i in range(40)])
    first = read_rows(folder, "gsm8k", per_task=5, seed=1)
    assert first == read_rows(folder, "gsm8k", per_task=5, seed=1) != read_rows(folder, "gsm8k", per_task=5, seed=2)
    numbers = [int(row["id"]) for row in first]
    assert numbers == sorted(numbers) and len(read_rows(folder, "gsm8k")) == 40


def test_bad_data_is_told_in_a_line(tmp_path):
    with pytest.raises(ValueError, match="not known"):
        read_rows(tmp_path, "gsm9k")
    with pytest.raises(ValueError, match="cannot be read"):
        read_rows(tmp_path, "gsm8k")
    rows_of(tmp_path, "gsm8k", [{"question": "a"}])
    with pytest.raises(ValueError, match=r"gsm8k.jsonl:1: no answer"):
        read_rows(tmp_path, "gsm8k")
    (tmp_path / "gsm8k.jsonl").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_rows(tmp_path, "gsm8k")
    (tmp_path / "gsm8k.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no row"):
        read_rows(tmp_path, "gsm8k")


def test_questions():
    row = {"id": "1", "turns": ["Hello?", "And?"]}
    plain, penalised, seeded = questions_of("mtbench", [row], max_tokens=32, seed=7)
    assert (plain.task, penalised.task, seeded.task) == ("mtbench", PENALTIES, SEEDED)
    assert plain.params.greedy and penalised.params.greedy and penalised.params.needs_history and penalised.params.stop
    assert seeded.params.seed == 7 and not seeded.params.greedy
    assert all(q.messages == ({"role": "user", "content": "Hello?"},) for q in (plain, penalised, seeded))
    words, letters = questions_of(
        "mmlu", [{"id": "1", "question": "?", "choices": ["x", "y"], "answer": 0}], max_tokens=9
    )
    assert letters.task == LETTERS and letters.params.max_tokens == 1 and "B. y" in words.messages[0]["content"]
    (shaped,) = questions_of("jsonschema", [{"id": "1", "schema": {"type": "object"}}], max_tokens=9)
    assert shaped.params.structure is not None
