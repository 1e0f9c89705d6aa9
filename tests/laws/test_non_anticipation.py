"""Non-anticipation: whether a draft is verified depends only on what was known before it was drawn.

The laws are computed exactly, with fractions, through the functions that serve: budget.choose plans, rejection.accept
decides. A search over all lengths must fail the same test that the early stop passes.
"""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
import torch

from dspark.plan.budget import choose
from dspark.types import Draft
from dspark.verify.rejection import accept

TARGET = (0.7, 0.3)
DRAFT = (0.5, 0.5)
STEPS_PER_SECOND = (1.0, 0.5, 0.45)


class Branching:
    """A Chance that follows one scripted path and remembers its probability and the branches left to try."""

    coupled = False

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken = script, 0
        self.probability = Fraction(1)
        self.widths: list[int] = []

    def _branch(self, weights: list[Fraction]) -> int:
        choice = self.script[self.taken] if self.taken < len(self.script) else 0
        self.taken += 1
        self.widths.append(len(weights))
        self.probability *= weights[choice]
        return choice

    def flip(self, numerator: float, denominator: float, *, position: int) -> bool:
        keep = min(
            Fraction(1), Fraction(numerator).limit_denominator(1000) / Fraction(denominator).limit_denominator(1000)
        )
        return self._branch([1 - keep, keep]) == 1

    def draw(self, weights_V: torch.Tensor, position: int) -> int:
        weights = [Fraction(float(w)).limit_denominator(1000) for w in weights_V]
        total = sum(weights)
        return self._branch([w / total for w in weights])


def every_verdict(p: torch.Tensor, draft: Draft):
    """(probability, verdict) of every way that accept can go."""
    scripts = [[]]
    while scripts:
        script = scripts.pop()
        chance = Branching(script)
        verdict = accept(p, draft, chance, position=0)
        yield chance.probability, verdict
        for index in range(len(script), len(chance.widths)):
            path = script + [0] * (index - len(script))
            scripts.extend(path + [branch] for branch in range(1, chance.widths[index]))


def second_survival(first: int) -> float:
    """A confidence that knows the first token when the second is about to be drawn: high after 0, none after 1."""
    return 0.8 if first == 0 else 0.0


def first_token_law(*, search_all: bool = False, capacity: int = 0) -> list[Fraction]:
    law = [Fraction(0), Fraction(0)]
    q = torch.tensor([DRAFT, DRAFT])
    for tokens in itertools.product((0, 1), repeat=2):
        drawn = Fraction(1, 4)
        survival = [0.8, second_survival(tokens[0])]  # sum of min(p, q) = 0.8 before anything is drawn
        cost = lambda rows: 1 / STEPS_PER_SECOND[rows - 1]  # noqa: E731
        (length,) = choose([survival], cost, 2, search_all=search_all, capacity=capacity)
        draft = Draft(tokens=list(tokens), q=q, survival=survival).prefix(length)
        p = torch.tensor([TARGET] * (length + 1))
        for probability, verdict in every_verdict(p, draft):
            law[verdict.tokens[0]] += drawn * probability
    return law


def test_early_stop_is_lossless():
    assert first_token_law(search_all=False) == [Fraction(7, 10), Fraction(3, 10)]


@pytest.mark.parametrize("capacity", (1, 2))
def test_a_capacity_from_earlier_steps_is_lossless(capacity):
    """The curve has its cliff at the first draft; the second is kept or not by what the first was drawn as."""
    assert first_token_law(capacity=capacity) == [Fraction(7, 10), Fraction(3, 10)]


def test_a_search_over_all_lengths_anticipates_and_is_caught():
    assert first_token_law(search_all=True) == [Fraction(85, 100), Fraction(15, 100)]


def test_dropping_an_improbable_draft_is_biased_and_stopping_after_it_is_not():
    """The relatives of the trap: the decision to verify x itself must not look at x, what follows it may."""
    drop, keep = [Fraction(0)] * 2, [Fraction(0)] * 2
    q = torch.tensor([[0.8, 0.2], [0.8, 0.2]])
    for tokens in itertools.product((0, 1), repeat=2):
        drawn = Fraction(1)
        for token in tokens:
            drawn *= Fraction(float(q[0, token])).limit_denominator(10)
        improbable = q[0, tokens[0]] < 0.5
        for law, length in ((drop, 0 if improbable else 2), (keep, 1 if improbable else 2)):
            draft = Draft(tokens=list(tokens), q=q, survival=[1.0, 1.0]).prefix(length)
            for probability, verdict in every_verdict(torch.tensor([TARGET] * (length + 1)), draft):
                law[verdict.tokens[0]] += drawn * probability
    assert keep == [Fraction(7, 10), Fraction(3, 10)]
    assert drop == [Fraction(84, 100), Fraction(16, 100)]


@pytest.mark.parametrize("search_all", (False, True))
def test_choose_does_not_change_when_a_later_survival_of_an_unchosen_token_changes(search_all):
    """With the early stop, tokens behind the stop cannot matter; the search is allowed to see them."""
    cost = lambda rows: (1.0, 2.0, 2.1, 2.2)[rows - 1]  # noqa: E731
    answers = {tuple(choose([[0.9, late, late]], cost, 3, search_all=search_all)) for late in (0.1, 0.5, 0.9)}
    assert (len(answers) == 1) is not search_all


@pytest.mark.parametrize("seed", range(40))
def test_what_is_kept_never_depends_on_a_later_survival(seed):
    """Whatever the curve, capacity and weights: change the survivals of a row from draft j on, and drafts before j are
    kept or not as they were."""
    rng = random.Random(seed)
    times = [1.0]
    for _ in range(20):
        times.append(times[-1] + rng.choice((0.0, 0.0, 0.1, 1.0)))
    survivals = [sorted((rng.random() for _ in range(4)), reverse=True) for _ in range(3)]
    plan = {"capacity": rng.randrange(13), "weights": [rng.uniform(0.5, 2) for _ in survivals]}
    before = choose(survivals, times.__getitem__, 99, **plan)
    for i, row in enumerate(survivals):
        for j in range(len(row)):
            head = row[:j]
            low = sorted((rng.uniform(0, head[-1] if head else 1) for _ in row[j:]), reverse=True)
            changed = [*survivals[:i], [*head, *low], *survivals[i + 1 :]]
            after = choose(changed, times.__getitem__, 99, **plan)
            assert min(after[i], j) == min(before[i], j)
