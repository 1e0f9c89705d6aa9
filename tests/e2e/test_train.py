"""From prompts to a served head: `dspark train` on a tiny target, then `LLM` and the command line with what it made."""

from __future__ import annotations

import json
import shutil

import pytest

from dspark import LLM, SamplingParams
from dspark.cli import main
from dspark.config import SpeculationConfig
from tests.tiny_folder import tiny_folder

RECIPE = """
target = "{target}"
[data]
prompts = ["prompts.jsonl"]
max_answer_tokens = 24
held_out = 0.2
[head]
context = "{context}"
kind = "{kind}"
layers = {layers}
draft_vocab_size = 200
block_size = 4
markov_rank = 8
[training]
blocks = 600
sequences = 4
anchors = 8
lr = 2e-3
tv = 0.5
validate_blocks = 400
"""
KINDS = {
    "target": ("target", "dspark", "[0, 2]"),
    "fused": ("fused", "dspark", "[0, 1]"),
    "eagle3": ("fused", "eagle3", "[0, 1, 2]"),
}
GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["hello hello hello", "a", "the quick brown fox, the quick brown"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module", params=KINDS)
def trained(request, target, tmp_path_factory):
    """(kind, the run's folder), trained by the command line."""
    folder = tmp_path_factory.mktemp(request.param)
    context, kind, layers = KINDS[request.param]
    (folder / "recipe.toml").write_text(RECIPE.format(target=target, context=context, kind=kind, layers=layers))
    rows = [{"prompt": f"say {word} {i}"} for i in range(12) for word in ("one", "two", "three")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["train", str(folder / "recipe.toml"), "--out", str(folder / "run")]
    assert main([*command, "--answers-only"]) == 0
    assert main([*command, "--max-minutes", "0.0001"]) == 1  # one step, to be continued
    assert main(command) == 0
    return request.param, folder / "run"


def test_the_head_is_written_with_its_report(trained):
    kind, run = trained
    report = json.loads((run / "head" / "report.json").read_text())
    assert report["validation"]["accepted_length"] >= 1.0
    assert [row["blocks"] for row in report["history"]][-1] >= 500
    provenance = json.loads((run / "head" / "provenance.json").read_text())
    assert provenance["recipe"]["head"]["block_size"] == 4 and provenance["training"]["blocks"] >= 500
    assert ("calibration" in report) == (kind != "eagle3")
    if kind != "eagle3":
        config = json.loads((run / "head" / "config.json").read_text())
        assert len(config["confidence_temperatures"]) == 4
        assert (run / "head" / "reliability.png").stat().st_size > 1000
    assert (run / "head" / "curve.png").stat().st_size > 1000


@pytest.mark.parametrize("method", ("model", "auto"))
@pytest.mark.parametrize("policy", ("adaptive", "fixed"))
def test_the_head_serves_the_same_text(trained, target, method, policy):
    kind, run = trained
    plain = LLM(target, check=True)
    answers = [out.outputs[0].token_ids for out in plain.generate(PROMPTS, GREEDY)]
    settings = SpeculationConfig(method=method, model=str(run / "head"), policy=policy, num_speculative_tokens=4)
    llm = plain.variant(speculation=settings)
    assert [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)] == answers
    if policy == "fixed":  # beside a tiny target a head costs several passes, and adaptive may never ask it
        assert llm.stats.record.num_drafted > 0
    sampled = SamplingParams(temperature=0.8, seed=5, max_tokens=16)
    expected = [out.outputs[0].token_ids for out in plain.generate(PROMPTS, sampled)]
    assert [out.outputs[0].token_ids for out in llm.generate(PROMPTS, sampled)] == expected


def test_the_command_line_takes_a_heads_folder(trained, target, capsys):
    _, run = trained
    assert main(["generate", "hello", "--model", target, "--draft", str(run / "head"), "--max-tokens", "8"]) == 0
    with_head = capsys.readouterr().out
    assert main(["generate", "hello", "--model", target, "--draft", "none", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out == with_head


@pytest.mark.parametrize(
    "arguments, words",
    (
        (["--set", "head.colour=1"], "unknown keys colour"),
        (["--set", "head"], "table.key=value"),
        (["--set", "head.layers=[7]"], "layers"),
        (["--set", "data.max_answer_tokens=9"], "other settings"),
        (["--set", "head.draft_vocab_size=100"], "another draft vocabulary"),
        (["--set", "head.markov_rank=4"], "another head"),
        (["--set", "head.layers=[1, 2]"], "another head"),
        (["--set", "head.block_size=3"], "another head"),
        (["--set", "target.x=1"], "not a table"),
        (["--threads", "0"], "threads=0"),
    ),
)
def test_a_recipe_that_does_not_fit_is_a_users_error(trained, capsys, arguments, words):
    kind, run = trained
    if kind != "target":
        pytest.skip("once is enough")
    recipe = str(run.parent / "recipe.toml")
    assert main(["train", recipe, "--out", str(run), *arguments]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dspark: error")]
    assert len(error) == 1 and words in error[0]


def test_a_finished_head_is_trained_further(trained, tmp_path, capsys):
    """It starts where the other ended: its validation before the first step of note is the other's last."""
    kind, run = trained
    recipe = str(run.parent / "recipe.toml")
    command = ["train", recipe, "--answers", str(run / "answers"), "--set", f"head.start='{run / 'head'}'"]
    steps = ["--set", "training.blocks=8", "--set", "training.lr=1e-9", "--save-as", "float32"]
    assert main([*command, "--out", str(tmp_path / "on"), *steps]) == 0
    first, second = (json.loads((folder / "head" / "report.json").read_text()) for folder in (run, tmp_path / "on"))
    assert second["validation"]["num_blocks"] == pytest.approx(first["validation"]["num_blocks"], abs=3)
    assert main([*command, "--out", str(tmp_path / "other"), "--set", "head.block_size=3"]) == 2
    assert "another head: block_size is 4, not 3" in capsys.readouterr().err


def test_nothing_is_exported_without_a_checkpoint(trained, tmp_path, capsys):
    kind, run = trained
    arguments = ["--answers", str(run / "answers"), "--export-only"]
    assert main(["train", str(run.parent / "recipe.toml"), "--out", str(tmp_path), *arguments]) == 2
    assert "no checkpoint" in capsys.readouterr().err and not (tmp_path / "head").exists()


def test_heads_that_do_not_fit_are_refused_in_one_line(trained, target, tmp_path):
    kind, run = trained
    if kind != "target":
        pytest.skip("once is enough")
    head = run / "head"
    other = str(tiny_folder(tmp_path / "other", num_extra=8))

    def refusal(model, folder):
        with pytest.raises(ValueError) as error:
            LLM(model, draft=str(folder))
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "vocab" in refusal(other, head)
    for name, change in (("layers", {"num_target_layers": 9}), ("unknown", {"colour": 1})):
        broken = tmp_path / name
        shutil.copytree(head, broken)
        config = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps(config | change))
        assert ("layers" if name == "layers" else "colour") in refusal(target, broken)
    short = tmp_path / "short"
    shutil.copytree(head, short)
    weights = short / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in refusal(target, short)
    with pytest.raises(ValueError, match="no draft head comes with dspark"):
        LLM(target, draft="dspark")
    assert LLM(target, draft="auto").engine.speculator.drafter.name == "suffix"
