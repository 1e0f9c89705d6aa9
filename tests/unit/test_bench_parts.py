"""The parts of a benchmark that need no engine: prompts, spellings of variants, statistics with known answers."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from dspark.bench.data import MAX_LINE_CHARACTERS, encode_rows, load_rows
from dspark.bench.harness import Answer
from dspark.bench.stats import (
    acceptance_by_position,
    bootstrap_mean_of_tasks,
    bootstrap_ratio,
    mean_of_tasks,
    median,
    ratio_of_medians,
)
from dspark.bench.variants import parse_variant, parse_variants, reference_of
from dspark.types import SpeculationRecord

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts"


class LetterTokenizer:
    def encode(self, text):
        return [ord(letter) % 64 for letter in text]

    def apply_chat_template(self, messages, *, add_generation_prompt):
        assert add_generation_prompt
        return self.encode("<" + "".join(message["content"] for message in messages) + ">")


# -- data


def test_committed_prompts_are_four_of_each_task():
    rows = load_rows([PROMPTS])
    counts = {task: sum(row.task == task for row in rows) for task in {row.task for row in rows}}
    names = ("humaneval", "multi_turn", "translation", "summarization", "qa", "math_reasoning", "rag")
    assert counts == dict.fromkeys(names, 4)
    assert (
        rows[0].messages[0]["content"].startswith("Complete this Python function. Answer with code only.\n```python\n")
    )
    assert rows[0].messages[0]["content"].endswith("```")
    assert all(len(row.messages) == 1 for row in rows)


@pytest.mark.parametrize(
    ("row", "content"),
    [
        ({"prompt": "p"}, "p"),
        ({"turns": ["first", "second"]}, "first"),
        ({"question": "q", "answer": "1"}, "q"),
        ({"messages": [{"role": "user", "content": "m"}]}, "m"),
        ({"task_id": 3, "prompt": "w", "tests": []}, "w"),
    ],
)
def test_row_kinds(tmp_path, row, content):
    (tmp_path / "kind.jsonl").write_text(json.dumps(row))
    (loaded,) = load_rows([tmp_path])
    assert loaded.messages[0]["content"] == content and loaded.task == "kind"
    assert loaded.id == str(row.get("task_id", 1))


def test_selection_keeps_the_first_of_each_task(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"task": "ab"[i % 2], "prompt": str(i)}) for i in range(6)))
    assert [row.messages[0]["content"] for row in load_rows([path], per_task=1)] == ["0", "1"]
    assert [row.messages[0]["content"] for row in load_rows([path], per_task=2, tasks=["b"])] == ["1", "3"]
    with pytest.raises(ValueError, match="task c: the data has a, b"):
        load_rows([path], tasks=["c"])
    with pytest.raises(ValueError, match="per-task"):
        load_rows([path], per_task=0)


def test_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompt": "from a pipe"}\n'))
    assert load_rows(["-"])[0].messages[0]["content"] == "from a pipe"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompt in it"),
        ("\n\n", "no prompt in it"),
        ('{"prompt": "a"}\n{"prompt": \n', ":2: not JSON"),
        ("[1]", "list, not an object"),
        ('{"foo": 1}', ":1: no prompt in this row"),
        ('{"prompt": "  "}', "no prompt in this row"),
        ('{"prompt": 3}', "no prompt in this row"),
        ('{"turns": []}', "no prompt in this row"),
        ('{"messages": [{"role": "user"}]}', "messages must be"),
        ('{"prompt": "' + "x" * MAX_LINE_CHARACTERS + '"}', ":1: a line of over"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_data_is_one_line_with_its_place(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="bad.jsonl") as caught:
        load_rows([path])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_empty_folder_and_bytes(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        load_rows([tmp_path / "missing.jsonl"])
    with pytest.raises(ValueError, match=r"no \*.jsonl"):
        load_rows([tmp_path])
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        load_rows([tmp_path])


def test_prompts_are_cut_at_1500_ids_and_bare_without_a_template(tmp_path, capsys):
    rows = load_rows([_file(tmp_path, "a" * 4000)])
    assert len(encode_rows(rows, LetterTokenizer())[0]) == 1500

    class Bare(LetterTokenizer):
        def apply_chat_template(self, messages, *, add_generation_prompt):
            raise ValueError("the model has no chat template")

    assert encode_rows(rows[:1], Bare())[0][:2] == [ord("a") % 64] * 2
    assert "no chat template" in capsys.readouterr().err


def _file(tmp_path, text):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": text}))
    return path


# -- spellings


def test_spellings():
    draft = parse_variant("qwen2.5-coder-0.5b:int4@4")
    assert (draft.speculation.method, draft.speculation.model) == ("model", "qwen2.5-coder-0.5b")
    assert (draft.speculation.quantization, draft.speculation.num_speculative_tokens) == ("int4", 4)
    loop = parse_variant("loop").speculation
    assert (loop.method, loop.num_speculative_tokens) == ("ngram", 0)
    assert parse_variant("ngram:fixed@3").speculation.policy == "fixed"
    assert parse_variant("suffix:exact").engine == {"exact": True}
    assert parse_variant("c:/models/x:int8").speculation.model == "c:/models/x"


@pytest.mark.parametrize("text", ["ngram@", "ngram@four", "@4", ":int4", "ngram:int4", "loop:int8", "model", "x@-1"])
def test_bad_spellings(text):
    with pytest.raises(ValueError):
        parse_variant(text)


def test_plain_comes_first_and_exact_variants_get_an_exact_reference():
    variants = parse_variants("suffix,ngram:exact,none")
    assert [variant.name for variant in variants] == ["none", "suffix", "none:exact", "ngram:exact"]
    assert reference_of(variants[3], variants).name == "none:exact"
    assert reference_of(variants[1], variants).name == "none"
    assert [variant.name for variant in parse_variants("none:exact,suffix:exact")] == [
        "none",
        "none:exact",
        "suffix:exact",
    ]
    for text in ("", " , ", "ngram,ngram"):
        with pytest.raises(ValueError):
            parse_variants(text)


# -- statistics


def test_ratio_of_medians_is_not_the_median_of_ratios():
    pairs = [(1.0, 4.0), (2.0, 2.0), (4.0, 4.0)]
    assert ratio_of_medians(pairs) == 2.0
    assert median([]) is None and median([3, 1, 2]) == 2


def test_bootstrap_of_a_constant_ratio_is_that_ratio():
    assert bootstrap_ratio([(1.0, 1.5), (1.0, 1.5), (1.0, 1.5)]) == (1.5, 1.5)
    assert bootstrap_ratio([(1.0, 1.5)]) is None


def test_bootstrap_is_seeded_covers_and_narrows():
    few = [(10.0, 10.0 + i) for i in (2, 4, 6, 8)]
    low, high = bootstrap_ratio(few)
    assert bootstrap_ratio(few) == (low, high)
    assert low < ratio_of_medians(few) < high
    assert 1.2 <= low and high <= 1.8
    narrow_low, narrow_high = bootstrap_ratio(few * 25)
    assert narrow_high - narrow_low < high - low


def test_mean_of_tasks_weighs_tasks_alike():
    pairs = {"a": [(1.0, 2.0)] * 9, "b": [(1.0, 1.0)] * 2}
    assert mean_of_tasks(pairs) == 1.5
    assert bootstrap_mean_of_tasks(pairs) == (1.5, 1.5)
    assert bootstrap_mean_of_tasks(pairs | {"c": [(1.0, 1.0)]}) is None


def test_acceptance_by_position_from_scripted_counts():
    record = SpeculationRecord()
    record.add(drafted=3, verified=3, accepted=3, emitted=4)
    record.add(drafted=3, verified=3, accepted=1, emitted=2)
    record.add(drafted=4, verified=2, accepted=0, emitted=1)
    record.add(drafted=0, verified=0, accepted=0, emitted=1)
    positions = acceptance_by_position(record)
    assert [(p["verified"], p["accepted"]) for p in positions] == [(3, 2), (3, 1), (2, 1)]
    assert [p["rate"] for p in positions] == [2 / 3, 1 / 3, 1 / 2]
    assert [p["survival"] for p in positions] == [2 / 3, 1 / 3, 1 / 3]
    assert record.mean_accepted_length == 8 / 4 and record.acceptance_rate == 4 / 8
    assert acceptance_by_position(SpeculationRecord()) == []


def test_tokens_per_second_leaves_out_the_first_delivery():
    assert Answer(tokens=[1] * 11, decode_seconds=2.0).tokens_per_second == 5.0
    assert Answer(tokens=[1] * 11, decode_seconds=2.0, num_first=3).tokens_per_second == 4.0
    assert Answer(tokens=[1], decode_seconds=0.0).tokens_per_second is None


def test_names_are_written_out_for_plots_and_terminals():
    from dspark.bench.plot import label

    assert [label(name) for name in ("a", "$x$", "_x", "\ud800", "a\nb")] == ["a", r"\$x\$", " _x", r"\ud800", r"a\nb"]
