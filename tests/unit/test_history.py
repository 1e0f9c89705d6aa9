"""History: classes of prompts, what blocks brought by class, saved and loaded whole."""

from __future__ import annotations

import json
import math
import random
import re

import pytest

from dspark.engine.sketch import MAX_TOKENS, NUM_NUMBERS, sketch
from dspark.plan.classes import PromptClasses
from dspark.plan.gains import Gains
from dspark.plan.history import History
from dspark.plan.recent import MAX_NAMES


def prompt(rng, topic, *, length=80):
    """Half of a topic's own thirty words, half of words that all prompts share, behind the same template."""
    words = [
        1000 * topic + rng.randrange(30) if rng.random() < 0.5 else 90_000 + rng.randrange(200) for _ in range(length)
    ]
    return [7, 8, 9, *words]


def test_prompts_of_a_kind_get_a_class():
    rng, classes = random.Random(0), PromptClasses()
    found = [(topic, classes.assign(sketch(prompt(rng, topic)))) for topic in [1, 2, 3, 4] * 60]
    last = found[120:]
    by_class = {}
    for topic, name in last:
        by_class.setdefault(name, []).append(topic)
    pure = sum(max(topics.count(topic) for topic in set(topics)) for topics in by_class.values())
    assert pure >= 0.95 * len(last)
    assert 4 <= len(classes.centres) <= 16


def test_classes_are_bounded_and_sketches_have_one_length():
    rng, classes = random.Random(1), PromptClasses(max_classes=3)
    assert {classes.assign(sketch(prompt(rng, topic))) for topic in range(40)} <= {0, 1, 2}
    with pytest.raises(ValueError):
        classes.assign([1.0])


def test_a_sketch_is_near_for_prompts_that_share_words_and_short_for_long_ones():
    rng = random.Random(2)
    one, two, other = (sketch(prompt(rng, topic)) for topic in (1, 1, 2))

    def cosine(a, b):
        return sum(x * y for x, y in zip(a, b)) / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5

    assert len(one) == NUM_NUMBERS and cosine(one, two) > cosine(one, other) + 0.2
    words = prompt(rng, 1, length=3 * MAX_TOKENS)
    assert sketch(words) == sketch([*words[: MAX_TOKENS // 2], *words[-MAX_TOKENS // 2 :]])
    assert sketch([5]) == sketch((5,)) and any(sketch([2**31 - 1]))


def test_gains_start_as_the_class_and_follow_the_request():
    gains = Gains()
    assert gains.expected(1) == (1.0, 3.0)
    for seq_id in range(60):
        gains.begin(seq_id, "easy" if seq_id % 2 else "hard")
        for _ in range(10):
            gains.update(seq_id, num_verified=5, num_accepted=4 if seq_id % 2 else 0)
        gains.forget(seq_id)
    for seq_id, name in ((100, "easy"), (101, "hard"), (102, "new")):
        gains.begin(seq_id, name)
    assert gains.expected(100)[0] > 3.7 and gains.expected(101)[0] < 0.3 and 1 < gains.expected(102)[0] < 3
    for _ in range(8):
        gains.update(100, num_verified=2, num_accepted=0)
    assert gains.expected(100)[0] < 2 and gains.expected(100)[1] < 4
    assert set(gains.rows) == {100}


def test_what_a_request_and_a_class_were_like_fades_while_no_block_is_drafted():
    """Blocks stop where they did badly: without fading nothing would ever say that the text has become easy again."""
    gains = Gains()
    gains.begin(1, "c")
    for _ in range(30):
        gains.update(1, num_verified=2, num_accepted=0)
    low = gains.expected(1)[0]
    for _ in range(20):
        gains.rest(1)
    assert gains.expected(1)[0] > 1.5 * low
    overall = gains.overall.accepted / gains.overall.steps
    for _ in range(10_000):
        gains.rest(1)
    assert gains.expected(1)[0] == pytest.approx(overall, rel=0.01)
    gains.rest(77)


def test_learning_counts_blocks_whose_drafts_were_all_cut_and_rests_without_one():
    history = History()
    history.begin(1, task="t")
    history.learn(1, "dspark", (0.1,), num_verified=0, num_accepted=0, block="alone")
    assert history.gains["alone"].rows[1].steps == 1
    history.learn(1, "suffix", (0.9, 0.8), num_verified=2, num_accepted=1)
    assert history.gains["alone"].rows[1].steps < 1 and history.acceptance.requests[1].rows["suffix"].sighted != 0
    before = abs(history.acceptance.requests[1].rows["suffix"].sighted)
    history.learn(1, "", (), num_verified=0, num_accepted=0)
    assert 0 < abs(history.acceptance.requests[1].rows["suffix"].sighted) < before


def test_gains_are_bounded():
    gains = Gains()
    for seq_id in range(2 * MAX_NAMES):
        gains.begin(seq_id, str(seq_id))
        gains.update(seq_id, num_verified=1, num_accepted=1)
        gains.forget(seq_id)
    assert len(gains.classes) == MAX_NAMES and not gains.rows and not gains.class_of


def taught():
    history, rng = History(), random.Random(3)
    for seq_id in range(12):
        history.begin(seq_id, task="chat" if seq_id % 3 == 0 else None, sketch=sketch(prompt(rng, seq_id % 4)))
        for _ in range(5):
            history.acceptance.update(seq_id, "suffix", [0.8, 0.5], num_verified=2, num_accepted=rng.randrange(3))
            history.gains["alone"].update(seq_id, num_verified=2, num_accepted=1)
        history.forget(seq_id)
    return history


def test_the_class_is_the_callers_word_or_found_or_none():
    history = History()
    assert history.begin(1, task="tenant 7", sketch=[1.0, 0.0]) == "tenant 7"
    assert history.begin(2, sketch=[1.0, 0.0]) == "#0"
    assert history.begin(3) == ""


def test_what_is_saved_is_what_is_loaded(tmp_path):
    history, file = taught(), tmp_path / "history.json"
    history.save(file)
    again = History.load(file)
    assert again.as_dict() == history.as_dict()
    words = sketch(prompt(random.Random(4), 2))
    for each in (history, again):
        assert each.begin(99, sketch=words).startswith("#")
    assert again.acceptance.survival(99, "suffix", [0.7]) == history.acceptance.survival(99, "suffix", [0.7])
    assert again.expected(99, "alone") == history.expected(99, "alone") != history.expected(99, "beside")
    assert [path.name for path in tmp_path.iterdir()] == ["history.json"]


@pytest.mark.parametrize(
    "spoil",
    (
        lambda values: values.pop("format"),
        lambda values: values.pop("gains"),
        lambda values: values["gains"]["alone"].update(overall=[2.0, 1.0, 1.0]),
        lambda values: values["gains"]["beside"].update(classes={"a": [1.0]}),
        lambda values: values["classes"].update(centres=[[1.0]]),
        lambda values: values["classes"].pop("mean"),
        lambda values: values["acceptance"].pop("blind"),
    ),
)
def test_files_that_are_not_a_history_are_refused_by_name(tmp_path, spoil):
    values, file = taught().as_dict(), tmp_path / "history.json"
    spoil(values)
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"history\.json: not a history"):
        History.load(file)


@pytest.mark.parametrize("content", ("", "[]", "{"))
def test_other_files_are_refused_by_name(tmp_path, content):
    file = tmp_path / "history.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"history\.json: not a history"):
        History.load(file)
    with pytest.raises(ValueError, match="no such file"):
        History.load(tmp_path / "missing.json")


def good():
    return json.loads(json.dumps(taught().as_dict()))


@pytest.mark.parametrize("value", (math.nan, math.inf, 0, 1, -7, "0.5", True, 10**400), ids=str)
def test_first_guesses_that_are_no_probability_are_refused(value):
    values = good()
    values["acceptance"]["first_guess"] = value
    with pytest.raises(ValueError, match="first_guess"):
        History.from_dict(values)


@pytest.mark.parametrize(
    ("key", "value"),
    (
        ("num_seen", -1),
        ("num_seen", 2.5),
        ("num_seen", math.inf),
        ("num_seen", 0),
        ("max_classes", 0),
        ("max_classes", 10**9),
        ("least_likeness", math.nan),
        ("mean", [math.nan] * NUM_NUMBERS),
        ("mean", [0.1] * 3),
        ("mean", []),
        ("centres", [[1e300] * NUM_NUMBERS]),
        ("centres", [[0.1] * 3]),
        ("centres", []),
    ),
)
def test_classes_out_of_range_are_refused(key, value):
    values = good()
    values["classes"][key] = value
    with pytest.raises(ValueError):
        History.from_dict(values)


@pytest.mark.parametrize(
    "spoil",
    (
        lambda values: values.update(acceptance=[1]),
        lambda values: values.update(gains=[1]),
        lambda values: values.update(classes="xx"),
        lambda values: values["gains"]["alone"].update(overall=[1e14, 1e14, 1e-9]),
        lambda values: values["acceptance"]["sighted"]["suffix"].update(weights=[[1e308, 1.0], [1.0, 1.0]]),
        lambda values: values["acceptance"]["sighted"]["suffix"].update(weights=[[1.0, 1.0], [0.0, 1.0]]),
        lambda values: values["gains"]["alone"]["classes"].update({str(i): [0, 0, 0] for i in range(MAX_NAMES + 1)}),
    ),
)
def test_values_that_cannot_have_been_learned_are_refused(spoil):
    values = good()
    spoil(values)
    with pytest.raises(ValueError):
        History.from_dict(values)


def test_nesting_too_deep_to_read_is_refused_by_name(tmp_path):
    file = tmp_path / "history.json"
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"history\.json: not a history"):
        History.load(file)


def test_a_history_that_cannot_be_saved_leaves_nothing_and_names_the_file(tmp_path):
    for path in (tmp_path, tmp_path / "absent" / "history.json"):
        with pytest.raises(ValueError, match=re.escape(f"cannot write the history {path}:")):
            History().save(path)
    assert not (tmp_path.parent / f"{tmp_path.name}.partial").exists()


def test_new_tasks_are_learned_apart_after_any_number_of_others():
    history = History()

    def answer(seq_id, task, held):
        history.begin(seq_id, task=task)
        history.learn(seq_id, "suffix", [0.5], num_verified=1, num_accepted=held, block="alone")
        history.forget(seq_id)

    for i in range(300):
        answer(i, f"one-off {i}", 1)
    for i in range(300, 600, 2):
        answer(i, "hard", 0)
        answer(i + 1, "easy", 1)
    chances, gains = {}, {}
    for task in ("hard", "easy"):
        history.begin(-1, task=task)
        chances[task] = history.acceptance.survival(-1, "suffix", [0.5])[0]
        gains[task] = history.expected(-1, "alone")[0]
    assert chances["easy"] > chances["hard"] + 0.5 and gains["easy"] > gains["hard"] + 0.5
    assert len(history.acceptance.sighted["suffix"].classes) == len(history.gains["alone"].classes) == MAX_NAMES
