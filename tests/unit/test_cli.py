"""The command line: what goes to stdout, what to stderr, and what a user's error looks like.
It must never load a model: dspark.LLM is scripted here."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dspark
from dspark.cli import INTERRUPTED, USER_ERROR, main
from dspark.cli.compare import first_difference
from dspark.cli.progress import ProgressBar
from dspark.cli.reference import reference
from tests import fake_llm

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[fake_llm.FakeLLM]]:
    monkeypatch.setitem(vars(dspark), "LLM", fake_llm.FakeLLM)
    monkeypatch.setattr(fake_llm.FakeLLM, "made", [])
    yield fake_llm.FakeLLM


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a user's error; nothing may have gone to stdout."""
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("dspark: error: ")
    return lines[0]


BAD = {
    "no command": ([], "generate, serve"),
    "unknown command": (["generat"], "generat"),
    "unknown option": (["generate", "hi", "--colour"], "--colour"),
    "abbreviated option": (["generate", "hi", "--max-tok", "3"], "--max-tok"),
    "no prompt": (["generate"], "give one prompt"),
    "two prompts": (["generate", "hi", "--prompt-file", "x"], "give one prompt"),
    "empty prompt": (["generate", "  "], "empty"),
    "missing prompt file": (["generate", "--prompt-file", "/absent.txt"], "/absent.txt"),
    "prompt file is a folder": (["generate", "--prompt-file", "."], "prompt file ."),
    "raw with system": (["generate", "hi", "--raw", "--system", "x"], "--system"),
    "max_tokens 0": (["generate", "hi", "--max-tokens", "0"], "max_tokens=0"),
    "max_tokens no number": (["generate", "hi", "--max-tokens", "x"], "'x'"),
    "NaN temperature": (["generate", "hi", "--temperature", "nan"], "temperature=nan"),
    "negative temperature": (["generate", "hi", "--temperature", "-1"], "temperature=-1"),
    "empty stop": (["generate", "hi", "--stop", ""], "empty string"),
    "top_p": (["generate", "hi", "--top-p", "0"], "top_p"),
    "params no JSON": (["generate", "hi", "--params", "{"], "--params is not JSON"),
    "params no object": (["generate", "hi", "--params", "[1]"], "holds a list"),
    "params unknown": (["generate", "hi", "--params", '{"tempo": 1}'], "tempo"),
    "logit_bias key": (["generate", "hi", "--params", '{"logit_bias": {"a": 1}}'], "logit_bias"),
    "missing config": (["generate", "hi", "--config", "/absent.toml"], "/absent.toml"),
    "set without value": (["generate", "hi", "--set", "engine.exact"], "table.key=value"),
    "set unknown table": (["generate", "hi", "--set", "motor.exact=true"], "motor"),
    "set unknown key": (["generate", "hi", "--set", "engine.speed=9"], "speed"),
    "two drafters": (["generate", "hi", "--draft", "ngram", "--speculative-config", "{}"], "both name a drafter"),
    "unknown method": (["generate", "hi", "--speculative-config", '{"method": "psychic"}'], "psychic"),
    "speculative tokens": (["generate", "hi", "--num-speculative-tokens", "-1"], "num_speculative_tokens=-1"),
    "threads 0": (["generate", "hi", "--threads", "0"], "threads=0"),
    "missing model": (["generate", "hi", "--model", "/absent/model"], "/absent/model"),
    "draft misfit": (["generate", "hi", "--draft", "misfit"], "same vocabulary"),
    "compare nothing": (["generate", "hi", "--compare", "--draft", "none"], "needs a drafter"),
    "compare many": (["generate", "hi", "--compare", "-n", "2"], "-n 2"),
    "compare repeat 0": (["generate", "hi", "--compare", "--repeat", "0"], "--repeat 0"),
    "models without action": (["models"], "ACTION"),
    "fetch unknown": (["models", "fetch", "nope"], "nope"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_users_error_is_one_line_and_code_2(
    case: str, fake: type[fake_llm.FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    argv, word = BAD[case]
    assert main(argv) == USER_ERROR
    assert word in error_of(capsys)


def test_a_refused_prompt_is_a_users_error(fake: type[fake_llm.FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "refuse this", "--raw"]) == USER_ERROR
    assert "dspark: error: the prompt has 9 tokens" in capsys.readouterr().err


def test_our_own_mistakes_are_not_hidden(fake: type[fake_llm.FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise AssertionError("ours")

    monkeypatch.setattr(fake, "chat", broken)
    with pytest.raises(AssertionError, match="ours"):
        main(["generate", "hi"])


def test_ctrl_c_is_130(fake: type[fake_llm.FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "chat", interrupted)
    assert main(["generate", "hi"]) == INTERRUPTED


def test_the_answer_alone_goes_to_stdout(fake: type[fake_llm.FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == fake.answer
    assert "mean accepted length 3.00" in captured.err
    assert "drafted 8, verified 6, accepted 4" in captured.err
    assert "20.0 tokens/s" in captured.err
    assert "converting" in captured.err


def test_text_is_streamed_as_it_grows(fake: type[fake_llm.FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Recorder(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Recorder())
    assert main(["generate", "hi", "--max-tokens", "8"]) == 0
    assert written == ["H", "ell", "o, ", "w", "\n"]


def test_stdin_and_files_give_the_prompt(
    fake: type[fake_llm.FakeLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    (tmp_path / "prompt.txt").write_text("from a file")
    assert main(["generate", "-", "--raw"]) == 0
    assert main(["generate", "--prompt-file", str(tmp_path / "prompt.txt"), "--system", "be brief"]) == 0
    assert fake.made[0].asked[0][0] == "from stdin"
    assert fake.made[1].asked[0][0] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "from a file"},
    ]


def test_options_reach_params_and_config(fake: type[fake_llm.FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    options = "--max-tokens 5 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --seed 7 --stop a --stop b --exact"
    more = (
        "--stop-token-id 4 --ignore-eos --repetition-penalty 1.1 --dtype float32 --threads 1 --set engine.page_size=32"
    )
    argv = ["generate", "hi", "--params", '{"logit_bias": {"11": -5}, "top_k": 9}', "--num-speculative-tokens", "3"]
    assert main([*argv, *options.split(), *more.split()]) == 0
    [llm] = fake.made
    [(_, params)] = llm.asked
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (5, 0.5, 3, 0.9, 0.1)
    assert (params.seed, params.stop, params.stop_token_ids, params.ignore_eos) == (7, ("a", "b"), (4,), True)
    assert (params.logit_bias, params.repetition_penalty) == ({11: -5}, 1.1)
    assert (llm.engine_config.exact, llm.engine_config.dtype, llm.engine_config.threads) == (True, "float32", 1)
    assert llm.engine_config.page_size == 32
    assert (llm.speculation.method, llm.speculation.num_speculative_tokens) == ("auto", 3)


def test_what_beats_what(fake: type[fake_llm.FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dspark.toml"
    file.write_text('[engine]\npage_size = 8\nthreads = 4\n[speculation]\nmethod = "model"\nmodel = "small"\n')
    config = ["--config", str(file)]
    assert main(["generate", "hi", *config]) == 0
    assert main(["generate", "hi", *config, "--set", "engine.threads=3", "--draft", "ngram"]) == 0
    assert main(["generate", "hi", *config, "--set", "engine.threads=3", "--threads", "2"]) == 0
    assert main(["generate", "hi", "--speculative-config", '{"model": "other", "quantization": "int8"}']) == 0
    first, second, third, fourth = fake.made
    assert (first.engine_config.page_size, first.engine_config.threads) == (8, 4)
    assert (first.speculation.method, first.speculation.model) == ("model", "small")
    assert (second.speculation.method, second.speculation.model, second.engine_config.threads) == ("ngram", None, 3)
    assert third.engine_config.threads == 2
    assert (fourth.speculation.model, fourth.speculation.quantization) == ("other", "int8")


def test_generate_json(fake: type[fake_llm.FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--json", "-n", "2", "--draft", "none"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [output["text"] for output in answer["outputs"]] == [fake.answer, fake.answer]
    assert answer["usage"] == {"prompt_tokens": 3, "cached_prompt_tokens": 0, "completion_tokens": 28}
    assert answer["time_to_first_token"] == 0.5
    assert answer["outputs"][0]["speculation"]["mean_accepted_length"] == 1.0


def test_compare_of_equal_answers(fake: type[fake_llm.FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--compare", "--repeat", "2", "--exact"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("Hello, world!") == 1
    assert "identical, all 14 tokens" in captured.out
    rows = {line[:26].strip(): line[26:].split() for line in captured.out.splitlines()}
    assert rows["tokens/s (decode)"] == ["10.0", "20.0"]
    assert rows["ms a token"] == ["100.0", "50.0"]
    assert rows["speedup"] == ["1.00", "2.00"]
    assert rows["mean accepted length"] == ["1.00", "3.00"]
    assert rows["accepted / verified"] == ["-", "8/12"]
    assert rows["acceptance by position"] == ["1.00", "1.00", "0.00"]


def test_each_speculative_run_has_a_new_drafter(
    fake: type[fake_llm.FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hi", "--compare", "--repeat", "3"]) == 0
    plain, *speculative = fake.made
    assert plain.speculation.method == "none"
    assert [llm.speculation.method for llm in speculative] == ["auto"] * 3
    assert all(not llm.engine_config.prefix_reuse and llm.engine_config.max_num_seqs == 1 for llm in fake.made)
    # One warm-up on another prompt, then the prompt: a drafter never sees the prompt before it is measured.
    assert all(
        [ask[0] == [{"role": "user", "content": "hi"}] for ask in llm.asked] == [False, True] for llm in speculative
    )


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--exact"], 1), (["--exact", "--temperature", "1"], 0)])
def test_compare_of_different_answers(
    options: list[str],
    code: int,
    fake: type[fake_llm.FakeLLM],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fake, "drafted_answer", "Hello, woman!\n")
    assert main(["generate", "hi", "--compare", "--repeat", "1", *options]) == code
    out = capsys.readouterr().out
    assert "[plain]\nHello, world!" in out and "[speculative]\nHello, woman!" in out
    assert "different from token 9 on: after 'ello, wo', 'r' against 'm'" in out


def test_compare_json(fake: type[fake_llm.FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--compare", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["identical"] is True and result["first_difference"] is None
    assert result["speedup"] == pytest.approx(2.0)
    assert len(result["plain"]["decode_tokens_per_second_of_runs"]) == 3


@pytest.mark.parametrize(
    ("left", "right", "index"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [], 0)],
)
def test_first_difference(left: list[int], right: list[int], index: int | None) -> None:
    assert first_difference(left, right) == index


def test_models_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    assert main(["models", "list"]) == 0
    assert capsys.readouterr().out.startswith("smollm2-135m ")
    assert main(["models", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["cached"] for row in rows}["smollm2-135m"] is False


def test_info_of_machine_and_model(
    fake: type[fake_llm.FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.engine.fitting.estimate_memory", lambda *_, **__: None)
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["dspark"] == dspark.__version__
    assert facts["devices"][0] == "cpu" and facts["threads"] >= 1
    assert facts["native"]["available"] or facts["native"]["reason"]
    assert not fake.made
    assert main(["info", "--model", "some"]) == 0
    shown = capsys.readouterr().out
    assert "path                 fake" in shown and "the folder does not tell" in shown


def test_a_bar_on_a_terminal_and_a_line_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, pieces, absent in (
        (Terminal(), ["\r", "100%", "150 MiB", "joining"], "dspark:"),
        (io.StringIO(), ["dspark: downloading 150 MiB\ndspark: joining and checking"], "\r"),
    ):
        bar = ProgressBar(stream)
        for done in (0, 75, 150, 150):
            bar("download", done << 20, 150 << 20)
        bar("join", 1, 3)
        bar.close()
        text = stream.getvalue()
        assert all(piece in text for piece in pieces) and absent not in text
        assert text.count("100%") == (1 if stream.isatty() else 0)
        assert text.endswith("\n")


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dspark {dspark.__version__}\n"
    for command in ("generate", "models", "info"):
        assert main([command, "--help"]) == 0
        assert f"usage: dspark {command}" in capsys.readouterr().out


def test_a_reader_that_leaves_is_no_error() -> None:
    script = f"{sys.executable} -m dspark models list --json | true; echo ${{PIPESTATUS[0]}}"
    paths = os.pathsep.join([str(Path(dspark.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_docs_cli_is_current() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == reference(), "docs/cli.md is old: run `make docs`"
