"""The emitted text has exactly the target's law: every branch of the verifier followed, in whole fractions.
The function under test is the one that serves; only the source of its decisions is replaced."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import pytest
import torch

from dspark.plan import history as plan_history
from dspark.plan.budget import choose
from dspark.plan.cost import CostTable
from dspark.plan.length import Features, PolicyInputs, build_policies
from dspark.types import Draft, Verdict
from dspark.verify.rejection import accept, accept_greedy

Tokens = tuple[int, ...]
Law = Callable[[Tokens], list[int]]
"""Context -> weights in sixteenths: exact in floating point, so that Fraction(float) loses nothing."""
UNIT = 16


class Branches:
    """A source of decisions that follows a script and then always takes the first possible branch; it remembers the
    branches not taken and the exact probability of the path."""

    def __init__(self, script: Sequence[int] = (), *, coupled: bool = False) -> None:
        self.script, self.coupled = list(script), coupled
        self.path: list[int] = []
        self.untaken: list[list[int]] = []
        self.probability = Fraction(1)

    def choose(self, weights: Sequence[Fraction]) -> int:
        total = sum(weights)
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        depth = len(self.path)
        if depth < len(self.script):
            taken = self.script[depth]
        else:
            taken = possible[0]
            self.untaken += [[*self.path, other] for other in possible[1:]]
        self.path.append(taken)
        self.probability *= Fraction(weights[taken]) / total
        return taken

    def flip(self, numerator: float, denominator: float, *, position: int) -> bool:
        chance = min(Fraction(1), Fraction(numerator) / Fraction(denominator))
        return self.choose([1 - chance, chance]) == 1

    def draw(self, weights_V: torch.Tensor, position: int) -> int:
        return self.choose([Fraction(weight) for weight in weights_V.tolist()])


def every_run(run: Callable[[Branches], Tokens], *, coupled: bool = False) -> dict[Tokens, Fraction]:
    """The exact law of what `run` returns."""
    law: dict[Tokens, Fraction] = defaultdict(Fraction)
    scripts: list[list[int]] = [[]]
    while scripts:
        chance = Branches(scripts.pop(), coupled=coupled)
        law[run(chance)] += chance.probability
        scripts += chance.untaken
    assert sum(law.values()) == 1
    return law


def random_law(seed: object, *, vocab: int) -> Law:
    """Weights that depend on the whole context, zeros among them."""

    def weights(context: Tokens) -> list[int]:
        rng = random.Random(f"{seed}|{context}")
        cuts = sorted(rng.randint(0, UNIT) for _ in range(vocab - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, UNIT], strict=True)]

    return weights


def tensor(law: Law, contexts: Sequence[Tokens]) -> torch.Tensor:
    return torch.tensor([law(context) for context in contexts], dtype=torch.float32) / UNIT


def text_law(target: Law, *, vocab: int, length: int) -> dict[Tokens, Fraction]:
    """The law of `length` tokens of plain decoding."""
    law = {}
    for text in itertools.product(range(vocab), repeat=length):
        chance = Fraction(1)
        for i, token in enumerate(text):
            chance *= Fraction(target(text[:i])[token], UNIT)
        if chance:
            law[text] = chance
    return law


def completed(law: dict[Tokens, Fraction], target: Law, *, length: int) -> dict[Tokens, Fraction]:
    """Emitted prefixes continued by plain decoding up to `length`: equality then is prefix-wise equality."""
    result: dict[Tokens, Fraction] = defaultdict(Fraction)
    open_texts = dict(law)
    while open_texts:
        text, chance = open_texts.popitem()
        if len(text) >= length:
            result[text[:length]] += chance
            continue
        for token, weight in enumerate(target(text)):
            if weight:
                longer = (*text, token)
                open_texts[longer] = open_texts.get(longer, Fraction(0)) + chance * Fraction(weight, UNIT)
    return dict(result)


def sampled_draft(draft_law: Law, context: Tokens, size: int, chance: Branches) -> Draft:
    tokens: list[int] = []
    rows = []
    for i in range(size):
        row = tensor(draft_law, [(*context, *tokens)])[0]
        rows.append(row)
        tokens.append(chance.draw(row, len(context) + i))
    return Draft(tokens=tokens, q=torch.stack(rows) if rows else None)


def verdict(target: Law, context: Tokens, draft: Draft, chance: Branches) -> Verdict:
    contexts = [(*context, *draft.tokens[:i]) for i in range(len(draft.tokens) + 1)]
    return accept(tensor(target, contexts), draft, chance, position=len(context))


def constant(weights: list[int]) -> Law:
    return lambda _: weights


def emitted(target: Law, draft: Draft) -> Callable[[Branches], Tokens]:
    """A run of one verdict on a given draft."""
    return lambda chance: tuple(verdict(target, (), draft, chance).tokens)


def all_weights(vocab: int, unit: int) -> Iterator[list[int]]:
    """Every way to share `unit` parts among the vocabulary, scaled to sixteenths."""
    for parts in itertools.product(range(unit + 1), repeat=vocab):
        if sum(parts) == unit:
            yield [part * UNIT // unit for part in parts]


@pytest.mark.parametrize(("vocab", "unit"), [(2, 16), (3, 4), (4, 2)])
def test_every_pair_of_laws_on_a_grid(vocab: int, unit: int) -> None:
    for p, q in itertools.product(all_weights(vocab, unit), repeat=2):

        def run(chance: Branches, p: list[int] = p, q: list[int] = q) -> Tokens:
            draft = sampled_draft(lambda _: q, (), 1, chance)
            return tuple(verdict(lambda _: p, (), draft, chance).tokens[:1])

        expected = {(token,): Fraction(weight, UNIT) for token, weight in enumerate(p) if weight}
        assert every_run(run) == expected, (p, q)


@pytest.mark.parametrize(
    ("vocab", "size", "seed"),
    [(v, k, seed) for v in (2, 3, 4) for k in range(4) for seed in range(4 if v**k < 30 else 1)],
)
def test_sampled_drafts_whose_laws_depend_on_the_context(vocab: int, size: int, seed: int) -> None:
    target, draft_law = random_law(("p", seed), vocab=vocab), random_law(("q", seed), vocab=vocab)
    law = every_run(
        lambda chance: tuple(verdict(target, (), sampled_draft(draft_law, (), size, chance), chance).tokens)
    )
    assert completed(law, target, length=size + 1) == text_law(target, vocab=vocab, length=size + 1)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_every_deterministic_draft(seed: int, coupled: bool) -> None:
    target = random_law(seed, vocab=3)
    expected = text_law(target, vocab=3, length=4)
    for size in range(4):
        for tokens in itertools.product(range(3), repeat=size):
            draft = Draft(tokens=list(tokens))
            law = every_run(emitted(target, draft), coupled=coupled)
            assert completed(law, target, length=4) == expected, tokens


def test_deterministic_drafts_are_accepted_as_often_as_with_a_one_hot_law() -> None:
    for p in all_weights(3, 8):
        for token in range(3):
            one_hot = torch.eye(3)[token : token + 1]
            rates = []
            for q in (None, one_hot):
                draft = Draft(tokens=[token], q=q)
                law = every_run(emitted(constant(p), draft))
                rates.append(sum(chance for text, chance in law.items() if len(text) == 2))
            assert rates == [Fraction(p[token], UNIT)] * 2


def test_acceptance_is_the_overlap_of_the_laws() -> None:
    for p, q in itertools.product(all_weights(3, 4), repeat=2):

        def run(chance: Branches, p: list[int] = p, q: list[int] = q) -> Tokens:
            return (verdict(lambda _: p, (), sampled_draft(lambda _: q, (), 1, chance), chance).num_accepted,)

        assert every_run(run).get((1,), 0) == sum(Fraction(min(a, b), UNIT) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("columns", [-1, 2])
def test_scale_and_padding_of_the_laws_do_not_matter(columns: int) -> None:
    target, draft_law = random_law("p", vocab=3), random_law("q", vocab=2)

    def run(chance: Branches) -> Tokens:
        draft = sampled_draft(draft_law, (), 2, chance)  # two columns wide, one less than the target
        if columns > 0:
            draft.q = torch.cat([draft.q, torch.zeros(2, columns)], dim=1)
        draft.q = draft.q * 4
        p = tensor(target, [tuple(draft.tokens[:i]) for i in range(3)]) * torch.tensor([[2.0], [0.5], [8.0]])
        return tuple(accept(p, draft, chance, position=0).tokens)

    assert completed(every_run(run), target, length=3) == text_law(target, vocab=3, length=3)


class History:
    """What a length policy may know between rounds: verdicts so far, and the last draft, discarded tokens included."""

    def __init__(self) -> None:
        self.num_accepted: list[int] = []
        self.last_draft: list[int] = []
        self.next_seen: int | None = None
        """The token that the last draft held for the position that the next round starts at."""

    def update(self, draft: Draft, verdict_: Verdict) -> None:
        self.num_accepted.append(verdict_.num_accepted)
        self.last_draft = draft.tokens
        place = verdict_.num_accepted + 1
        self.next_seen = draft.tokens[place] if place < len(draft.tokens) else None


Policy = Callable[[Tokens, History], int]
POLICIES: dict[str, Policy] = {
    "always two": lambda text, history: 2,
    "grows with success": lambda text, history: min(3, 1 + (history.num_accepted[-1] if history.num_accepted else 0)),
    "of the text": lambda text, history: sum(text) % 3,
    "of the last draft": lambda text, history: 2 if sum(history.last_draft) % 2 == 0 else 1,
    "of the discarded token": lambda text, history: {None: 2, 0: 1}.get(history.next_seen, 0),
}


def rounds(target: Law, draft_law: Law, policy: Policy, chance: Branches, *, length: int) -> Tokens:
    """Speculative decoding over several rounds; the policy fixes each size before anything is drawn."""
    text: Tokens = ()
    history = History()
    while len(text) < length:
        draft = sampled_draft(draft_law, text, policy(text, history), chance)
        decision = verdict(target, text, draft, chance)
        history.update(draft, decision)
        text = (*text, *decision.tokens)
    return text[:length]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("vocab", "length"), [(2, 4), (3, 3)])
def test_rounds_under_a_policy_with_a_memory(vocab: int, length: int, policy: str) -> None:
    target, draft_law = random_law(("p", policy), vocab=vocab), random_law(("q", policy), vocab=vocab)
    law = every_run(lambda chance: rounds(target, draft_law, POLICIES[policy], chance, length=length))
    assert law == text_law(target, vocab=vocab, length=length)


Claim = Callable[[torch.Tensor, int], float]
"""(the draft's law at a position, the token drawn from it) -> conditional confidence."""


def largest(law: torch.Tensor, token: int) -> float:
    """What dspark's drafters claim: known before the token is drawn."""
    return float(law.max())


def of_the_token(law: torch.Tensor, token: int) -> float:
    """The anticipating variant: known only after."""
    return float(law[token])


def planned_rounds(
    target: Law, draft_law: Law, policy_name: str, chance: Branches, *, length: int, claim: Claim = largest
) -> Tokens:
    """Several rounds under a policy of dspark's, with its memory: limit, draft, judge, keep, verify, learn."""
    history = plan_history.History()
    history.begin(0)
    cost = CostTable([(1, 1.0), (2, 1.5), (3, 1.9)])
    foresee = lambda seq_id, k: history.acceptance.foresee(seq_id, "x", k)  # noqa: E731
    inputs = PolicyInputs(max_tokens=2, threshold=0.6, foresee=foresee, cost=cost, draft_cost=CostTable([(1, 0.05)]))
    policy = build_policies(inputs)[policy_name]
    text: Tokens = ()
    while len(text) < length:
        features = Features(seq_id=0, num_rows=1, step=0, room=2)
        policy.begin([features])
        limit = policy.limit(features).max_tokens
        draft = sampled_draft(draft_law, text, limit, chance)
        draft.survival = list(
            itertools.accumulate((claim(draft.q[j], token) for j, token in enumerate(draft.tokens)), lambda a, b: a * b)
        )
        survival = history.acceptance.survival(0, "x", draft.survival)
        keep = policy.keep(survival)
        draft = draft.prefix(choose([survival], cost.seconds, 8)[0] if keep is None else keep)
        decision = verdict(target, text, draft, chance)
        counts = {"num_verified": len(draft.tokens), "num_accepted": decision.num_accepted}
        policy.update(0, **counts)
        history.acceptance.update(0, "x", draft.survival, **counts)
        text = (*text, *decision.tokens)
    return text[:length]


@pytest.mark.parametrize("policy", ("fixed", "confidence", "heuristic", "adaptive"))
@pytest.mark.parametrize("seed", range(3))
def test_every_policy_is_lossless_with_sampled_drafts(policy: str, seed: int) -> None:
    target, draft_law = random_law(("p", seed), vocab=2), random_law(("q", seed), vocab=2)
    law = every_run(lambda chance: planned_rounds(target, draft_law, policy, chance, length=4))
    assert law == text_law(target, vocab=2, length=4)


@pytest.mark.parametrize("policy", ("confidence", "adaptive"))
def test_claims_that_have_seen_their_token_are_caught_by_the_same_test(policy: str) -> None:
    target, draft_law = constant([11, 5]), constant([12, 4])
    run = lambda chance: planned_rounds(target, draft_law, policy, chance, length=3, claim=of_the_token)  # noqa: E731
    assert every_run(run) != text_law(target, vocab=2, length=3)
    honest = every_run(lambda chance: planned_rounds(target, draft_law, policy, chance, length=3))
    assert honest == text_law(target, vocab=2, length=3)


def skewed(_: Tokens) -> list[int]:
    return [11, 5]


def even(_: Tokens) -> list[int]:
    return [8, 8]


def test_dropping_a_draft_for_its_own_value_is_biased_and_keeping_it_is_not() -> None:
    def dropping(chance: Branches) -> Tokens:
        draft = sampled_draft(even, (), 1, chance)
        return tuple(verdict(skewed, (), draft.prefix(1 if draft.tokens[0] == 0 else 0), chance).tokens[:1])

    def stopping_after(chance: Branches) -> Tokens:
        draft = sampled_draft(even, (), 2, chance)
        return tuple(verdict(skewed, (), draft.prefix(2 if draft.tokens[0] == 0 else 1), chance).tokens[:1])

    assert every_run(dropping)[(0,)] == Fraction(1, 2) + Fraction(1, 2) * Fraction(11, 16)
    assert every_run(stopping_after)[(0,)] == Fraction(11, 16)


class SharedNoise(Branches):
    """The fault that RowSampler.draw_draft avoids: what is drafted at a position is drawn once and for all."""

    def __init__(self, inner: Branches) -> None:
        super().__init__()
        self.inner = inner
        self.drafted: dict[int, int] = {}

    def draw(self, weights_V: torch.Tensor, position: int) -> int:
        if position not in self.drafted:
            self.drafted[position] = self.inner.draw(weights_V, position)
        return self.drafted[position]


@pytest.mark.parametrize("fresh", [True, False])
def test_noise_reused_for_a_discarded_position_is_an_anticipation(fresh: bool) -> None:
    def run(chance: Branches) -> Tokens:
        text: Tokens = ()
        history, drafter = History(), chance if fresh else SharedNoise(chance)
        while len(text) < 2:
            size = POLICIES["of the discarded token"](text, history)
            draft = sampled_draft(even, text, size, drafter)
            decision = verdict(skewed, text, draft, chance)
            history.update(draft, decision)
            text = (*text, *decision.tokens)
        return text[:2]

    exact = every_run(run) == text_law(skewed, vocab=2, length=2)
    assert exact is fresh


def test_greedy_keeps_the_common_prefix() -> None:
    for size in range(4):
        for argmax in itertools.product(range(3), repeat=size + 1):
            for tokens in itertools.product(range(3), repeat=size):
                num_common = max(n for n in range(size + 1) if argmax[:n] == tokens[:n])
                result = accept_greedy(list(argmax), Draft(tokens=list(tokens)))
                kept = list(argmax[: num_common + 1])
                assert result == Verdict(num_verified=size, num_accepted=num_common, tokens=kept)


def one_hot_at(argmax: Tokens) -> Law:
    return lambda context: [UNIT * (token == argmax[len(context)]) for token in range(3)]


def test_one_hot_laws_are_greedy_decoding() -> None:
    for argmax in itertools.product(range(3), repeat=3):
        for tokens in itertools.product(range(3), repeat=2):
            for q in (None, torch.full((2, 3), 1 / 4)):
                draft = Draft(tokens=list(tokens), q=q)
                law = every_run(emitted(one_hot_at(argmax), draft))
                greedy = accept_greedy(list(argmax), Draft(tokens=list(tokens)))
                if q is None:
                    assert law == {tuple(greedy.tokens): 1}
                else:  # a law that is not the draft's own can only shorten what is kept, never change the text
                    assert all(text == tuple(argmax[: len(text)]) for text in law)


def test_a_token_without_mass_in_its_own_law_is_our_own_mistake() -> None:
    draft = Draft(tokens=[1], q=torch.tensor([[1.0, 0.0]]))
    with pytest.raises(AssertionError, match="no mass in the law"):
        accept(torch.full((2, 2), 0.5), draft, Branches(), position=0)
