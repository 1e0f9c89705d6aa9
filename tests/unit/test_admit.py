"""Floors, priorities and objectives: debts by hand, bounded delays for everyone, and promises kept in simulation."""

from __future__ import annotations

import math
import random

import pytest

from dspark.plan.admit import LOOK_AHEAD, MAX_OVERTAKEN, MAX_REST, MIN_CHUNK, STALL, Admission, Applicant
from dspark.plan.budget import choose
from dspark.plan.cost import CostTable
from dspark.plan.joint import draft_lengths
from dspark.plan.pace import AHEAD, CLASS_WEIGHT, LARGEST_WEIGHT, MARGIN, MOST_CREDIT, MOST_DEBT, PATIENCE, Pace
from dspark.plan.simulate import Kind, Machine, Simulation

LINE = CostTable([(1, 0.010), (513, 0.522)])
"""9 ms and 1 ms a row."""


def test_a_debt_grows_with_time_and_falls_with_tokens():
    pace = Pace()
    pace.begin(1, floor=20.0)
    assert pace.rows[1].owed(5.0) == 0.0, "nothing is owed before the first token"
    pace.emitted(1, 1, packed=1, now=10.0)
    assert pace.rows[1].owed(10.2) == pytest.approx(20.0 * MARGIN * 0.2)
    assert pace.weights([1], 10.0) == [pytest.approx(math.exp(AHEAD / PATIENCE))], "level with its floor, not ahead"
    pace.emitted(1, 3, packed=1, now=10.1)
    owed = 20.0 * MARGIN * 0.1 - 3
    assert pace.weights([1], 10.1) == [pytest.approx(math.exp((owed / 20.0 + AHEAD) / PATIENCE))]
    assert pace.weights([1], 11.0) == [pytest.approx(LARGEST_WEIGHT)]
    pace.emitted(1, 400, packed=1, now=10.5)
    assert pace.rows[1].debt == -20.0 * MOST_CREDIT, "a rush is no excuse for later"
    assert pace.rows[1].owed(99.0) == 20.0 * MOST_DEBT, "nor does a stall claim the machine for good"
    pace.forget(1)
    assert pace.weights([], 0.0) is None and not pace.num_floors


def test_without_promises_all_tokens_are_worth_the_same_and_nothing_is_weighed():
    pace = Pace()
    for seq_id in range(3):
        pace.begin(seq_id, priority=4)
    assert pace.weights([0, 1, 2], 0.0) is None and pace.seconds_left([0, 1, 2], 0.0) == float("inf")
    pace.begin(3, priority=5)
    assert pace.weights([0, 3], 0.0) == [1.0, 1 / CLASS_WEIGHT]


def test_latency_helps_those_that_are_slow():
    pace = Pace(objective="latency")
    for seq_id in range(2):
        pace.begin(seq_id)
        for _ in range(200):
            pace.emitted(seq_id, 1 + seq_id, packed=3, now=0.0)
    slow, quick = pace.weights([0, 1], 0.0)
    assert slow == pytest.approx(1.5**2, rel=1e-3) and quick == pytest.approx(0.75**2, rel=1e-3)
    with pytest.raises(ValueError, match="choose one of throughput, latency"):
        Pace(objective="speed")


def test_prompts_are_read_as_floors_and_stalls_allow():
    free = Admission(cost=LINE)
    free.begin(1)
    assert free.prompt_tokens([1], most=512, now=0.0) == 512
    latency = Admission(cost=LINE, pace=Pace(objective="latency"))
    latency.begin(1)
    latency.begin(2)
    most = latency.prompt_tokens([1, 2], most=512, now=0.0)
    assert LINE.seconds(2 + most) <= STALL * LINE.seconds(2) or most == MIN_CHUNK
    assert latency.prompt_tokens([], most=512, now=0.0) == 512, "nobody waits"
    floors = Admission(cost=LINE)
    floors.begin(1, floor=10.0)
    floors.pace.emitted(1, 1, packed=1, now=0.0)
    within = floors.prompt_tokens([1], most=512, now=0.0)
    assert MIN_CHUNK < within < 512 and LINE.seconds(1 + within) <= 1 / (10.0 * MARGIN)
    late = [floors.prompt_tokens([1], most=512, now=1.0) for _ in range(3 * MAX_REST)]
    assert late == ([0] * (MAX_REST - 1) + [MIN_CHUNK]) * 3, "behind its floor: prompts wait, but not for ever"


def test_the_heaviest_rows_go_first_and_nobody_sits_out_for_long():
    admission = Admission(cost=LINE)
    admission.begin(0, floor=100.0)
    for seq_id in range(1, 30):
        admission.begin(seq_id)
    admission.pace.emitted(0, 1, packed=1, now=0.0)
    ids = list(range(30))
    assert admission.resting(ids, None) == set()
    assert not admission.resting(ids, admission.pace.weights(ids, 0.0)), "nothing is owed yet"
    waited, longest = dict.fromkeys(ids, 0), 0
    for _ in range(4 * MAX_REST):
        resting = admission.resting(ids, admission.pace.weights(ids, 9.0))
        assert 0 not in resting
        for seq_id in ids:
            waited[seq_id] = waited[seq_id] + 1 if seq_id in resting else 0
        longest = max(longest, *waited.values())
    assert longest == MAX_REST - 1


@pytest.mark.parametrize("objective", ("throughput", "latency"))
@pytest.mark.parametrize("seed", range(4))
def test_nobody_is_passed_over_more_often_than_the_bound(objective, seed):
    """A queue that is never empty, with arrivals of any size, acceptance and, in the queue's own order, priority."""
    rng = random.Random(seed)
    expected: dict[int, float] = {}
    admission = Admission(pace=Pace(objective=objective), expected=expected.__getitem__)
    waiting: list[Applicant] = []
    passed: dict[int, int] = {}
    running: list[int] = []
    for number in range(1500):
        waiting.append(Applicant(seq_id=number, priority=rng.choice((0, 0, 0, 1)), num_tokens=rng.randint(1, 900)))
        expected[number], passed[number] = rng.choice((0.3, 5.0)), 0
        admission.begin(number)
        if number < 200:
            continue
        chosen = admission.next_waiting(waiting[:LOOK_AHEAD], running)
        overtaken = [applicant.seq_id for applicant in waiting[:chosen]]
        admission.pass_over(overtaken)
        for seq_id in overtaken:
            passed[seq_id] += 1
        running = [*running, waiting.pop(chosen).seq_id][-8:]
        assert max(passed.values()) <= MAX_OVERTAKEN
    served = 1500 - len(waiting)
    assert max(passed.values()) > 0 and all(a.seq_id >= served - LOOK_AHEAD * (MAX_OVERTAKEN + 1) for a in waiting)


def test_weights_decide_whose_drafts_are_checked_and_drafted():
    survivals = [[0.6, 0.4, 0.2], [0.6, 0.4, 0.2]]
    steep = CostTable([(1, 1.0), (64, 32.5)])
    plain = choose(survivals, steep.seconds, 64, search_all=True)
    heavy = choose(survivals, steep.seconds, 64, search_all=True, weights=[6.0, 1.0])
    assert plain[0] == plain[1] and heavy[0] > heavy[1]
    draft = CostTable([(1, 0.1), (2, 0.2)])
    assert (
        draft_lengths(survivals, steep, draft).lengths[0]
        < draft_lengths(survivals, steep, draft, weights=[8.0, 1.0]).lengths[0]
    )
    even = draft_lengths(survivals, steep, draft, weights=[1.0, 1.0], other_rows=3)
    assert even == draft_lengths(survivals, steep, draft, other_rows=3)


SERVER = CostTable([(1, 0.0085), (4, 0.0095), (8, 0.0115), (16, 0.0140), (32, 0.0180), (64, 0.0290), (512, 0.160)])


def mixture(*, floor):
    easy = {"acceptance": (0.7,) * 8, "num_prompt": 150}
    return [
        Kind(name="asks", share=1, floor=floor, num_output=300, **easy),
        Kind(name="hard", share=2, acceptance=(0.35,) * 8, num_prompt=300, num_output=150),
        Kind(name="easy", share=1, num_output=400, **easy),
    ]


def serve(*, floor, seed, heard=True):
    """`heard` False: nobody tells the engine of the floor."""
    machine = Machine(target=SERVER, max_seqs=8, max_tokens=512)
    simulation = Simulation(machine, mixture(floor=floor), seed=seed)
    if not heard:
        begin = simulation.admission.pace.begin
        simulation.admission.pace.begin = lambda seq_id, **asked: begin(seq_id)
    return simulation.run(150, concurrency=8)


@pytest.mark.parametrize("seed", range(3))
def test_floors_are_held_at_a_small_price(seed):
    """The same traffic without floors, whose requests would break them in many of their seconds."""
    free, held = serve(floor=120.0, seed=seed, heard=False), serve(floor=120.0, seed=seed)
    assert sum(free.held) < 0.8 * len(free.held) and sum(held.held) >= 0.95 * len(held.held) > 20
    assert held.throughput >= 0.9 * free.throughput


def test_a_floor_that_cannot_be_kept_starves_nobody():
    report = serve(floor=5000.0, seed=0)
    assert report.num_tokens == pytest.approx(150 * 250, rel=0.15) and not any(report.held)
    assert report.throughput > 0.1 * serve(floor=5000.0, seed=0, heard=False).throughput


def test_grouping_by_acceptance_pays_where_a_draft_pass_is_taken_for_each_token():
    """More requests wait than run: those that draft long run beside each other, and the others do not wait for them."""
    kinds = [
        Kind(name="long", acceptance=(0.95,) * 8, num_prompt=16, num_output=96),
        Kind(name="short", acceptance=(0.1,) * 8, num_prompt=16, num_output=96),
    ]
    drafts = {"draft": CostTable([(1, 0.0015), (8, 0.0020)]), "by_token": True}

    def throughput(group):
        machine = Machine(target=SERVER, max_seqs=8, max_drafts=8, group=group, **drafts)
        return Simulation(machine, kinds, seed=5).run(400, concurrency=64).throughput

    assert throughput(True) > 1.03 * throughput(False)
