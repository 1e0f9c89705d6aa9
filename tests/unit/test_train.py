"""Training: losses against their identities, data that cannot be lost or leak, runs that can be interrupted."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from dspark.heads.rope import rope_tables
from dspark.model.families import extract
from dspark.model.runner import build_runner
from dspark.params import SamplingParams
from dspark.train.answers import Example, make_answers
from dspark.train.blocks import choose_anchors, make_blocks
from dspark.train.calibrate import fit_temperatures, reliability, survival
from dspark.train.losses import block_losses, position_weights, total_variation
from dspark.train.prompts import TrainPrompt, read_prompts
from dspark.train.recipe import DataRecipe, TrainingRecipe, load_recipe
from dspark.train.start import draft_vocabulary
from dspark.train.states import TargetStates
from dspark.train.trainer import Trainer, epoch_indices
from dspark.train.validate import validate
from tests.fakes import make_engine, run
from tests.tiny_heads import BLOCK, tiny_head
from tests.tiny_models import tiny_model

VOCAB = 96


# -- losses


def laws(seed, *shape):
    return torch.softmax(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2, dim=-1)


def test_acceptance_is_one_minus_total_variation():
    """Leviathan et al. 2023, theorem 3.5, against the acceptance computed token by token."""
    logits = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(0))
    target = laws(1, 3, 4, 9)
    q = torch.softmax(logits, dim=-1)
    accepted = (q * torch.clamp(target / q, max=1)).sum(dim=-1)
    torch.testing.assert_close(1 - total_variation(logits, target), accepted)
    half_l1 = 0.5 * (q - target).abs().sum(dim=-1)
    torch.testing.assert_close(total_variation(logits, target), half_l1)
    sums = block_losses(logits, torch.zeros(3, 4, dtype=torch.long), torch.ones(3, 4), target=target)
    torch.testing.assert_close(sums.accept, accepted)


def test_total_variation_with_a_reduced_vocabulary_is_that_of_the_full_laws():
    full_target = laws(2, 5, 12)
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    full_draft = torch.cat([torch.softmax(logits, dim=-1), torch.zeros(5, 5)], dim=-1)
    expected = 0.5 * (full_draft - full_target).abs().sum(dim=-1)
    torch.testing.assert_close(total_variation(logits, full_target[:, :7]), expected)


def test_losses_at_temperature_0_are_those_of_one_hot_laws():
    logits = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(4))
    labels = torch.tensor([[1, 5, -1], [0, 2, 3]])
    weights = torch.tensor([[1.0, 0.5, 0.25], [1.0, 0.5, 0.25]])
    sums = block_losses(logits, labels, weights)
    ce = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="none"
    ).view(2, 3)
    torch.testing.assert_close(sums.ce, (ce * weights).sum())
    one_hot = torch.nn.functional.one_hot(labels.clamp(min=0), 6).float() * (labels >= 0).unsqueeze(-1)
    torch.testing.assert_close(sums.l1, 2 * (total_variation(logits, one_hot) * weights).sum())
    assert torch.equal(sums.accept, ((logits.argmax(-1) == labels) & (labels >= 0)).float())
    assert float(sums.weight) == pytest.approx(3.5)


def test_of_equally_likely_tokens_each_is_drafted_as_often():
    """16-bit logits are often equal; which of them is drafted is chance."""
    logits = torch.tensor([[[2.0, 2.0, 1.0], [2.0, 2.0, 2.0], [2.0, 1.0, 1.0], [1.0, 2.0, 1.0]]]).bfloat16()
    sums = block_losses(logits, torch.tensor([[1, 2, 0, -1]]), torch.ones(1, 4))
    torch.testing.assert_close(sums.accept, torch.tensor([[1 / 2, 1 / 3, 1.0, 0.0]]))


def test_confidence_loss_is_least_at_the_acceptance():
    logits = torch.randn(1, 1, 6, generator=torch.Generator().manual_seed(5))
    target = laws(6, 1, 1, 6)
    accept = 1 - total_variation(logits, target)
    values = torch.linspace(-4, 4, 401)
    losses = [
        float(
            block_losses(
                logits, torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1), target=target, confidence=v.view(1, 1)
            ).confidence
        )
        for v in values
    ]
    best = torch.sigmoid(values[int(np.argmin(losses))])
    assert float(best) == pytest.approx(float(accept), abs=0.01)


def test_positions_weigh_less_the_further_they_are():
    weights = position_weights(torch.tensor([[True, True, True], [True, False, False]]), 2.0)
    torch.testing.assert_close(weights[0], torch.exp(-torch.arange(3) / 2.0))
    assert weights[1].tolist() == [1.0, 0.0, 0.0]


# -- calibration


def test_temperatures_repair_what_was_too_sure():
    rng = np.random.default_rng(0)
    truth = rng.normal(0.5, 1.5, (20_000, 3))
    drawn = rng.random((20_000, 3)) < 1 / (1 + np.exp(-truth))
    right = np.cumprod(drawn, axis=1).astype(np.int8)
    logits = truth * np.array([2.5, 1.0, 0.5])
    found = fit_temperatures(logits, right)
    assert found == pytest.approx([2.5, 1.0, 0.5], rel=0.15)
    before = reliability(survival(logits)[:, 0], right[:, 0])
    after = reliability(survival(logits, found)[:, 0], right[:, 0])
    assert after.ece < 0.015 < 0.05 < before.ece and after.brier < before.brier
    assert after.auc == pytest.approx(before.auc)


def test_auc_counts_ties_half():
    claims = np.array([0.1, 0.4, 0.4, 0.8])
    assert reliability(claims, np.array([0, 0, 1, 1], np.int8)).auc == pytest.approx(3.5 / 4)
    assert np.isnan(reliability(claims, np.array([1, 1, 1, 1], np.int8)).auc)


# -- data


def data_recipe(*files, **changes):
    return DataRecipe(prompts=tuple(str(f) for f in files), **changes)


def test_prompts_are_read_once_counted_and_split_by_text(tmp_path):
    file = tmp_path / "maths.jsonl"
    rows = [{"prompt": f"add {i}"} for i in range(199)] + [{"prompt": "add\u2028up"}]  # no end of a line
    rows += [{"question": "add 3"}, {"turns": ["a", "b"], "task": "t"}]
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    prompts, left_out = read_prompts(data_recipe(file, held_out=0.2), lambda text: [ord(c) for c in text])
    assert len(prompts) == 201 and left_out == {"duplicate": 1, "too long": 0}
    assert {p.task for p in prompts} == {"maths", "t"}
    assert 20 < sum(p.held_out for p in prompts) < 60
    again, _ = read_prompts(data_recipe(file, held_out=0.2), lambda text: [ord(c) for c in text])
    assert again == prompts
    shorter, counts = read_prompts(data_recipe(file, max_prompt_tokens=6), lambda text: [ord(c) for c in text])
    assert counts["too long"] == 99 and len(shorter) == 102


@pytest.mark.parametrize(
    "line, words",
    (
        ('{"prompt": ""}', "empty prompt"),
        ('{"answer": "x"}', "empty prompt"),
        ("not json", "not JSON"),
        ("[1]", "not an object"),
        (json.dumps({"prompt": "x" * 200_000}), "split it"),
    ),
)
def test_a_bad_row_is_named(tmp_path, line, words):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=words) as error:
        read_prompts(data_recipe(file), lambda text: [1])
    assert "p.jsonl:2" in str(error.value) and "\n" not in str(error.value)


def test_answers_are_made_once_and_never_mixed(tmp_path):
    prompts = [TrainPrompt(text=str(i), task="t", tokens=(i, 7), held_out=i == 0) for i in range(5)]
    recipe = data_recipe("unused", temperatures=(0.0, 0.5))
    calls = []

    def generate(tokens, max_tokens, temperature, seed):
        calls.append(temperature)
        return [[t[0], 1] for t in tokens]

    made = make_answers(prompts, recipe, target="tiny", folder=tmp_path, generate=generate)
    again = make_answers(prompts, recipe, target="tiny", folder=tmp_path, generate=generate)
    assert made == again and calls == [0.0, 0.5] and len(made) == 10
    assert made[3] == Example(tokens=(3, 7, 3, 1), num_prompt=2, task="t", temperature=0.0, held_out=False)
    with pytest.raises(ValueError, match="other settings"):
        make_answers(prompts, recipe, target="other", folder=tmp_path, generate=generate)


def test_more_temperatures_are_for_their_tasks_alone(tmp_path):
    prompts = [TrainPrompt(text=str(i), task="ab"[i % 2], tokens=(i, 7), held_out=False) for i in range(6)]
    recipe = data_recipe("unused", temperatures=(0.0,), more_temperatures={"b": (0.0, 0.7), "a": (0.9,)})

    def generate(tokens, max_tokens, temperature, seed):
        return [[t[0], 1] for t in tokens]

    made = make_answers(prompts, recipe, target="tiny", folder=tmp_path, generate=generate)
    asked = {t: [e.tokens[0] for e in made if e.temperature == t] for t in (0.0, 0.7, 0.9)}
    assert asked == {0.0: [0, 1, 2, 3, 4, 5], 0.7: [1, 3, 5], 0.9: [0, 2, 4]}
    recipe = dataclasses.replace(recipe, more_prompts=2)
    made = make_answers(prompts, recipe, target="tiny", folder=tmp_path / "fewer", generate=generate)
    asked = {t: [e.tokens[0] for e in made if e.temperature == t] for t in (0.0, 0.7, 0.9)}
    assert asked == {0.0: [0, 1, 2, 3, 4, 5], 0.7: [1, 3], 0.9: [0, 2]}


@pytest.mark.parametrize(
    ("settings", "words"),
    (
        ({"weights": {"tyop": 2.0}}, "tasks without prompts: tyop; the prompts are of p"),
        ({"more_temperatures": {"tyop": (0.5,)}}, "tasks without prompts: tyop"),
        ({"weights": {"p": -1.0}}, "data.weights.p=-1.0"),
        ({"more_temperatures": {"p": (9.0,)}}, "more_temperatures.p"),
    ),
)
def test_settings_by_task_must_fit_the_prompts(tmp_path, settings, words):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n')
    with pytest.raises(ValueError, match=words):
        read_prompts(data_recipe(file, **settings), lambda text: [1])


def test_an_epoch_takes_a_task_by_its_weight():
    taken = epoch_indices(["a", "b", "c", "a", "c", "a"], {"a": 2.0, "c": 0.5})
    assert taken.tolist() == [0, 0, 1, 3, 3, 4, 5, 5]
    assert epoch_indices(["a"], {"a": 0.0}).tolist() == []


def test_anchors_and_labels_stay_in_the_answer():
    example = Example(tokens=tuple(range(10, 22)), num_prompt=5, task="t", temperature=0.0, held_out=False)
    rng = np.random.default_rng(0)
    assert choose_anchors(example, 100, rng) == list(range(5, 11))
    assert len(choose_anchors(example, 3, rng)) == 3
    blocks = make_blocks([example], [[5, 9]], 4)
    assert blocks.previous.tolist() == [[15, 16, 17, 18], [19, 20, 21, 0]]
    assert blocks.tokens.tolist() == [[16, 17, 18, 19], [20, 21, 0, 0]]
    assert blocks.valid.tolist() == [[True] * 4, [True, True, False, False]]


def test_the_draft_vocabulary_holds_the_most_frequent_tokens():
    example = Example(tokens=(50, 51, 60, 60, 61), num_prompt=2, task="t", temperature=0.0, held_out=False)
    assert draft_vocabulary([example], 96, 3).tolist() == [50, 60, 61]
    assert draft_vocabulary([example], 96, 6).tolist() == [0, 1, 50, 51, 60, 61]
    assert draft_vocabulary([example], 96, 0).tolist() == list(range(96))


# -- recipes


def test_recipes_say_what_is_wrong(tmp_path):
    base = '[data]\nprompts = ["p.jsonl"]\n[head]\nlayers = [0, 2]\n'
    file = tmp_path / "r.toml"
    file.write_text('target = "tiny"\n' + base)
    recipe = load_recipe(file, overrides={"training.blocks": 5})
    assert recipe.training.blocks == 5 and recipe.data.prompts == (str(tmp_path / "p.jsonl"),)
    for text, words in (
        ('colour = 1\ntarget = "t"\n' + base, "unknown keys colour"),
        ('target = "t"\n' + base + "bloks = 1\n", "unknown keys bloks"),
        (base, "missing keys 'target'"),
        ('target = "t"\n' + base.replace("[0, 2]", "3"), "give a list"),
        ('target = "t"\n' + base + '[training]\nlr = "fast"\n', "type float"),
        ('target = "t"\n' + base + "[training]\nlr = -1\n", "training.lr"),
        ("target = ", "not TOML"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=words) as error:
            load_recipe(file)
        assert "\n" not in str(error.value)


# -- the trainer


@pytest.fixture(scope="module")
def target():
    model = tiny_model("llama", vocab_size=VOCAB)
    weights, _ = extract(model)
    return build_runner(model, path="torch"), weights


def examples(runner, number=24):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB, rng.integers(3, 12)).tolist() for _ in range(number)]
    seqs = run(make_engine(runner), prompts, SamplingParams(temperature=0, max_tokens=16))
    return [
        Example(tokens=tuple(s.tokens), num_prompt=s.num_prompt, task="ab"[i % 2], temperature=0.0, held_out=i % 6 == 0)
        for i, s in enumerate(seqs)
    ]


def trainer(target, folder, rows, **changes):
    runner, weights = target
    head = tiny_head(tiny_model("llama", vocab_size=VOCAB), context=changes.pop("context", "target"), layers=(0, 2))
    for parameter in head.parameters():
        parameter.requires_grad_(True)
    settings = dict(blocks=240, sequences=4, anchors=6, lr=3e-3, precision="float32", validate_blocks=10_000, tv=1.0)
    states = TargetStates(runner, head.config, extra_taps=(3,) if changes.get("temperature") else ())
    by_task = changes.pop("weights", None)
    recipe = TrainingRecipe(**(settings | changes))
    return Trainer(head, states, rows, recipe, folder=folder, final_head=weights.head, weights=by_task)


@pytest.mark.parametrize("context", ("target", "fused"))
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_training_raises_the_accepted_length(target, tmp_path, context, temperature):
    run_ = trainer(target, tmp_path, examples(target[0]), context=context, temperature=temperature, blocks=1500)
    before = run_.validate().accepted_length
    losses = []
    run_.sink = lambda row: losses.append(row["ce"]) if "ce" in row else None
    assert run_.run()
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.2
    assert run_.validate().accepted_length > before
    assert torch.equal(run_.head.embed_tokens.weight, target[1].embed.float())


def test_an_interrupted_run_ends_with_the_same_weights(target, tmp_path):
    rows = examples(target[0])
    whole = trainer(target, tmp_path / "a", rows)
    whole.run()
    part = trainer(target, tmp_path / "b", rows)
    steps = iter(range(100))
    assert not part.run(stop=lambda: next(steps) >= 3)
    again = trainer(target, tmp_path / "b", rows)
    assert again.resume() and 0 < again.progress.step < again.num_steps
    assert again.run()
    for (name, a), (_, b) in zip(whole.head.state_dict().items(), again.head.state_dict().items()):
        assert torch.equal(a, b), name


def test_kept_states_change_nothing_but_the_work(target, tmp_path):
    rows = examples(target[0])
    plain = trainer(target, tmp_path / "a", rows)
    keeping = trainer(target, tmp_path / "b", rows)
    keeping.target.room = 100_000
    passes = []
    keeping.target._run = lambda sequences, run=keeping.target._run: passes.append(len(sequences)) or run(sequences)
    assert plain.run() and keeping.run()
    assert 0 < len(keeping.target.kept) < len(rows) and 0 <= keeping.target.room < 100_000
    assert sum(passes) < 4 * plain.num_steps
    for (name, a), (_, b) in zip(plain.head.state_dict().items(), keeping.head.state_dict().items()):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("decay", (1.0, 0.25))
def test_the_learning_rate_rises_stays_and_falls(target, tmp_path, decay):
    run_ = trainer(target, tmp_path, examples(target[0]), blocks=4800, warmup=0.1, decay=decay, final_lr=0.1)
    rates = np.array([run_._learning_rate(step) for step in range(run_.num_steps + 1)]) / run_.recipe.lr
    warm, steps = round(0.1 * run_.num_steps), np.diff(rates)
    falls = run_.num_steps - round(decay * (run_.num_steps - warm))
    assert (steps[: warm - 1] > 0).all() and rates[warm - 1] == 1
    np.testing.assert_allclose(rates[warm : falls + 1], 1)
    assert (steps[falls:] < 0).all() and rates[-1] == pytest.approx(0.1)


def test_tokens_are_counted_once(target, tmp_path):
    rows = examples(target[0])
    run_ = trainer(target, tmp_path, rows, weights={"a": 2.0}, blocks=600)
    assert run_.run()
    assert run_.progress.tokens == sum(e.num_answer for e in rows if not e.held_out)


def test_validation_is_what_the_engine_serves(target):
    """The walk over known answers accepts exactly what the engine accepts when it drafts whole blocks."""
    runner, _ = target
    head = tiny_head(tiny_model("llama", vocab_size=VOCAB), layers=(0, 2))
    rows = examples(runner)
    found = validate(
        head, TargetStates(runner, head.config), rows, rope=rope_tables(head.config, head.config.max_positions)
    )
    engine = make_engine(runner, head=head, max_drafts=BLOCK)
    seqs = run(engine, [list(e.tokens[: e.num_prompt]) for e in rows], SamplingParams(temperature=0, max_tokens=16))
    assert [tuple(s.tokens) for s in seqs] == [e.tokens for e in rows]
    # The engine's first pass answers without a draft, and the walk starts after it; at the end the engine drafts no
    # more than may be emitted.
    record = engine.totals.record
    walked = sum(int((row == 1).sum()) for row in found.right.numpy())
    assert abs(walked - record.num_accepted) <= len(rows)
    assert found.num_blocks == pytest.approx(record.num_steps - len(rows), abs=len(rows))
    assert set(found.by_task) == {"a", "b"}
