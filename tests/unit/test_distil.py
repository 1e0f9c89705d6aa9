"""Distillation: losses against closed forms, what a draft reads, interrupted steps, folders of other runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import mmap

import pytest
import torch

from dspark.bench.acceptance import Acceptance, relative_gain
from dspark.bench.distil import add_arguments
from dspark.bench.distil_settings import claim_folder, recipe_of
from dspark.draft.vocab import Reading, SharedVocabulary
from dspark.model.load import load_model
from dspark.model.runner import build_runner
from dspark.model.save import save_model
from dspark.model.tokenizer import Tokenizer
from dspark.train.answer_log import AnswerLog
from dspark.train.answers import Example
from dspark.train.distil_recipe import LearningRecipe, differences
from dspark.train.draft_trainer import DraftTrainer
from dspark.train.estimate import check_disk, check_memory, measure, watched_peak
from dspark.train.laws import TargetLaws
from dspark.train.lessons import columns_of, make_lesson
from dspark.train.losses import draft_losses, kl_divergence, total_variation
from dspark.train.own_texts import OwnTexts
from dspark.train.prompts import TrainPrompt
from dspark.types import SpeculationRecord
from tests.tiny_folder import tiny_folder
from tests.tiny_models import tiny_model

VOCAB = 96


# -- losses


def laws(seed, *shape):
    return torch.softmax(2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double), -1)


def logits_of(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def test_two_tokens_have_their_closed_forms():
    """q = sigmoid(x): TV = |p - q|, KL = p log(p/q) + (1-p) log((1-p)/(1-q))."""
    p, q = 0.3, 0.8
    logits = torch.tensor([[torch.logit(torch.tensor(q)), 0.0]])
    target = torch.tensor([[p, 1 - p]])
    assert float(total_variation(logits, target)) == pytest.approx(0.5, abs=1e-6)
    expected = p * torch.log(torch.tensor(p / q)) + (1 - p) * torch.log(torch.tensor((1 - p) / (1 - q)))
    assert float(kl_divergence(logits, target)) == pytest.approx(float(expected), abs=1e-6)


def test_total_variation_is_one_minus_the_overlap_and_the_kullback_leibler_divergence_is_torchs():
    logits, target = logits_of(0, 7, 11), laws(1, 7, 11)
    q = torch.softmax(logits, -1)
    torch.testing.assert_close(total_variation(logits, target), 1 - torch.minimum(q, target).sum(-1))
    torch.testing.assert_close(total_variation(logits, target), 0.5 * (q - target).abs().sum(-1))
    expected = torch.nn.functional.kl_div(torch.log(q), target, reduction="none").sum(-1)
    torch.testing.assert_close(kl_divergence(logits, target), expected)
    assert (kl_divergence(logits, target) > 0).all() and float(kl_divergence(target.log(), target).abs().max()) < 1e-12


@pytest.mark.parametrize("loss", (total_variation, kl_divergence))
@pytest.mark.parametrize("columns", (11, 8))
def test_gradients_are_those_of_finite_differences(loss, columns):
    """Also where part of the target's law lies on tokens that the draft does not have."""
    logits, target = logits_of(2, 3, columns).requires_grad_(), laws(3, 3, 11)[:, :columns]
    assert torch.autograd.gradcheck(lambda x: loss(x, target), (logits,))


def test_the_gradient_of_the_divergence_is_what_is_missing():
    """d KL / d logits = q - p for whole laws; with p zero somewhere it is finite."""
    logits, target = logits_of(4, 2, 5).requires_grad_(), laws(5, 2, 5)
    target = target * (target > target.amin(-1, keepdim=True))
    target = target / target.sum(-1, keepdim=True)
    kl_divergence(logits, target).sum().backward()
    torch.testing.assert_close(logits.grad, torch.softmax(logits.detach(), -1) - target)


def test_cross_entropy_counts_known_labels_alone():
    logits, labels = logits_of(6, 4, 9), torch.tensor([2, -1, 8, -1])
    lost, held = draft_losses(logits, labels, target=None, kind="ce")
    expected = torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=-1, reduction="sum")
    torch.testing.assert_close(lost, expected)
    assert int(held) == sum(int(logits[i].argmax()) == labels[i] for i in (0, 2))
    nothing, _ = draft_losses(logits, torch.full((4,), -1), target=None, kind="ce")
    assert float(nothing) == 0


# -- what a draft reads


def example(prompt, answer, **changes):
    made = Example(
        tokens=tuple(prompt) + tuple(answer), num_prompt=len(prompt), task="t", temperature=0.0, held_out=False
    )
    return dataclasses.replace(made, **changes)


def test_a_lesson_asks_for_the_answer_alone():
    lesson = make_lesson(example([5, 6, 7], [8, 9, 200, 1]), None, num_columns=100)
    assert lesson.tokens == (5, 6, 7, 8, 9, 0, 1)
    assert lesson.rows == (2, 3, 4, 5) and lesson.labels == (8, 9, -1, 1) and lesson.answers == (0, 1, 2, 3)
    assert make_lesson(example([5], [8]), None, num_columns=100, own=True).labels == (-1,)


def test_a_lesson_in_another_vocabulary_is_what_the_drafter_reads(tmp_path):
    """Row by row: the view that ModelDrafter has when it guesses that token, and the column it would have to say."""
    ours = Tokenizer(tiny_folder(tmp_path / "a", merges=[("h", "e"), ("he", "l"), ("l", "o")]))
    theirs = Tokenizer(tiny_folder(tmp_path / "b", shift=3, merges=[("h", "e")]))
    words = SharedVocabulary(ours, theirs, max_target=300, max_draft=300)
    prompt, answer = ours.encode("say hello"), ours.encode("hello \u00e9l helo!") + [256]
    lesson = make_lesson(example(prompt, answer), words, num_columns=len(words))
    assert len(lesson.rows) == len(answer) < len(lesson.tokens) - len(prompt)  # one token of ours, several of theirs
    for row, label, place in zip(lesson.rows, lesson.labels, lesson.answers):
        reading = Reading(words)
        reading.extend([*prompt, *answer[:place]], num_prompt=len(prompt))
        assert tuple(reading.tokens) == lesson.tokens[: row + 1] and reading.whole
        shared = answer[place] in words.to_draft
        assert (label >= 0) == shared
        if shared:
            assert int(words.target_ids[label]) == answer[place]
    assert any(label < 0 for label in lesson.labels)


@pytest.fixture(scope="module")
def target():
    model = tiny_model("qwen3", vocab_size=VOCAB)
    return build_runner(model, path="torch", device="cpu"), tiny_model("qwen3", vocab_size=VOCAB)


def test_laws_are_the_targets_at_the_places_of_the_answer(target):
    runner, model = target
    text = example([3, 4, 5, 6], [9, 10, 11, 12, 13])
    columns = columns_of(None, num_target=90, num_draft=80)
    lesson = make_lesson(text, None, num_columns=columns.num_columns)
    found = TargetLaws(runner, columns, num_valid=90, temperature=0.7, max_tokens=64)(lesson)
    logits = model(torch.tensor([text.tokens])).logits[0, 3:8, :90]
    torch.testing.assert_close(found, torch.softmax(logits / 0.7, -1)[:, :80], rtol=1e-3, atol=1e-5)
    assert (found.sum(-1) < 1).all()


# -- steps


def lessons(count=12, *, columns=VOCAB):
    rows = []
    for i in range(count):
        prompt = [2 + (i * 7 + j) % 90 for j in range(3 + i % 4)]
        rows.append(
            make_lesson(example(prompt, [(5 * i + 3 * j) % 90 for j in range(4 + i % 5)]), None, num_columns=columns)
        )
    return rows


def draft(seed=3):
    return tiny_model("llama", vocab_size=VOCAB, seed=seed).requires_grad_(True)


def trainer(folder, target=None, *, network=None, rows=None, own=None, **changes):
    recipe = LearningRecipe(
        **({"loss": "ce", "epochs": 4, "sequences": 3, "lr": 2e-3, "precision": "float32"} | changes)
    )
    columns = columns_of(None, num_target=VOCAB, num_draft=VOCAB)
    found = None
    if recipe.loss != "ce":
        found = TargetLaws(target[0], columns, num_valid=VOCAB, temperature=recipe.temperature, max_tokens=64)
    return DraftTrainer(
        network or draft(), rows or lessons(), recipe, folder=folder, columns=columns, laws=found, own=own
    )


@pytest.mark.parametrize("loss", ("ce", "tv", "kl"))
def test_gradients_do_not_depend_on_chunks_or_padding(target, tmp_path, monkeypatch, loss):
    """Against the loss written down at once, lesson by lesson, without a batch."""
    import dspark.train.draft_trainer as module

    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)
    made = trainer(tmp_path, target, loss=loss)
    rows = made.lessons[:3]
    row = made._gradients(rows, kind=loss)
    found = {name: p.grad.clone() for name, p in made.parameters}
    made.optimizer.zero_grad()
    total, count = torch.zeros(()), sum(len(lesson.rows) for lesson in rows)
    for lesson in rows:
        logits = made.network(torch.tensor([lesson.tokens])).logits[0, list(lesson.rows)]
        if loss == "ce":
            total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(lesson.labels), reduction="sum")
        else:
            law = made.laws(lesson)
            total = total + {"tv": total_variation, "kl": kl_divergence}[loss](logits, law).sum()
    (total / count).backward()
    assert row["loss"] == pytest.approx(float(total.detach() / count), rel=1e-4)
    for name, parameter in made.parameters:
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("loss", ("ce", "tv"))
def test_an_interrupted_run_ends_with_the_same_weights(target, tmp_path, loss):
    whole = trainer(tmp_path / "a", target, loss=loss)
    assert whole.run() and whole.step == 16
    again = trainer(tmp_path / "b", target, loss=loss)
    assert not again.run(stop=lambda: again.step == 5)
    again = trainer(tmp_path / "b", target, network=draft(seed=8), loss=loss)
    assert again.resume() and again.step == 5
    assert again.run()
    for (name, a), (_, b) in zip(whole.network.state_dict().items(), again.network.state_dict().items()):
        assert torch.equal(a, b), name
    before = draft().state_dict()
    assert any(not torch.equal(a, before[name]) for name, a in whole.network.state_dict().items())


def test_the_precision_that_was_measured_stays(tmp_path, monkeypatch):
    import dspark.train.draft_trainer as module

    found = iter(("bf16", "float32"))
    monkeypatch.setattr(module, "quicker_precision", lambda device: next(found))
    trainer(tmp_path, precision="auto").save()
    again = trainer(tmp_path, precision="auto")
    assert again.precision == "float32" and again.resume() and again.precision == "bf16"


def test_every_answer_is_seen_once_an_epoch(tmp_path):
    made = trainer(tmp_path, rows=lessons(13))
    for epoch in range(3):
        seen = [i for step in made._epoch_order(epoch) for i in step]
        assert sorted(seen) == list(range(13))
    assert made._epoch_order(0) != made._epoch_order(1)


def test_a_trial_teaches_nothing(tmp_path):
    made = trainer(tmp_path)
    estimate = measure(made.trial, steps=10)
    assert estimate.seconds > 0 and "10 steps" in estimate.text()
    for (name, a), (_, b) in zip(made.network.state_dict().items(), draft().state_dict().items()):
        assert torch.equal(a, b), name
    assert all(p.grad is None for _, p in made.parameters)


def test_frozen_layers_stay(tmp_path):
    made = trainer(tmp_path, layers=1)
    assert made.run()
    changed = {
        name for (name, a), (_, b) in zip(made.network.named_parameters(), draft().named_parameters())
        if not torch.equal(a, b)
    }  # fmt: skip
    assert changed and all("layers.2." in name or name == "model.norm.weight" for name in changed)
    with pytest.raises(ValueError, match="3 layers"):
        trainer(tmp_path, layers=4)


def test_a_checkpoint_of_another_draft_is_refused(tmp_path):
    assert trainer(tmp_path, layers=1).run()
    with pytest.raises(ValueError, match="other layers"):
        trainer(tmp_path).resume()
    (tmp_path / "training-state.pt").write_bytes(b"no")
    with pytest.raises(ValueError, match="cannot be read"):
        trainer(tmp_path).resume()


def test_a_full_disk_is_said_and_what_was_saved_stays(tmp_path, monkeypatch):
    made = trainer(tmp_path)
    made.save()
    kept = (tmp_path / "training-state.pt").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ValueError, match="No space left.*free space"):
        made.save()
    assert (tmp_path / "training-state.pt").read_bytes() == kept and not list(tmp_path.glob("*.part"))


def test_on_policy_rounds_are_written_by_the_weights_of_their_step(target, tmp_path):
    """Each round once, at its boundary, also when the run is interrupted in it; only laws are learned from them."""
    asked = []

    def run(folder, stop_at):
        written = []

        def own(index):
            path = folder / f"round-{index}"
            if not path.exists():
                state = torch.load(folder / "training-state.pt", weights_only=True)
                written.append((index, state["step"], float(sum(p.double().sum() for p in state["trained"].values()))))
                path.write_text("")
            rows = [example([3, 4, 5], [7 + index, 8, 9]), example([6, 7], [1, 2 + index])]
            return [make_lesson(row, None, num_columns=VOCAB, own=True) for row in rows]

        made = trainer(folder, target, own=own, loss="tv", on_policy_share=0.5)
        if not made.run(stop=lambda: made.step == stop_at):
            made = trainer(folder, target, network=draft(seed=8), own=own, loss="tv", on_policy_share=0.5)
            assert made.resume() and made.run()
        asked.append(written)
        return made

    a, b = run(tmp_path / "a", None), run(tmp_path / "b", 11)
    assert asked[0] == asked[1] and [(index, step) for index, step, _ in asked[0]] == [(0, 0), (1, 8)]
    for (name, x), (_, y) in zip(a.network.state_dict().items(), b.network.state_dict().items()):
        assert torch.equal(x, y), name


def test_texts_of_its_own_are_kept(tmp_path):
    calls = []

    def answerer(folder):
        def answer(prompts, *, max_tokens, temperature, seeds, done):
            calls.append((folder, len(prompts), temperature))
            for i in reversed(range(len(prompts))):
                done(i, [i, i + 1])

        return answer

    prompts = [example([9, 8, i], [1]) for i in range(5)]
    own = OwnTexts(
        prompts, tmp_path, snapshot=lambda folder: None, answerer=answerer, num_columns=VOCAB, max_tokens=4,
        temperature=1.0, seed=1,
    )  # fmt: skip
    first = own(1)
    assert own(1) == first and len(calls) == 1 and len(first) == 5
    assert first[2].example.tokens[-2:] == (2, 3) and set(first[0].labels) == {-1}


# -- answers


def prompts(count):
    return [TrainPrompt(text=f"p{i}", task="t", tokens=(i + 2, 3), held_out=i % 5 == 0) for i in range(count)]


class Answers:
    def __init__(self):
        self.seeds = {}

    def __call__(self, asked, *, max_tokens, temperature, seeds, done):
        for index in reversed(range(len(asked))):
            self.seeds[asked[index], temperature] = seeds[index]
            if not done(index, [asked[index][0], seeds[index] % 97]):
                return


def fill(path, answers, **changes):
    settings = {"temperatures": (0.0, 1.0), "max_tokens": 8, "seed": 1, "decode": str}
    log = AnswerLog(path)
    return log, log.fill(prompts(6), answers, **(settings | changes))


def test_answers_are_kept_one_by_one_and_an_interruption_changes_none(tmp_path):
    whole, finished = fill(tmp_path / "a", Answers())
    assert finished and len(whole.known) == 12
    answers = Answers()
    cut, finished = fill(tmp_path / "b", answers, stop=lambda done, total: done == 4 and total == 12)
    assert not finished and len(cut.known) == 4
    text = (tmp_path / "b").read_text()
    (tmp_path / "b").write_text(text + '{"prompt": "p0", "temp')  # killed while it wrote
    again, finished = fill(tmp_path / "b", answers)
    assert finished and again.known == whole.known
    rows = [json.loads(line) for line in (tmp_path / "b").read_text().splitlines()]
    assert len(rows) == 12 and {row["prompt"] for row in rows if row["held_out"]} == {"p0", "p5"}
    found = again.examples(prompts(6), (0.0, 1.0))
    assert len(found) == 12 and found[0].tokens[:2] == (2, 3) and found[0].num_answer == 2
    late, finished = fill(tmp_path / "c", Answers(), group=4, enough=lambda: True)
    assert not finished and [text for text, _ in late.known] == ["p3", "p2", "p1", "p0"]  # a whole group, in any order
    last, finished = fill(tmp_path / "c", Answers(), group=4)
    assert finished and last.known == whole.known
    (tmp_path / "b").write_text("[1]\n")
    with pytest.raises(ValueError, match="b:1 is no answer"):
        AnswerLog(tmp_path / "b")


# -- settings, folders, estimates


def arguments(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--model", "t", "--data", "d.jsonl", "--out", "o", *words])


def test_a_folder_of_another_run_says_what_differs(tmp_path):
    recipe = recipe_of(arguments("--draft", "d"), same_tokenizer=True)
    state = claim_folder(tmp_path / "x", recipe)
    assert claim_folder(tmp_path / "x", recipe) == state
    moved = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, prompts=("elsewhere.jsonl",)))
    assert claim_folder(tmp_path / "x", moved) == state  # the same prompts from another place
    other = recipe_of(arguments("--draft", "d", "--lr", "0.5", "--temperatures", "0", "1"), same_tokenizer=True)
    with pytest.raises(ValueError, match=r"data.temperatures is \[0.0\] there.*learning.lr is 0.0002 there, not 0.5"):
        claim_folder(tmp_path / "x", other)
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "letter").write_text("")
    with pytest.raises(ValueError, match="holds other files"):
        claim_folder(tmp_path / "y", recipe)
    assert differences({"a": 1, "b": {"c": [1]}}, {"a": 2, "b": {"c": (1,)}}) == ["a is 1 there, not 2"]


@pytest.mark.parametrize(
    "words, same, message",
    (
        (["--draft", "d", "--on-policy-share", "0.5"], False, "target's tokenizer"),
        (["--draft", "d", "--on-policy-share", "0.5", "--loss", "ce"], True, "laws"),
        (["--draft", "d", "--start", "x"], True, "--start is for heads"),
        (["--train-layers", "2"], True, "not with a head"),
        (["--draft", "d", "--epochs", "-1"], True, "epochs"),
        (["--draft", "d", "--held-out", "0.7"], True, "held_out"),
    ),
)
def test_options_that_do_not_go_together(words, same, message):
    with pytest.raises(ValueError, match=message):
        recipe_of(arguments(*words), same_tokenizer=same)


def test_the_loss_goes_by_the_tokenizers():
    losses = [
        recipe_of(arguments("--draft", d), same_tokenizer=s).learning.loss
        for d, s in (("d", True), ("d", False), ("head", True))
    ]
    assert losses == ["tv", "ce", "ce"]


def test_what_does_not_fit_is_named(tmp_path):
    check_memory(9, 10, what="x", cure="y")
    with pytest.raises(ValueError, match="training d needs about 3.00 GiB of memory and 2.00 GiB are free: do less"):
        check_memory(3 * 2**30, 2 * 2**30, what="training d", cure="do less")
    with pytest.raises(ValueError, match="need about 1.00 GiB in .* and 0.00 GiB are free"):
        check_disk(2**30, 0, folder=tmp_path)
    size = 64 << 20
    with watched_peak() as peak, mmap.mmap(-1, size) as block:  # of the system's: a heap may have so much left over
        for place in range(0, size, mmap.PAGESIZE):
            block[place] = 1
    assert not peak or peak[0] > size // 2


def test_the_gain_is_of_rates_and_its_interval_holds_it():
    def acceptance(shares):
        records = []
        for share in shares:
            record = SpeculationRecord()
            for step in range(20):
                accepted = 4 if step < 20 * share else 0
                record.add(drafted=4, verified=4, accepted=accepted, emitted=accepted + 1)
            records.append(record)
        return Acceptance(temperature=0.0, records=records)

    before, after = acceptance([0.2, 0.4, 0.3, 0.3]), acceptance([0.4, 0.6, 0.4, 0.4])
    gain, low, high = relative_gain(before, after)
    assert gain == pytest.approx(0.45 / 0.3 - 1) and 0 < low < gain < high
    same = relative_gain(before, before)
    assert same == pytest.approx((0, 0, 0))
    assert relative_gain(acceptance([0.0, 0.0]), acceptance([0.2, 0.4])) == (None, None, None)
    assert before.as_dict()["acceptance_rate"] == pytest.approx(0.3)


@pytest.mark.parametrize("family", ("qwen2", "qwen3"))
def test_a_saved_model_is_loaded_again(tmp_path, family):
    """Tied and untied outputs; the provenance has the origin, and the folder does not pass for it."""
    source = tiny_folder(tmp_path / "source", family=family)
    (source / "dspark_source.json").write_text(json.dumps({"name": "smollm2-135m", "licence": "L"}))
    loaded = load_model(source, dtype="float32")
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(0.01)
    save_model(loaded.model, source, tmp_path / "out", provenance={"x": 1})
    again = load_model(tmp_path / "out")
    assert again.dtype == torch.bfloat16 and again.tokenizer is not None
    for (name, a), (_, b) in zip(loaded.model.state_dict().items(), again.model.state_dict().items()):
        assert torch.equal(a.bfloat16(), b), name
    kept = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert kept["x"] == 1 and kept["base"]["licence"] == "L"
    assert not (tmp_path / "out" / "dspark_source.json").exists() and not (tmp_path / "out.part").exists()
