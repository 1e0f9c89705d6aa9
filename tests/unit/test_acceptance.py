"""The acceptance model: believes a claim, then judges it, by position, class and request; never looks ahead."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.plan.acceptance import AcceptanceModel, logistic, logit
from dspark.plan.recent import MAX_NAMES


def verdict(rng, probability, num_verified):
    """Accepted drafts of a block whose every draft holds with the same conditional probability."""
    accepted = 0
    while accepted < num_verified and rng.random() < probability:
        accepted += 1
    return accepted


def serve(model, rng, probability, *, seq_id, prompt_class="", steps=40, claims=(0.5, 0.25, 0.125), source="x"):
    model.begin(seq_id, prompt_class)
    for _ in range(steps):
        accepted = verdict(rng, probability, len(claims))
        model.update(seq_id, source, claims, num_verified=len(claims), num_accepted=accepted)


def begun(model, seq_id, prompt_class):
    model.begin(seq_id, prompt_class)
    return model


def test_a_claim_is_believed_at_first_and_then_judged():
    model = AcceptanceModel(first_guess=0.7)
    assert model.survival(1, "x", [0.9, 0.45]) == pytest.approx([0.9, 0.45], rel=1e-6)
    assert model.foresee(1, "x", 2) == pytest.approx([0.7, 0.49], rel=1e-6)
    for seq_id in range(20):
        for _ in range(20):
            model.update(seq_id, "x", [0.9, 0.45], num_verified=2, num_accepted=0)
    first, second = model.survival(99, "x", [0.9, 0.45])
    assert first < 0.1 and second < first
    assert model.foresee(99, "x", 1)[0] < 0.1
    assert model.survival(99, "other", [0.9]) == pytest.approx([0.9])


def test_a_new_request_starts_as_its_class_and_a_new_class_as_all_traffic():
    model, rng = AcceptanceModel(), random.Random(0)
    for seq_id in range(60):
        easy = seq_id % 2 == 0
        serve(model, rng, 0.9 if easy else 0.2, seq_id=seq_id, prompt_class="easy" if easy else "hard")
        model.forget(seq_id)
    for ask in (
        lambda name: begun(model, 999, name).foresee(999, "x", 1)[0],
        lambda name: begun(model, 999, name).survival(999, "x", [0.5])[0],
    ):
        assert ask("easy") == pytest.approx(0.9, abs=0.12)
        assert ask("hard") == pytest.approx(0.2, abs=0.12)
        assert ask("hard") + 0.1 < ask("new") < ask("easy") - 0.1


def test_a_request_unlike_its_class_is_found_out():
    model, rng = AcceptanceModel(), random.Random(1)
    for seq_id in range(40):
        serve(model, rng, 0.2, seq_id=seq_id, prompt_class="c")
    serve(model, rng, 0.95, seq_id=100, prompt_class="c", steps=15)
    assert model.foresee(100, "x", 1)[0] > 0.6
    assert model.survival(100, "x", [0.5])[0] > 0.4, "slower, as the claim may have said so already"
    assert begun(model, 101, "c").foresee(101, "x", 1)[0] < 0.45, "the next request of the class is not it"


def test_later_positions_may_hold_less_than_their_claims_say():
    model, rng = AcceptanceModel(), random.Random(2)
    for seq_id in range(200):
        model.update(seq_id, "x", [0.8, 0.64], num_verified=2, num_accepted=int(rng.random() < 0.8))
    first, second = model.survival(999, "x", [0.8, 0.64])
    assert first == pytest.approx(0.8, abs=0.1) and second < 0.1


falling = st.lists(st.floats(0, 1), min_size=1, max_size=8).map(lambda values: sorted(values, reverse=True))


@given(falling, st.integers(0, 2**32), st.integers(1, 8))
def test_what_is_said_of_a_draft_never_depends_on_later_claims(claims, seed, size):
    model, rng = AcceptanceModel(), random.Random(seed)
    for seq_id in range(3):
        serve(model, rng, rng.random(), seq_id=seq_id, steps=5)
    said = model.survival(1, "x", claims)
    assert said[:size] == model.survival(1, "x", claims[:size])
    assert all(0 <= b <= a <= 1 for a, b in zip([1.0, *said], said))


def test_what_was_not_looked_at_teaches_nothing():
    one, two = AcceptanceModel(), AcceptanceModel()
    one.update(1, "x", [0.9, 0.5, 0.1], num_verified=3, num_accepted=0)
    two.update(1, "x", [0.9, 0.8, 0.7], num_verified=3, num_accepted=0)
    assert one.as_dict() == two.as_dict()
    before = json.dumps(one.as_dict())
    one.update(1, "x", [0.9], num_verified=0, num_accepted=0)
    assert json.dumps(one.as_dict()) == before


def test_what_is_saved_is_what_is_loaded_and_requests_are_forgotten():
    model, rng = AcceptanceModel(first_guess=0.4), random.Random(3)
    for seq_id in range(5):
        serve(model, rng, 0.7, seq_id=seq_id, prompt_class=f"class {seq_id}")
    assert set(model.requests) == set(range(5))
    for seq_id in range(5):
        model.forget(seq_id)
    assert not model.requests
    again = AcceptanceModel.from_dict(json.loads(json.dumps(model.as_dict())))
    asks = (lambda m: begun(m, 9, "class 1").survival(9, "x", [0.6, 0.3]), lambda m: m.foresee(9, "x", 3))
    for ask in asks:
        assert ask(again) == ask(model)
    assert again.first_guess == 0.4


@pytest.mark.parametrize(
    "spoil",
    (
        lambda values: values.pop("blind"),
        lambda values: values["sighted"]["x"].update(weights=[[1.0, 1.0]]),
        lambda values: values["sighted"]["x"].update(positions=[[math.nan, 1.0]] * 4),
        lambda values: values["blind"].update(x=3),
    ),
)
def test_values_that_are_not_a_model_are_refused(spoil):
    model = AcceptanceModel()
    model.update(1, "x", [0.5], num_verified=1, num_accepted=1)
    values = json.loads(json.dumps(model.as_dict()))
    spoil(values)
    with pytest.raises(ValueError, match="acceptance model"):
        AcceptanceModel.from_dict(values)


def test_classes_are_bounded():
    model = AcceptanceModel()
    for index in range(2 * MAX_NAMES):
        begun(model, index, str(index)).update(index, "x", [0.5], num_verified=1, num_accepted=1)
    assert len(model.sighted["x"].classes) == len(model.blind["x"].classes) == MAX_NAMES


@given(st.floats(0.01, 0.99))
def test_logit_and_logistic_are_inverse(probability):
    assert logistic(logit(probability)) == pytest.approx(probability)


def test_mixed_traffic_is_foretold_better_than_by_position_and_claim_alone():
    """Requests that differ in what the claim does not say: log-loss of the model against the same model that is told
    neither class nor request."""
    rng = random.Random(4)
    told, untold = AcceptanceModel(), AcceptanceModel()
    losses = [0.0, 0.0]
    for seq_id in range(120):
        probability, name = ((0.9, "a"), (0.3, "b"))[seq_id % 2]
        told.begin(seq_id, name)
        for step in range(20):
            held = rng.random() < probability
            asked = (
                told.survival(seq_id, "x", [0.6])[0],
                untold.survival(10_000 * seq_id + step, "x", [0.6])[0],
            )
            losses = [loss - math.log(p if held else 1 - p) for loss, p in zip(losses, asked)]
            told.update(seq_id, "x", [0.6], num_verified=1, num_accepted=int(held))
            untold.update(10_000 * seq_id + step, "x", [0.6], num_verified=1, num_accepted=int(held))
    assert losses[0] < 0.85 * losses[1]


def test_a_draft_is_judged_step_by_step_as_it_is_as_a_whole():
    model = AcceptanceModel()
    model.begin(1, "code")
    for _ in range(40):
        model.update(1, "model", [0.5, 0.2, 0.1], num_verified=3, num_accepted=3)
    for claims in ([0.9, 0.3, 0.2, 0.1, 0.01], [0.2], [1.0, 1.0]):
        judge, alive, before, found = model.judge(1, "model"), 1.0, 1.0, []
        for j, claim in enumerate(claims):
            alive *= judge(j, claim / before)
            before = claim
            found.append(alive)
        assert found == pytest.approx(model.survival(1, "model", claims))
    assert model.judge(1, "model")(0, 0.5) > 0.8, "what hesitated and held is no longer doubted"
    assert AcceptanceModel().judge(9, "model")(2, 0.4) == pytest.approx(0.4)
