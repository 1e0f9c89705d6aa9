"""Portfolio: the head drafts where it is expected to bring more than it costs and than a lookup brings."""

from __future__ import annotations

import pytest

from dspark.draft.base import DraftRow
from dspark.draft.portfolio import PROBE_EVERY, Portfolio
from dspark.params import SamplingParams
from dspark.types import Draft, Verdict


class Fixed:
    """A drafter that says the same tokens with the same survival, and counts what it is told."""

    taps = (3,)
    num_places = 5

    def __init__(self, name, survival):
        self.name, self.survival = name, survival
        self.asked, self.observed, self.forgotten = [], [], []

    def propose(self, rows, limits, *, floors=None, masks=None):
        self.asked.append([row.seq_id for row in rows])
        return [
            Draft(tokens=[7] * min(n, len(self.survival)), survival=list(self.survival[:n]), source=self.name)
            for n in limits
        ]

    def observe(self, rows, verdicts, taps=None):
        self.observed.append((len(rows), taps))

    def forget(self, seq_id):
        self.forgotten.append(seq_id)


def row(seq_id):
    return DraftRow(seq_id=seq_id, tokens=[1, 2, 3], num_prompt=1, num_cached=2, params=SamplingParams())


def verdict(accepted):
    return Verdict(num_accepted=accepted, tokens=[7] * accepted + [1])


def make(*, head=(0.9, 0.8, 0.7), lookup=(), price=0.2):
    parts = Fixed("dspark", head), Fixed("suffix", lookup)
    return Portfolio(parts[0], lookup=parts[1], price=lambda greedy, sampled: price), *parts


def test_each_row_gets_what_promises_more():
    portfolio, head, lookup = make(lookup=(0.3,))
    for _ in range(20):
        portfolio.propose([row(1), row(2)], [4, 4])
        portfolio.observe([row(1), row(2)], [verdict(3), verdict(0)])
    sources = [draft.source for draft in portfolio.propose([row(1), row(2)], [4, 4])]
    assert sources == ["dspark", "suffix"]
    assert portfolio.expected(1) > 2 > 0.7 > portfolio.expected(2)
    lookup.survival = (0.99,) * 4
    assert [d.source for d in portfolio.propose([row(1), row(2)], [4, 4])] == ["suffix", "suffix"]


@pytest.mark.parametrize("price, drafts", ((0.1, True), (5.0, False)))
def test_a_head_that_costs_more_than_it_brings_rests(price, drafts):
    portfolio, head, _ = make(price=price)
    for _ in range(8):
        portfolio.propose([row(1)], [4])
        portfolio.observe([row(1)], [verdict(1)])
    assert bool(head.asked) == drafts


def test_a_resting_head_is_asked_again_now_and_then():
    portfolio, head, _ = make(price=5.0)
    for _ in range(2 * PROBE_EVERY):
        portfolio.propose([row(1)], [4])
        portfolio.observe([row(1)], [verdict(0)])
    assert len(head.asked) == 2


def test_rows_without_a_limit_or_a_verdict_change_nothing():
    portfolio, head, _ = make()
    assert portfolio.propose([row(1)], [0])[0].tokens == [] and not head.asked
    before = portfolio.expected(1)
    portfolio.propose([row(1)], [3])
    portfolio.observe([row(1)], [None])
    assert portfolio.expected(1) == before


def test_every_part_is_told_and_forgets():
    portfolio, head, lookup = make()
    assert (portfolio.taps, portfolio.num_places, portfolio.name) == ((3,), 5, "auto")
    portfolio.propose([row(1)], [3])
    portfolio.observe([row(1)], [verdict(1)], "taps")
    assert head.observed == [(1, "taps")] and lookup.observed == [(1, None)]
    portfolio.forget(1)
    assert head.forgotten == lookup.forgotten == [1] and not portfolio.rows
    alone = Portfolio(head, price=lambda greedy, sampled: 0.1)
    assert alone.name == "dspark"
    assert alone.propose([row(1)], [2])[0].source == "dspark"
