"""Portfolio: the head drafts where it is expected to bring more than it costs and than a lookup brings."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dspark.draft.base import DraftRow
from dspark.draft.portfolio import PROBE_EVERY, PROBE_SHARE, Portfolio
from dspark.params import SamplingParams
from dspark.plan.history import History
from dspark.types import Draft, Verdict


class Fixed:
    """A drafter that says the same tokens with the same survival, and counts what it is told."""

    taps = (3,)
    num_places = 5

    def __init__(self, name, survival, *, first=7):
        self.name, self.survival, self.first, self.q = name, survival, first, None
        self.asked, self.observed, self.forgotten = [], [], []

    def propose(self, rows, limits, *, floors=None):
        self.asked.append([row.seq_id for row in rows])
        claims = [list(self.survival[:n]) for n in limits]
        return [
            Draft(tokens=[self.first + j for j in range(len(row))], q=self.q, survival=row, source=self.name)
            for row in claims
        ]

    def observe(self, rows, verdicts, taps=None):
        self.observed.append((len(rows), taps))

    def forget(self, seq_id):
        self.forgotten.append(seq_id)


def row(seq_id):
    return DraftRow(seq_id=seq_id, tokens=[1, 2, 3], num_prompt=1, num_cached=2, params=SamplingParams())


def verdict(accepted, verified=3):
    return Verdict(num_verified=verified, num_accepted=accepted, tokens=[7] * accepted + [1])


class Prices:
    """A target pass is 1 and `row` more for each row after the first, a draft pass of the head `price`."""

    def __init__(self, *, head, row=0.0):
        self.price, self.row, self.others = head, row, 0

    def target(self, rows):
        return 1 + self.row * (rows - 1)

    def head(self, greedy, sampled):
        assert greedy + sampled > 0
        return self.price


def make(*, head=(0.9, 0.8, 0.7), lookup=(), price=0.2, row=0.0, first=70, **settings):
    parts = Fixed("dspark", head), Fixed("suffix", lookup, first=first)
    prices, history = Prices(head=price, row=row), History()
    settings = {"lookup": parts[1], "costs": prices, "expected": history.expected} | settings
    portfolio = Portfolio(parts[0], **settings)
    portfolio.history = history
    return portfolio, *parts


def step(portfolio, rows, limits, verdicts):
    """As the loop does: what a block brought is counted."""
    drafts = portfolio.propose(rows, limits)
    portfolio.observe(rows, verdicts)
    for r, draft, end in zip(rows, drafts, verdicts):
        counts = {"num_verified": end.num_verified, "num_accepted": end.num_accepted}
        block = portfolio.kinds.get(draft.source)
        portfolio.history.learn(r.seq_id, draft.source, draft.survival[: end.num_verified], block=block, **counts)


def run(portfolio, num_steps, *accepted, verified=3):
    for i in range(num_steps):
        step(portfolio, [row(1)], [4], [verdict(accepted[i % len(accepted)], verified)])


def test_each_row_gets_what_promises_more():
    portfolio, head, lookup = make(lookup=(0.3,))
    for seq_id, task in ((1, "good"), (2, "bad")):
        portfolio.history.begin(seq_id, task=task)
    for _ in range(20):
        step(portfolio, [row(1), row(2)], [4, 4], [verdict(3), verdict(0)])
    sources = [draft.source for draft in portfolio.propose([row(1), row(2)], [4, 4])]
    assert sources == ["dspark>suffix", "suffix"]
    assert portfolio.expected(1, "beside")[0] > 2 > 0.7 > portfolio.expected(2, "beside")[0]
    lookup.survival = (0.99,) * 4
    assert [d.source for d in portfolio.propose([row(1), row(2)], [4, 4])] == ["suffix", "suffix"]


@pytest.mark.parametrize("price, drafts", ((0.1, True), (5.0, False)))
def test_a_head_that_costs_more_than_it_brings_rests(price, drafts):
    portfolio, head, _ = make(price=price)
    run(portfolio, 8, 1)
    assert bool(head.asked) == drafts


@pytest.mark.parametrize("others, drafts", ((0, True), (30, False)))
def test_rows_that_are_not_asked_for_drafts_wait_for_the_head_too(others, drafts):
    """A draft pass of 0.6 brings two tokens: worth it beside one that a second brings, not beside thirty-one."""
    portfolio, head, _ = make(price=0.6)
    portfolio.costs.others = others
    run(portfolio, 8, 2)
    assert bool(head.asked) == drafts


@pytest.mark.parametrize("row_price, verified, drafts", ((0.01, 3, True), (0.15, 3, False), (0.15, 1, True)))
def test_rows_that_the_target_must_verify_are_part_of_the_price(row_price, verified, drafts):
    """1.5 tokens a step for a draft pass of 0.2 and `verified` rows more: for 1.23, 1.65 and 1.35 passes."""
    portfolio, head, _ = make(row=row_price)
    run(portfolio, 30, 1, 0, verified=verified)
    assert (len(head.asked) == 30) == drafts
    assert drafts or len(head.asked) < 10


def test_a_lookup_counts_with_the_survival_that_its_drafts_turned_out_to_have():
    believed, *_ = make(lookup=(0.9, 0.9))
    assert believed.propose([row(1)], [4])[0].source == "suffix"
    doubted, *_ = make(lookup=(0.9, 0.9), survival=lambda seq_id, source, claims: [0.1 * c for c in claims])
    assert doubted.propose([row(1)], [4])[0].source == "dspark", "a lookup so doubted is as good as none"


def test_only_the_prefix_of_a_lookup_that_pays_is_held_against_the_head():
    portfolio, *_ = make(lookup=(0.9,) + (0.0,) * 7, row=0.1)
    assert portfolio.propose([row(1)], [8])[0].source == "suffix"


@pytest.mark.parametrize("price", (0.5, 5.0))
def test_a_resting_head_is_asked_again_for_a_small_share_of_the_time(price):
    portfolio, head, _ = make(price=price)
    run(portfolio, 400, 0)  # until nothing is expected of it any more
    before = len(head.asked)
    run(portfolio, 10_000, 0)
    assert len(head.asked) - before == pytest.approx(10_000 * PROBE_SHARE / price, rel=0.2)
    portfolio.costs.price = 0.0  # now it pays, and is asked at every step
    run(portfolio, 10, 3)
    before = len(head.asked)
    run(portfolio, 10, 3)
    assert len(head.asked) == before + 10


def test_a_head_that_costs_little_rests_for_some_steps_at_least():
    portfolio, head, _ = make(price=0.01)
    run(portfolio, 400, 0)
    before = len(head.asked)
    run(portfolio, 10 * PROBE_EVERY, 0)
    assert len(head.asked) == before + 10


def test_rows_without_a_limit_are_not_drafted_for():
    portfolio, head, _ = make()
    assert portfolio.propose([row(1)], [0])[0].tokens == [] and not head.asked


def test_a_row_that_is_not_thrifty_gets_a_draft_whatever_it_costs():
    portfolio, head, _ = make(price=5.0)
    run(portfolio, 8, 0)
    assert not head.asked
    assert portfolio.propose([replace(row(1), thrifty=False)], [4])[0].source == "dspark"


def test_every_part_is_told_and_forgets():
    portfolio, head, lookup = make()
    assert (portfolio.taps, portfolio.num_places, portfolio.name) == ((3,), 5, "auto")
    portfolio.propose([row(1)], [3])
    taps = SimpleNamespace(packed=SimpleNamespace(num_tokens=4))
    portfolio.observe([row(1)], [verdict(1)], taps)
    assert head.observed == [(1, taps)] and lookup.observed == [(1, None)]
    portfolio.forget(1)
    assert head.forgotten == lookup.forgotten == [1] and not portfolio.idle
    alone = Portfolio(head, costs=None)
    assert alone.name == "dspark"
    assert alone.propose([row(1)], [2])[0].source == "dspark"


MATCH = (0.3, 0.28, 0.26)


def confirmed(head=(0.6, 0.3), lookup=MATCH, *, first=7, q=None, **settings):
    """The draft of a row whose lookup promises too little to do without the head."""
    portfolio, drafter, _ = make(head=head, lookup=lookup, first=first, price=0.0, **settings)
    drafter.q = q
    [draft] = portfolio.propose([row(1)], [8])
    assert drafter.asked
    return draft


def test_a_match_that_the_head_confirms_takes_its_place():
    draft = confirmed()
    assert (draft.source, draft.tokens, draft.q) == ("suffix+dspark", [7, 8, 9], None)
    first = 1 - 0.4 * 0.7
    second = first * (1 - (1 - 0.3 / 0.6) * (1 - 0.28 / 0.3))
    assert draft.survival == pytest.approx([first, second, second * 0.26 / 0.28])


@pytest.mark.parametrize(
    "case",
    (
        dict(first=8),  # they begin otherwise
        dict(head=(0.9, 0.8, 0.7), lookup=(0.1,)),  # the head's own block promises more
        dict(q="a law"),  # drawn: the choice would look at what was drawn
        dict(survival=lambda seq_id, source, claims: [0.1 * c if "+" in source else c for c in claims]),
    ),
)
def test_a_match_that_is_not_confirmed_does_not(case):
    draft = confirmed(**case)
    assert draft.source == ("dspark" if case.get("lookup") == (0.1,) else "dspark>suffix")
    assert draft.q == case.get("q")
    assert len(draft.tokens) == len(case.get("head", (0.6, 0.3)))
