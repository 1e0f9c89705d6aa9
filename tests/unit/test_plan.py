"""Plans against brute force: cost tables, budgets, lengths."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.config import POLICIES
from dspark.plan.budget import beside_prompts, choose
from dspark.plan.cost import AGREEMENT, MAX_TRIES, CostTable, PacedTable, Shape, StepCost, profile
from dspark.plan.joint import draft_lengths
from dspark.plan.length import (
    FIRST_HEURISTIC,
    NO_DRAFTS,
    PROBE_EVERY,
    PROBE_SHARE,
    AdaptiveLength,
    Features,
    Limit,
    PolicyInputs,
    build_policies,
)

FLAT = CostTable([(1, 1.0), (64, 1.0)])
LINEAR = CostTable([(1, 1.0), (64, 64.0)])


def test_cost_keeps_cliffs_and_extrapolates():
    table = CostTable([(4, 1.0), (1, 1.2), (8, 5.0)])
    assert [table.seconds(rows) for rows in (1, 4, 6, 8, 16)] == [1.2, 1.0, 3.0, 5.0, 13.0]


@pytest.mark.parametrize("points", ([], [(0, 1.0)], [(1, 0.0)]))
def test_cost_refuses_nonsense(points):
    with pytest.raises(ValueError, match="cost table"):
        CostTable(points)


def test_profile_takes_the_fastest():
    times = itertools.cycle([3.0, 1.0, 2.0])
    assert all(seconds == 1.0 for _, seconds in profile(lambda rows: next(times), max_rows=2, repetitions=3).points)


def test_paced_costs_follow_the_clock_and_bear_hiccups():
    table = PacedTable(CostTable([(1, 1.0), (4, 2.0)]))
    assert table.seconds(4) == 2.0 and table.points == [(1, 1.0), (4, 2.0)]
    for _ in range(200):
        table.observe(1, 1.5)
    assert table.seconds(4) == pytest.approx(3.0, rel=0.01)
    table.observe(1, 1e6)
    assert table.seconds(1) < 1.7
    for _ in range(200):
        table.observe(4, 6.0, passes=3)
    assert table.seconds(1) == pytest.approx(1.0, rel=0.01)


def test_sizes_that_disagree_are_tried_again_and_long_passes_are_left_out():
    calls, rng = [], random.Random(0)

    def run(rows):
        calls.append(rows)
        return rows * (1 + (rng.uniform(0, 0.7) if rows == 4 else 0.1 * AGREEMENT * rng.random()))

    table = profile(run, max_rows=64, longest=7)
    assert [rows for rows, _ in table.points] == [1, 2, 3, 4, 6, 8], "8 is the first that takes more than 7"
    assert calls.count(6) < calls.count(4) <= 2 * 3 + MAX_TRIES


def test_step_costs_learn_what_context_sequences_and_sampling_cost():
    """From steps of all shapes whose times have 4% of noise: predictions within 3%, with the cliff kept."""
    rng = random.Random(0)
    table = CostTable([(1, 0.010), (16, 0.014), (17, 0.020), (64, 0.030), (128, 0.060)])
    cost = StepCost(table, per_context=2e-7, per_seq_context=1e-6)

    def true(shape):
        contexts = 3e-7 * shape.context + 1.5e-6 * shape.seq_context
        return 1.2 * table.seconds(shape.rows) + contexts + 1.1e-4 * shape.seqs + 3e-4 * shape.sampled

    def draw():
        seqs = rng.randrange(1, 33)
        rows = seqs * rng.randrange(1, 4)
        sampled = rows if rng.random() < 0.3 else 0
        each = rng.randrange(50, 800)
        return Shape(rows=rows, context=rows * each, seq_context=seqs * each, seqs=seqs, sampled=sampled)

    for _ in range(400):
        shape = draw()
        cost.observe(shape, true(shape) * rng.gauss(1, 0.04))
    errors = [abs(cost.predict(shape) / true(shape) - 1) for shape in (draw() for _ in range(200))]
    assert sorted(errors)[100] < 0.03
    cost.begin(Shape(rows=8, context=8 * 64, seqs=8, sampled=0))
    assert cost.seconds(17) / cost.seconds(16) > 1.3, "a cliff stays a cliff"
    cost.begin(Shape(rows=8, context=8 * 800, seqs=8, sampled=8))
    dearer = cost.seconds(16) - cost.seconds(8)
    cost.begin(Shape(rows=8, context=8 * 64, seqs=8, sampled=0))
    assert dearer > 8 * 3e-4 + cost.seconds(16) - cost.seconds(8) - 1e-3, "a sampled row costs more"


def test_a_size_that_was_measured_at_a_bad_moment_is_mended():
    """One point of the table is twice what it ought to be; steps of many sizes tell."""
    rng = random.Random(0)
    right = CostTable([(1, 1.0), (4, 1.1), (8, 1.2), (16, 1.5), (32, 2.0)])
    cost = StepCost(CostTable([(rows, seconds * (1.6 if rows == 8 else 1)) for rows, seconds in right.points]))
    for _ in range(600):
        rows = rng.randrange(1, 33)
        cost.observe(Shape(rows=rows, seqs=rows), right.seconds(rows) * rng.gauss(1, 0.03))
    errors = [abs(cost.predict(Shape(rows=rows, seqs=rows)) / right.seconds(rows) - 1) for rows in (1, 4, 8, 16, 32)]
    assert max(errors) < 0.1


def test_step_costs_follow_the_clock_and_bear_hiccups():
    cost = StepCost(CostTable([(1, 1.0), (4, 2.0)]))
    assert cost.seconds(4) == 2.0 == cost.predict(Shape(rows=4)) and cost.points == [(1, 1.0), (4, 2.0)]
    for _ in range(300):
        cost.observe(Shape(rows=1), 1.5)
    assert cost.seconds(4) == pytest.approx(3.0, rel=0.02)
    cost.observe(Shape(rows=1), 1e6)
    assert cost.seconds(1) < 2.1
    for _ in range(300):
        cost.observe(Shape(rows=4), 2.0)
    assert cost.seconds(1) == pytest.approx(1.0, rel=0.05)
    for _ in range(300):
        cost.observe(Shape(rows=1), 1e-9)
    assert cost.seconds(1) > 0, "a cost is never nothing"


def test_choose_takes_all_when_flat_and_none_when_linear():
    survivals = [[0.5, 0.2], [0.9, 0.8, 0.7]]
    assert choose(survivals, FLAT.seconds, 64) == [2, 3]
    assert choose(survivals, LINEAR.seconds, 64) == [0, 0]
    assert choose(survivals, FLAT.seconds, 2) == [0, 2]
    assert choose([], FLAT.seconds, 4) == []


falling = st.lists(st.floats(0, 1), max_size=3).map(lambda values: sorted(values, reverse=True))


@given(st.lists(falling, min_size=1, max_size=3), st.integers(0, 2**32))
def test_search_is_the_best_of_all_prefix_vectors(survivals, seed):
    """Greedy order by survival contains, for every total, the best prefix vector; so the search is exact."""
    rng = random.Random(seed)
    table = CostTable([(rows, rng.uniform(0.5, 3)) for rows in range(1, 16)])

    def rate(lengths):
        expected = len(survivals) + sum(sum(row[:n]) for row, n in zip(survivals, lengths))
        return expected / table.seconds(len(survivals) + sum(lengths))

    best = max(rate(lengths) for lengths in itertools.product(*(range(len(row) + 1) for row in survivals)))
    chosen = choose(survivals, table.seconds, 99, search_all=True)
    assert rate(chosen) == pytest.approx(best)
    stopped = choose(survivals, table.seconds, 99)
    assert rate(stopped) >= rate([0] * len(survivals)) - 1e-12


def test_capacity_crosses_a_cliff_that_stops_the_default():
    """Tiles of four rows: the first draft beyond a tile pays for nothing by itself, eight good ones together do."""
    cost = lambda rows: 0.4 + 1.0 * -(-rows // 4)  # noqa: E731
    survivals = [[0.9, 0.8, 0.7, 0.6]] * 4
    assert choose(survivals, cost, 99) == [0, 0, 0, 0]
    best = choose(survivals, cost, 99, search_all=True)
    assert choose(survivals, cost, 99, capacity=sum(best)) == best == [2, 2, 2, 2]
    assert choose([[0.01] * 4] * 4, cost, 99, capacity=16) == [0, 0, 0, 0], "bad drafts are not kept for its sake"


@given(st.lists(falling, min_size=1, max_size=3), st.integers(0, 9), st.integers(0, 2**32))
def test_capacity_takes_prefixes_in_order_of_survival(survivals, capacity, seed):
    rng = random.Random(seed)
    table = CostTable([(rows, rng.uniform(0.5, 3)) for rows in range(1, 16)])
    lengths = choose(survivals, table.seconds, 99, capacity=capacity)
    kept = [s for row, n in zip(survivals, lengths) for s in row[:n]]
    left = [s for row, n in zip(survivals, lengths) for s in row[n:]]
    assert not kept or not left or min(kept) >= max(left)


def test_weights_say_what_a_token_of_each_row_is_worth():
    cost = lambda rows: 1 + 0.2 * (rows - 2)  # noqa: E731
    assert choose([[0.5], [0.6]], cost, 1) == [0, 1]
    assert choose([[0.5], [0.6]], cost, 1, weights=[2.0, 1.0]) == [1, 0]


def test_a_prompt_in_the_pass_is_no_reason_to_check_more():
    """A draft of 0.3 does not pay beside one row; a prompt of a thousand tokens in the same pass changes nothing."""
    cost = CostTable([(1, 1.0), (2000, 1000.0)])
    assert choose([[0.3]], cost.seconds, 8) == [0]
    assert choose([[0.3]], cost.seconds, 8, other_rows=1000) == [1], "by the whole pass's time it would seem to"
    assert choose([[0.3]], beside_prompts(cost, 1, 1000), 8, other_rows=1000) == [0]
    sure = CostTable([(1, 1.0), (2000, 2.0)])
    assert choose([[0.3]], beside_prompts(sure, 1, 1000), 8, other_rows=1000) == [1]


def test_choose_counts_what_rows_that_are_not_for_choice_bring():
    """A draft of 0.5 is worth a pass 1.4 times as long to a row alone, not beside a row that brings nine tokens."""
    cost = lambda rows: {1: 1.0, 2: 1.4, 10: 2.0, 11: 2.4}[rows]  # noqa: E731
    assert choose([[0.5]], cost, 8) == [1]
    assert choose([[0.5]], cost, 8, other_rows=9, other_tokens=9.0) == [0]


def features(seq_id=1, *, num_rows=1, step=0):
    return Features(seq_id=seq_id, num_rows=num_rows, step=step, room=99)


def ask(policy, row):
    """The limit of a row that is alone in its step."""
    policy.begin([row])
    return policy.limit(row)


def adaptive(acceptance, *, max_tokens=8, draft=0.3, target=FLAT):
    """Every draft is foreseen to hold with the same conditional probability."""
    return AdaptiveLength(
        max_tokens=max_tokens,
        target_cost=target,
        foresee=lambda seq_id, k: [acceptance(seq_id) ** (j + 1) for j in range(k)],
        draft_cost=None if draft is None else CostTable([(1, draft)]),
    )


def test_adaptive_length_follows_what_is_foreseen():
    policy = adaptive({1: 0.95, 2: 0.1}.__getitem__)
    long = ask(policy, features(1))
    assert long.max_tokens >= 5 and 0 < long.floor < 1
    assert ask(policy, features(2)).max_tokens == 0
    assert ask(policy, features(2)).thrifty and policy.keep([0.9]) is None


@pytest.mark.parametrize("acceptance", (0.5, 0.8, 0.9))
def test_adaptive_length_matches_leviathan(acceptance):
    """With acceptance a and costs of 1 and c, the best k maximises (1 - a^(k+1)) / ((1 - a) (1 + c k))."""
    policy = adaptive(lambda seq_id: acceptance, max_tokens=40, draft=0.1)
    best = max(range(41), key=lambda k: (1 - acceptance ** (k + 1)) / ((1 - acceptance) * (1 + 0.1 * k)))
    ask(policy, features())
    assert policy.lengths == {1: best}


def test_a_row_that_is_surer_than_foreseen_may_draft_on_while_that_pays():
    """While its survival is worth a draft's pass and place in the target's; by two where others wait, else doubled."""
    sloped = CostTable([(1, 1.0), (101, 6.0)])
    policy = adaptive(lambda seq_id: 0.8, max_tokens=20, draft=0.1, target=sloped)
    alone = ask(policy, features())
    assert alone.max_tokens == 2 * policy.lengths[1] < 20
    assert alone.floor == pytest.approx(policy.rate * (0.1 + 0.05))
    policy.begin([features(1, num_rows=2), features(2, num_rows=2)])
    among = policy.limit(features(1, num_rows=2))
    assert among.max_tokens == policy.lengths[1] + 2 < 20
    assert among.floor == pytest.approx(policy.rate * (policy.draft_cost.seconds(2) / 2 + 0.05))


@pytest.mark.parametrize(("draft", "pause"), ((None, PROBE_EVERY), (0.01, PROBE_EVERY), (0.3, 0.3 / PROBE_SHARE)))
def test_a_row_without_drafts_is_tried_again_for_a_small_share_of_the_time(draft, pause):
    policy = adaptive(lambda seq_id: 0.005, draft=draft)
    tried = []
    for step in range(1000):
        limit = ask(policy, features(step=step))
        assert limit.max_tokens == (limit.least if draft else 8)
        policy.update(1, num_verified=limit.least, num_accepted=0)
        tried += [step] if limit.least else []
    pauses = [b - a - 1 for a, b in itertools.pairwise([-1, *tried])]
    assert pauses == pytest.approx([pause] * len(pauses), abs=1) and pauses
    policy.forget(1)
    assert 1 not in policy.idle


def test_lookups_that_cost_next_to_nothing_beside_a_step_are_always_asked():
    """After a few misses a text may begin to repeat itself, and to look costs less than to miss that."""
    policy = AdaptiveLength(max_tokens=8, target_cost=FLAT, foresee=lambda seq_id, k: [0.5] * k, asking=lambda: 0.002)
    for step in range(100):
        assert ask(policy, features(step=step)) is not NO_DRAFTS
        policy.update(1, num_verified=4, num_accepted=0)


def test_rows_whose_lookups_bring_less_than_they_cost_rest_and_are_asked_again():
    policy = AdaptiveLength(max_tokens=8, target_cost=FLAT, foresee=lambda seq_id, k: [0.5] * k, asking=lambda: 0.05)
    asked = {1: [], 2: []}
    for step in range(300):
        rows = [features(seq_id, num_rows=2, step=step) for seq_id in (1, 2)]
        policy.begin(rows)
        for row in rows:
            if policy.limit(row) is not NO_DRAFTS:
                asked[row.seq_id].append(step)
                hit = row.seq_id == 1 and step % 5 == 0
                policy.update(row.seq_id, num_verified=2 * hit, num_accepted=2 * hit)
    assert asked[1] == list(range(300)), "0.4 tokens a step for 0.05 seconds of 0.5 a token"
    late = [step for step in asked[2] if step > 60]
    assert late and all(b - a == PROBE_EVERY for a, b in itertools.pairwise(late))
    policy.forget(2)
    rows = [features(2)]
    policy.begin(rows)
    assert policy.limit(rows[0]).max_tokens == 8, "a new request is tried"


survival_rows = st.lists(falling, min_size=1, max_size=4)


@given(survival_rows, st.floats(0.01, 0.5), st.floats(0.0, 0.4), st.floats(0.0, 0.1))
def test_joint_lengths_never_promise_less_than_plain_decoding_and_count_right(foreseen, pass_cost, per_row, per_draft):
    target = CostTable([(1, 1.0), (64, 1.0 + 63 * per_row)])
    draft = CostTable([(1, pass_cost), (64, pass_cost + 63 * per_draft)])
    plan = draft_lengths(foreseen, target, draft)
    depths = range(max(plan.lengths))
    drafting = sum(draft.seconds(sum(length > depth for length in plan.lengths)) for depth in depths)
    tokens = len(foreseen) + sum(sum(row[:n]) for row, n in zip(foreseen, plan.lengths))
    assert plan.rate == pytest.approx(tokens / (target.seconds(len(foreseen) + sum(plan.lengths)) + drafting))
    assert plan.rate >= len(foreseen) / target.seconds(len(foreseen)) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_joint_lengths_are_close_to_the_best_of_all(seed):
    rng = random.Random(seed)
    target = CostTable([(1, 1.0), (4, 1.1), (16, 1.0 + rng.uniform(0.2, 3))])
    draft = CostTable([(1, rng.uniform(0.02, 0.4)), (4, 0.5)])
    foreseen = [[a**k for k in (1, 2, 3)] for a in (rng.random() for _ in range(3))]

    def rate(lengths):
        drafting = sum(draft.seconds(sum(n > d for n in lengths)) for d in range(max(lengths)))
        tokens = 3 + sum(sum(row[:n]) for row, n in zip(foreseen, lengths))
        return tokens / (target.seconds(3 + sum(lengths)) + drafting)

    best = max(rate(lengths) for lengths in itertools.product(range(4), repeat=3))
    assert draft_lengths(foreseen, target, draft).rate >= 0.97 * best


@given(survival_rows, st.integers(0, 9))
def test_rows_under_other_policies_are_as_rows_with_nothing_to_draft(foreseen, others):
    target, draft = CostTable([(1, 1.0), (16, 3.0)]), CostTable([(1, 0.1), (16, 0.2)])
    beside = draft_lengths(foreseen, target, draft, other_rows=others)
    among = draft_lengths([*foreseen, *[[]] * others], target, draft)
    assert beside.lengths == among.lengths[: len(foreseen)] and beside.rate == pytest.approx(among.rate)


def test_rows_that_are_seldom_right_do_not_make_others_wait_and_do_not_wait():
    """Seven rows that expect nothing and one that is sure: it drafts alone, at the price of passes over one row."""
    draft = CostTable([(1, 0.05), (8, 0.4)])
    plan = draft_lengths([[0.9, 0.8, 0.7]] + [[0.1, 0.01, 0.0]] * 7, CostTable([(1, 1.0), (16, 1.05)]), draft)
    assert plan.lengths[0] >= 1 and plan.lengths[1:] == [0] * 7


def policies(**settings):
    given = {"max_tokens": 8, "threshold": 0.4, "foresee": lambda seq_id, k: [0.5] * k} | settings
    return build_policies(PolicyInputs(**given))


def test_adaptive_needs_costs_and_the_others_do_not():
    assert set(policies()) == set(POLICIES) - {"adaptive"}
    assert set(policies(cost=FLAT)) == set(policies(max_tokens=0)) == set(POLICIES)


def test_fixed_length():
    policy = policies(max_tokens=5)["fixed"]
    policy.update(0, num_verified=5, num_accepted=0)
    policy.forget(0)
    assert policy.limit(features(num_rows=9, step=3)) == Limit(max_tokens=5)
    assert policy.keep([0.1, 0.0]) == 2
    shadow = policies(max_tokens=5)["shadow"]
    assert shadow.limit(features()) == Limit(max_tokens=5) and shadow.keep([0.9]) == 0


@given(falling)
def test_confidence_keeps_what_is_above_the_threshold(survival):
    policy = policies()["confidence"]
    assert policy.limit(features()) == Limit(max_tokens=8, floor=0.4)
    assert policy.keep(survival) == sum(alive >= 0.4 for alive in survival)
    assert policies(threshold=0.0)["confidence"].keep(survival) == len(survival)


def test_heuristic_length_is_the_rule_of_transformers():
    policy = policies()["heuristic"]
    lengths = []
    for accepted in (1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0):
        length = policy.limit(features()).max_tokens
        lengths.append(length)
        policy.update(1, num_verified=length, num_accepted=length if accepted else 0)
    assert lengths == [5, 7, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1] and FIRST_HEURISTIC == 5
    policy.update(1, num_verified=0, num_accepted=0)
    assert policy.limit(features()).max_tokens == 1, "a step without drafts says nothing"
    policy.forget(1)
    assert policy.limit(features()).max_tokens == 5
    assert policies(max_tokens=3)["heuristic"].limit(features()).max_tokens == 3


def test_rows_that_rest_are_asked_again_once_there_are_fewer_and_no_row_pays_for_a_cliff():
    """Among 32 rows one more costs as much as ten, as the curve has a cliff there; a draft a row costs a third more."""
    cliff = CostTable([(1, 1.0), (32, 1.6), (33, 2.1), (64, 2.2)])

    def policy():
        return AdaptiveLength(
            max_tokens=4, target_cost=cliff, foresee=lambda seq_id, k: [0.5] * k, asking=lambda: 0.002
        )

    def serve(policy, rows, *, accepted):
        asked = 0
        policy.begin([Features(seq_id=0, num_rows=rows, step=1, room=4)])
        for _ in range(200):
            limit = policy.limit(Features(seq_id=0, num_rows=rows, step=1, room=4))
            if limit.max_tokens:
                asked += 1
                policy.update(0, num_verified=1, num_accepted=accepted)
        return asked

    good, poor = policy(), policy()
    assert serve(good, 32, accepted=1) == 200, "half a token more than its part of the price"
    assert serve(poor, 32, accepted=0) < 30
    before = poor.worth[0]
    poor.begin([Features(seq_id=0, num_rows=20, step=1, room=4)])
    assert poor.limit(Features(seq_id=0, num_rows=20, step=1, room=4)).max_tokens and poor.worth[0] > before
