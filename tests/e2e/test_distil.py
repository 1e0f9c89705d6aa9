"""From prompts alone to a draft that the engine takes: `dspark distil` on a tiny target with a narrow task."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from dspark import LLM, SamplingParams
from dspark.cli import main
from dspark.model.load import load_model
from dspark.model.save import save_model
from dspark.train.answers import Example
from dspark.train.distil_recipe import LearningRecipe
from dspark.train.draft_trainer import DraftTrainer
from dspark.train.lessons import columns_of, make_lesson
from tests.tiny_folder import tiny_folder

WORDS = ("red", "sand", "moss", "gold")
TASK = [f"{word} {n}" for word in WORDS for n in range(6)]
EOS = 256
QUICK = [
    "--max-tokens",
    "16",
    "--max-prompt-tokens",
    "40",
    "--held-out",
    "0.2",
    "--eval-prompts",
    "4",
    "--threads",
    "1",
]


def answer_of(text):
    word = text.split()[0]
    return " ".join([word] * 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny model that has learned to say the first word of its prompt three times."""
    folder = tiny_folder(tmp_path_factory.mktemp("target") / "raw")
    loaded = load_model(folder, dtype="float32")
    encode = loaded.tokenizer
    rows = []
    for text in TASK:
        prompt = encode.apply_chat_template([{"role": "user", "content": text}])
        tokens = (*prompt, *encode.encode(answer_of(text)), EOS)
        rows.append(Example(tokens=tokens, num_prompt=len(prompt), task="t", temperature=0.0, held_out=False))
    columns = columns_of(None, num_target=257, num_draft=257)
    recipe = LearningRecipe(loss="ce", epochs=24, sequences=8, lr=6e-3, precision="float32")
    lessons = [make_lesson(row, None, num_columns=257) for row in rows]
    trainer = DraftTrainer(loaded.model, lessons, recipe, folder=folder.parent / "training", columns=columns)
    assert trainer.run()
    save_model(loaded.model, folder, folder.parent / "target", provenance={})
    return str(folder.parent / "target")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "task.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TASK))
    return str(file)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("draft"), seed=7))


def distil(capsys, *words):
    code = main(["distil", "--json", *QUICK, *words])
    out = capsys.readouterr()
    return code, json.loads(out.out) if code == 0 else out.err


def digest_share(text):
    return int(hashlib.blake2b(f"0 {text}".encode(), digest_size=8).hexdigest()[:8], 16) / 2**32


def rates(report, temperature=0.0):
    (row,) = [row for row in report["measured"] if row["temperature"] == temperature]
    return row["before"]["acceptance_rate"], row["after"]["acceptance_rate"]


def test_the_target_knows_its_task(target):
    llm = LLM(target)
    (out,) = llm.chat([{"role": "user", "content": "moss 2"}], SamplingParams(temperature=0, max_tokens=16))
    assert out.outputs[0].text.startswith("moss moss")


def test_a_distilled_draft_is_accepted_more_and_says_the_same(target, prompts, draft, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--model", target, "--data", prompts, "--draft", draft, "--out", str(out)]
    code, report = distil(capsys, *words, "--epochs", "30", "--lr", "6e-3", "--select-prompts", "0")
    assert code == 0 and report["learned"]["loss"] == "tv"
    for temperature in (0.0, 1.0):
        before, after = rates(report, temperature)
        assert after > before + 0.15
    plain, llm = LLM(target), LLM(target, draft=str(out / "draft"), check=True)
    greedy = SamplingParams(temperature=0, max_tokens=16)
    asked = [["moss 2"], ["gold 9"]]
    assert [o.outputs[0].token_ids for o in llm.generate([t for [t] in asked], greedy)] == [
        o.outputs[0].token_ids for o in plain.generate([t for [t] in asked], greedy)
    ]
    made = json.loads((out / "draft" / "provenance.json").read_text())
    assert made["training"]["steps"] == report["learned"]["steps"] and "| after |" in (out / "report.md").read_text()
    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert report["learned"]["lessons"] == sum(not row["held_out"] for row in rows) < len(TASK)


def test_without_a_step_nothing_rises(target, prompts, draft, tmp_path, capsys):
    """The negative control: the draft goes through everything but learning."""
    words = ["--model", target, "--data", prompts, "--draft", draft, "--out", str(tmp_path / "out")]
    code, report = distil(capsys, *words, "--loss", "ce", "--epochs", "0", "--select-prompts", "0")
    assert code == 0 and report["learned"]["steps"] == 0
    before, after = rates(report)
    assert abs(after - before) < 0.03  # but for bf16's rounding


def test_held_out_prompts_never_come_to_the_trainer(target, prompts, draft, tmp_path, capsys, monkeypatch):
    """And a run that is stopped after some answers, and again after some steps, goes on to the same weights."""
    import dspark.bench.distil_run as module
    from dspark.train import draft_trainer

    seen = []
    init = draft_trainer.DraftTrainer.__init__

    def noted(self, network, lessons, recipe, **settings):
        seen.append({lesson.example.tokens[: lesson.example.num_prompt] for lesson in lessons})
        init(self, network, lessons, recipe, **settings)

    monkeypatch.setattr(draft_trainer.DraftTrainer, "__init__", noted)
    words = ["--model", target, "--data", prompts, "--draft", draft, "--loss", "ce", "--epochs", "2"]
    words += ["--select-prompts", "0", "--eval-temperatures", "0"]
    assert distil(capsys, *words, "--out", str(tmp_path / "whole"))[0] == 0

    calls = []
    watch = module._Watch.__call__
    monkeypatch.setattr(module._Watch, "__call__", lambda self, done, total: calls.append(done) or len(calls) == 5)
    assert distil(capsys, *words, "--out", str(tmp_path / "cut"))[0] == 1
    assert len((tmp_path / "cut" / "answers.jsonl").read_text().splitlines()) == 5
    monkeypatch.setattr(module._Watch, "__call__", watch)
    run = draft_trainer.DraftTrainer.run

    def cut_short(self, *, stop):
        return run(self, stop=lambda: self.step == 3)

    monkeypatch.setattr(draft_trainer.DraftTrainer, "run", cut_short)
    assert distil(capsys, *words, "--out", str(tmp_path / "cut"))[0] == 1
    monkeypatch.setattr(draft_trainer.DraftTrainer, "run", run)
    assert distil(capsys, *words, "--out", str(tmp_path / "cut"))[0] == 0
    whole, cut = (load_model(tmp_path / name / "draft").model.state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)

    rows = [json.loads(line) for line in (tmp_path / "whole" / "answers.jsonl").read_text().splitlines()]
    held_out = set(TASK) - {row["prompt"] for row in rows}  # by the hash of their text, which is told again here
    assert held_out == {text for text in TASK if digest_share(text) < 0.2} and 0 < len(held_out) < len(TASK) / 2
    encode = load_model(target).tokenizer
    measured = {tuple(encode.apply_chat_template([{"role": "user", "content": text}])) for text in held_out}
    assert len(seen) == 3 and not any(measured & prompts_seen for prompts_seen in seen)


def test_another_tokenizer_and_a_choice_of_precisions(target, prompts, tmp_path, capsys):
    foreign = str(tiny_folder(tmp_path / "foreign", seed=7, shift=3))
    out = tmp_path / "out"
    words = ["--model", target, "--data", prompts, "--draft", foreign, "--out", str(out), "--eval-temperatures", "0"]
    code, report = distil(capsys, *words, "--epochs", "24", "--lr", "6e-3", "--select-prompts", "2")
    before, after = rates(report)
    assert code == 0 and report["learned"]["loss"] == "ce" and after > before + 0.1
    names = {row["name"] for row in report["candidates"]}
    assert {str(out / "draft"), f"{out / 'draft'}:int8", f"{out / 'draft'}:int4", foreign} >= names >= {foreign}
    assert (out / "select" / "select.toml").exists()


def test_a_head_is_distilled_and_calibrated(target, prompts, tmp_path, capsys):
    out = tmp_path / "head"
    words = ["--model", target, "--data", prompts, "--out", str(out), "--select-prompts", "0", "--draft-tokens", "4"]
    code, report = distil(capsys, *words, "--epochs", "2", "--lr", "2e-3", "--eval-temperatures", "0")
    assert code == 0 and report["learned"]["kind"] == "head" and report["measured"][0]["before"] is None
    config = json.loads((out / "head" / "config.json").read_text())
    assert len(config["confidence_temperatures"]) == config["block_size"]
    start = str(out / "head")
    again = ["--start", start, "--out", str(tmp_path / "on"), "--epochs", "1", "--lr", "1e-3"]
    code, report = distil(capsys, *words[:4], *words[6:], *again, "--eval-temperatures", "0")
    before, after = rates(report)
    assert code == 0 and before > 0 and after > before - 0.05


@pytest.mark.parametrize(
    "change, message",
    (
        (["--data", "absent.jsonl"], "absent.jsonl"),
        (["--model", "/absent/model"], "does not exist"),
        (["--draft", "/absent/draft"], "does not exist"),
        (["--max-prompt-tokens", "600"], "do not fit the 512 tokens"),
        (["--max-prompt-tokens", "3"], "no prompt is left"),
        (["--max-prompts", "6"], "too few"),
        (["--start", "x"], "--start is for heads"),
    ),
)
def test_what_cannot_be_done_is_said_in_one_line(target, prompts, draft, tmp_path, capsys, change, message):
    words = ["--model", target, "--data", prompts, "--draft", draft, "--out", str(tmp_path / "out")]
    code, error = distil(capsys, *words, *change)
    lines = [line for line in error.splitlines() if line.startswith("dspark: error")]
    assert code == 2 and len(lines) == 1 and message in lines[0] and not (tmp_path / "out" / "answers.jsonl").exists()


def test_memory_and_folders_are_refused_by_name(target, prompts, draft, tmp_path, capsys, monkeypatch):
    import dspark.bench.distil_learn as module
    from dspark.model.free_memory import Free

    words = ["--model", target, "--data", prompts, "--draft", draft, "--out", str(tmp_path / "out"), "--loss", "ce"]
    monkeypatch.setattr(module, "cpu_free", lambda: Free(num_bytes=1 << 16, total=1 << 16, source="a test"))
    code, error = distil(capsys, *words)
    assert code == 2 and f"training {draft} needs about" in error and "--train-layers" in error
    code, error = distil(capsys, *words, "--seed", "5")
    assert code == 2 and "of another run" in error and "learning.seed is 1 there, not 5" in error
    monkeypatch.setattr(module, "cpu_free", lambda: Free(num_bytes=1 << 40, total=1 << 40, source="a test"))
    monkeypatch.setattr(module, "free_disk", lambda folder: 1000)
    code, error = distil(capsys, *words)
    assert code == 2 and "need about" in error and "--out" in error


def test_a_budget_cuts_steps_and_is_kept(target, prompts, draft, tmp_path, capsys):
    words = ["--model", target, "--data", prompts, "--draft", draft, "--out", str(tmp_path / "out"), "--loss", "ce"]
    words += ["--epochs", "20000", "--minutes", "0.05", "--select-prompts", "0", "--eval-temperatures", "0"]
    code, report = distil(capsys, *words)
    assert code == 0 and 0 < report["learned"]["steps"] < 20000
    assert "min" not in report["recipe"] and report["answers"] <= len(TASK)
