"""`dspark profile` and `generate --explain` from the command line on a tiny model: recorded, replayed, shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.bench.data import interleave
from dspark.bench.profile import read_profile
from dspark.cli import main
from dspark.plan.history import History
from tests.tiny_folder import tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"id": i, "task": "ab"[i % 2], "prompt": "hello " * (i + 2)} for i in range(6)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def recorded(folder, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    files = {name: out / name for name in ("profile.jsonl", "page.html", "history.json")}
    profile, page, history = map(str, files.values())
    arguments = ["profile", "--data", data, "--model", folder, "--draft", "suffix", "--max-tokens", "32"]
    assert main([*arguments, "--out", profile, "--report", page, "--history", history]) == 0
    return files


def test_a_profile_is_recorded_and_reported(recorded, folder, capsys, tmp_path):
    profile = read_profile(recorded["profile.jsonl"])
    assert [answer.task for answer in profile.answers] == ["a", "b"] * 3
    assert profile.max_tokens > 0 and profile.info["policy"] == "shadow"
    page = recorded["page.html"].read_text()
    assert page.count("data:image/png;base64,") == 2 and "http" not in page.replace("https://", "")
    assert main(["profile", "--replay", str(recorded["profile.jsonl"])]) == 0
    shown = capsys.readouterr().out
    assert "best fixed" in shown and "adaptive takes" in shown and "\na " in shown
    assert main(["profile", "--replay", str(recorded["profile.jsonl"]), "--history", str(tmp_path / "again.json")]) == 0
    assert "suffix" in History.load(tmp_path / "again.json").acceptance.sighted
    arguments = ["generate", "hello", "--model", folder, "--max-tokens", "8", "--set"]
    for path in (recorded["history.json"], tmp_path / "again.json"):
        assert main([*arguments, f'speculation.history="{path}"', "--draft", "suffix"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ([], "one of the two"),
        (["--data", "x", "--replay", "y"], "one of the two"),
        (["--replay", "/absent.jsonl"], "/absent.jsonl"),
        (["--data", "/absent.jsonl"], "/absent.jsonl"),
        (["--data", "{data}", "--draft", "none"], "measured no costs"),
        (["--data", "{data}", "--draft", "suffix", "--policy", "fixed"], "measured no costs"),
        (["--data", "{data}", "--draft", "suffix", "--out", "/absent/profile.jsonl"], "/absent/profile.jsonl"),
    ),
)
def test_what_cannot_be_profiled_is_refused_in_one_line(
    folder, data, arguments, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    filled = [argument.format(data=data) for argument in arguments]
    assert main(["profile", "--model", folder, "--max-tokens", "8", *filled]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("dspark: error: ") and message in error


def test_broken_profiles_are_refused_by_line(recorded, tmp_path, capsys):
    lines = recorded["profile.jsonl"].read_text().splitlines()
    for broken, message in (
        ([], "no answer"),
        (lines[:1], "no answer"),
        (lines[1:], ":1: no line"),
        ([*lines[:2], lines[2][:40], lines[3]], ":3: "),
        ([lines[0], "{}"], ":2: not an answer"),
    ):
        path = tmp_path / "broken.jsonl"
        path.write_text("\n".join(broken))
        assert main(["profile", "--replay", str(path)]) == 2
        assert message in capsys.readouterr().err


def test_a_last_line_that_was_cut_is_left_out_with_a_warning(recorded, tmp_path, capsys):
    lines, path = recorded["profile.jsonl"].read_text().splitlines(), tmp_path / "cut.jsonl"
    path.write_text("\n".join([*lines[:3], lines[3][:40]]))
    assert main(["profile", "--replay", str(path)]) == 0
    captured = capsys.readouterr()
    assert "the last answer is cut" in captured.err and len(captured.err.splitlines()) == 1
    assert "all 2 " in " ".join(captured.out.split())


def test_files_that_are_read_are_not_written(folder, data, recorded, tmp_path, capsys):
    before, profile = Path(data).read_text(), str(recorded["profile.jsonl"])
    for arguments in (
        ["--data", data, "--out", data],
        ["--data", str(Path(data).parent), "--report", data],
        ["--data", data, "--history", data],
        ["--data", data, "--out", str(tmp_path / "a"), "--history", str(tmp_path / "a")],
        ["--replay", profile, "--report", profile],
        ["--data", data, "--history", "/absent/h.json"],
        ["--data", data, "--report", str(tmp_path)],
    ):
        model = [] if "--replay" in arguments else ["--model", "/no/model"]
        assert main(["profile", *model, *arguments]) == 2
        assert "give " in (error := capsys.readouterr().err) and arguments[-1] in error
    assert Path(data).read_text() == before and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (["--replay", "p.jsonl", "--policy", "fixed", "--tasks", "a"], "leave --policy, --tasks out"),
        (["--data", "{data}", "--tasks", ","], "--tasks names no task"),
        (["--data", "{data}", "--num-speculative-tokens", "0"], "give at least 1"),
        (["--data", "{data}", "--task", "x"], "its own task"),
        (["--data", "{data}", "--params", '{{"speculation": false}}'], "nothing to record"),
        (["--data", "long.jsonl"], "long.jsonl:2: "),
    ),
)
def test_what_does_not_apply_is_refused_before_a_model_is_loaded(
    data, arguments, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("long.jsonl").write_text("\n".join(json.dumps({"task": t, "prompt": "hi"}) for t in ("a", "x" * 129)))
    model = [] if "--replay" in arguments else ["--model", "/no/model"]
    assert main(["profile", *model, *[argument.format(data=data) for argument in arguments]]) == 2
    assert message in capsys.readouterr().err and not Path("profile.jsonl").exists()


def test_explain_tells_what_is_not_allowed_and_names_answers(folder, capsys):
    arguments = ["generate", "hello hello hello", "--model", folder, "--draft", "suffix", "--max-tokens", "8"]
    assert main([*arguments, "--explain", "--params", '{"speculation": false}']) == 0
    shown = capsys.readouterr().err
    assert "none is allowed" in shown and "expects none" not in shown
    assert main([*arguments, "--explain", "-n", "2", "--temperature", "1"]) == 0
    assert {line[:3] for line in capsys.readouterr().err.splitlines()[2:]} == {"[1]", "[2]"}


def test_explain_shows_each_step(folder, capsys):
    arguments = ["generate", "hello hello hello", "--model", folder, "--draft", "suffix", "--max-tokens", "24"]
    assert main([*arguments, "--explain", "--task", "greeting"]) == 0
    captured = capsys.readouterr()
    head, titles, first, *others = captured.err.splitlines()
    assert head == "policy adaptive, prompt class greeting" and "verified" in titles
    assert "the prompt's own pass" in first
    assert any(line.split()[1] == "suffix" for line in others)
    assert captured.out.strip()
    assert main([*arguments, "--explain", "--compare"]) == 2


def test_rows_are_interleaved_by_task():
    class Row:
        def __init__(self, task):
            self.task = task

    assert [row.task for row in interleave([Row(t) for t in "aaabbc"])] == list("abcaba")
