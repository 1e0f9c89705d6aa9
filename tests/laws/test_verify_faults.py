"""Planted faults: each is caught by the part of `dspark verify` that is meant to, and sound code passes them all.
Faults are planted here, by patching; nothing in the product can be switched to be wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark import LLM, SamplingParams
from dspark.config import SpeculationConfig
from dspark.engine import loop
from dspark.quality.control import make_generous
from dspark.quality.goodness import fit, samples_needed
from dspark.quality.joint import LogitTap
from dspark.quality.oracle import FAULT, IDENTICAL
from dspark.quality.pairs import ask_both, local_ends, local_judge
from dspark.quality.questions import Question
from dspark.quality.sampled import Plan, Prefix, Sampled, try_samples
from dspark.quality.sides import LocalSide
from dspark.sampling import RowSampler
from dspark.types import Draft
from dspark.verify.rejection import accept
from tests.tiny_folder import tiny_folder

PLAN = Plan(samples=600, depth=3, max_nodes=6)
TEXTS = ("the quick brown fox, the quick", "aaaa bbbb aaaa", "one two three, one two")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def near(tmp_path_factory, folder):
    """A draft model: the target's weights, moved a little, so that drafts are kept and refused."""
    import transformers

    path = tiny_folder(tmp_path_factory.mktemp("near"))
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def plain(folder):
    return LLM(folder, dtype="float32", seed=5, max_num_seqs=128, max_model_len=128)


def drafting(plain: Any, model: str, *, num: int = 3) -> Any:
    config = SpeculationConfig(method="model", model=model, policy="fixed", num_speculative_tokens=num)
    return plain.variant(speculation=config)


def stops(plain: Any) -> list[str]:
    """A letter that each plain answer writes somewhere behind its beginning."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    texts = [plain.generate(text, params)[0].outputs[0].text[6:] for text in TEXTS]
    found = [next((c for c in text if c.isascii() and c.isprintable()), None) for text in texts]
    assert any(found), texts
    return [letter for letter in found if letter]


def pairs_of(plain: Any, other: Any, **params: Any) -> list[Any]:
    if params.get("stop"):
        params["stop"] = stops(plain)
    asked = SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **params})
    questions = [Question(task="t", id=str(i), messages=(), params=asked, row={"text": t}) for i, t in enumerate(TEXTS)]

    def side(llm: Any, name: str) -> LocalSide:
        return LocalSide(llm, name=name, encode=lambda question: llm.tokenizer.encode(question.row["text"]))

    judge = local_judge(plain, bound=1e-3)
    return list(
        ask_both(side(plain, "plain"), side(other, "drafts"), questions, judge=judge, late=local_ends(plain), chunk=2)
    )


def faults_of(pairs: list[Any]) -> int:
    return sum(pair.finding.verdict == FAULT for pair in pairs)


def prefixes_of(plain: Any, **values: Any) -> list[Prefix]:
    params = SamplingParams(**{"temperature": 0.5, "max_tokens": PLAN.depth + 1, **values})
    encode = plain.tokenizer.encode
    return [Prefix(name=text, tokens=encode(text), manner="", params=params) for text in TEXTS[1:2]]


def sampled(plain: Any, model: str, *, control: bool = False, **values: Any) -> Sampled:
    spoilt = None
    if control:
        llm = drafting(plain, model)
        spoilt = llm, make_generous(llm, share=PLAN.share)
    tap = LogitTap(plain.variant(speculation=SpeculationConfig()))
    return try_samples(tap, drafting(plain, model), spoilt, prefixes_of(plain, **values), plan=PLAN)


# -- nothing is wrong


@pytest.mark.parametrize("values", [{}, {"top_k": 12, "presence_penalty": 0.6}])
def test_sound_samples_pass_and_the_control_fails(plain, near, values):
    found = sampled(plain, near, control=True, **values)
    assert found.verdict == "pass" and found.p_value > 0.01 and found.control_p_value < PLAN.alpha
    assert 0.1 < found.record.acceptance_rate < 0.95 and found.num_overruled > 0
    assert 0 < found.detectable < 0.2 and found.tested[0].fit.num_cells > 6


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"presence_penalty": 0.3, "frequency_penalty": 0.4, "min_tokens": 8},
        {"temperature": 0.8, "seed": 3},
        {"stop": "as they come", "min_tokens": 3},
        {"ignore_eos": False},
    ],
)
def test_sound_answers_pass(plain, near, params):
    pairs = pairs_of(plain, drafting(plain, near), **params)
    assert [pair.finding.verdict for pair in pairs] == [IDENTICAL] * len(TEXTS)
    assert not any(pair.late for pair in pairs)
    if params.get("stop"):
        assert any(pair.plain.finish_reason == "stop" for pair in pairs)
    assert any(0 < pair.other.record.num_accepted < pair.other.record.num_verified for pair in pairs)


def test_a_control_that_overrules_nothing_shows_nothing(plain, folder):
    """Drafts of the target itself are always kept: the report must not say "pass"."""
    found = sampled(plain, folder, control=True)
    assert found.p_value > 0.01 and found.num_overruled <= 2 and found.verdict == "inconclusive"


# -- what is planted


def test_a_q_that_is_not_the_sampling_law_is_found_by_samples(plain, near, monkeypatch):
    def flattened(p: Any, draft: Draft, *args: Any, **settings: Any) -> Any:
        if draft.q is not None:
            q = draft.q.clamp_min(1e-4).sqrt()
            draft = Draft(tokens=draft.tokens, q=q / q.sum(-1, keepdim=True), survival=draft.survival)
        return accept(p, draft, *args, **settings)

    monkeypatch.setattr(loop, "accept", flattened)
    assert sampled(plain, near).verdict == "fail"
    assert faults_of(pairs_of(plain, drafting(plain, near))) == 0  # greedy answers cannot show it


def test_stale_keys_after_a_rejection_are_found_by_greedy_answers(plain, near):
    """The place of the first refused draft keeps that draft's keys and values: a cache cut back one token too late."""
    other = drafting(plain, near)
    forward, cache = other.engine.runner.forward, other.engine.cache
    stale: dict[int, tuple[int, list[Any]]] = {}

    def slots(seq_id: int, place: int) -> tuple[int, int]:
        return cache.sequences[seq_id].tables[0].pages[place // cache.page_size], place % cache.page_size

    def spoilt(packed: Any, *args: Any, **settings: Any) -> Any:
        output = forward(packed, *args, **settings)
        for seq_id, (place, kept) in list(stale.items()):
            if seq_id in cache.sequences and place < other.engine.rows[seq_id].seq.num_cached + 1:
                page, slot = slots(seq_id, place)
                for store, value in zip([*cache.keys, *cache.values], kept):
                    store[page, slot] = value
            del stale[seq_id]
        return output

    emit = other.engine._emit

    def remember(row: Any, source: str, verdict: Any, logits: Any) -> None:
        if verdict.num_accepted < verdict.num_verified:
            place = len(row.seq.tokens) + verdict.num_accepted
            page, slot = slots(row.seq.id, place)
            stale[row.seq.id] = place, [store[page, slot].clone() for store in [*cache.keys, *cache.values]]
        emit(row, source, verdict, logits)

    other.engine.runner = Wrapped(other.engine.runner, spoilt)
    other.engine._emit = remember
    assert faults_of(pairs_of(plain, other)) > 0
    assert faults_of(pairs_of(plain, drafting(plain, near))) == 0


class Wrapped:
    """A runner whose forward is another."""

    def __init__(self, runner: Any, forward: Any) -> None:
        self._runner, self.forward = runner, forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def test_a_draft_cache_off_by_one_costs_acceptance_and_no_answer(plain, near, monkeypatch):
    """Of a wrong draft cache the answer does not depend; the report's acceptance shows it."""
    from dspark.draft.model import ModelDrafter

    sound = drafting(plain, near)
    pairs_of(plain, sound)
    roll_back = ModelDrafter._roll_back

    def late(self: Any, state: Any, seq_id: int, guess: Any) -> None:
        rejected = len(state.guesses)
        roll_back(self, state, seq_id, guess)
        if rejected and state.num_known < len(guess.view) - 1:
            state.num_known += 1

    monkeypatch.setattr(ModelDrafter, "_roll_back", late)
    other = drafting(plain, near)
    assert faults_of(pairs_of(plain, other)) == 0
    assert other.stats.record.acceptance_rate <= sound.stats.record.acceptance_rate


def test_a_stop_one_token_late_is_found_even_where_both_sides_have_it(plain, near, monkeypatch):
    end, waiting = loop.append_token, {}

    def late(seq: Any, token: int, **settings: Any) -> bool:
        if waiting.pop(seq.id, False):
            seq.tokens.append(token)
            seq.finish_reason = "stop"
            return True
        if end(seq, token, **settings):
            if seq.finish_reason != "stop":
                return True
            seq.finish_reason, waiting[seq.id] = None, True
        return False

    monkeypatch.setattr(loop, "append_token", late)
    pairs = pairs_of(plain, drafting(plain, near), stop="as they come")
    assert any("stop string" in word for pair in pairs for word in pair.late)
    assert {word.split(":")[0] for pair in pairs for word in pair.late} == {"plain", "drafts"}


def test_a_stop_that_is_late_within_a_block_is_found_by_greedy_answers(plain, near):
    other = drafting(plain, near)
    emit, end_token = other.engine._emit, other.tokenizer.encode("!")[0]

    def late(row: Any, source: str, verdict: Any, logits: Any) -> None:
        emit(row, source, verdict, logits)
        if row.seq.finish_reason == "stop" and verdict.num_accepted:
            row.seq.tokens.append(end_token)

    other.engine._emit = late
    other.engine.scheduler.emitted = lambda *args, **settings: None
    pairs = pairs_of(plain, other, stop="as they come")
    assert faults_of(pairs) > 0 and any(word.startswith("drafts") for pair in pairs for word in pair.late)


def test_stale_penalty_counts_are_found_by_penalised_answers(plain, near, monkeypatch):
    count = RowSampler._counts_in_block

    def stale(self: Any, drafts: Any, *, device: Any) -> Any:
        ids, counts, seen = count(self, drafts, device=device)
        return ids, counts[:1].repeat(len(drafts) + 1, 1), seen

    monkeypatch.setattr(RowSampler, "_counts_in_block", stale)
    other = drafting(plain, near)
    assert faults_of(pairs_of(plain, other, presence_penalty=0.3, frequency_penalty=0.9, max_tokens=60)) > 0
    assert faults_of(pairs_of(plain, other)) == 0  # answers without penalties cannot show it


def test_an_acceptance_that_is_much_too_generous_is_found_by_samples(plain, near, monkeypatch):
    def generous(p: Any, draft: Draft, noise: Any, **settings: Any) -> Any:
        return accept(p, draft, Lenient(noise, 0.4), **settings)

    monkeypatch.setattr(loop, "accept", generous)
    assert sampled(plain, near).verdict == "fail"


class Lenient:
    """Chances whose flips come out true more often."""

    def __init__(self, noise: Any, extra: float) -> None:
        self.noise, self.extra = noise, extra

    @property
    def coupled(self) -> bool:
        return self.noise.coupled

    def flip(self, numerator: float, denominator: float, *, position: int) -> bool:
        return self.noise.flip(numerator + self.extra * denominator, denominator, position=position)

    def draw(self, weights: Any, position: int) -> int:
        return self.noise.draw(weights, position)


# -- one per cent: a question of the sample's size


class Branch:
    """Follows one way through `accept` and multiplies its probability; `ways` are the decisions to take."""

    coupled = False

    def __init__(self, ways: list[int], factor: float) -> None:
        self.ways, self.factor, self.chance = list(ways), factor, 1.0
        self.options: list[int] = []

    def _take(self, chances: list[float]) -> int:
        self.options.append(len(chances))
        way = self.ways[len(self.options) - 1] if len(self.options) <= len(self.ways) else 0
        self.chance *= chances[way]
        return way

    def flip(self, numerator: float, denominator: float, *, position: int) -> bool:
        kept = min(1.0, self.factor * numerator / denominator)
        return self._take([kept, 1 - kept]) == 0

    def draw(self, weights: torch.Tensor, position: int) -> int:
        return self._take((weights.double() / weights.double().sum()).tolist())


def emitted_law(p: torch.Tensor, q: torch.Tensor, factor: float) -> dict[int, float]:
    """The exact law of the first token that `accept` emits, every branch followed."""
    law = dict.fromkeys(range(len(p)), 0.0)
    for drafted, chance in enumerate(q.tolist()):
        todo: list[list[int]] = [[]]
        while todo:
            ways = todo.pop()
            branch = Branch(ways, factor)
            verdict = accept(torch.stack([p, p]), Draft(tokens=[drafted], q=q[None]), branch, position=0)
            law[verdict.tokens[0]] += chance * branch.chance
            taken = ways + [0] * (len(branch.options) - len(ways))
            for i in range(len(ways), len(taken)):
                todo += [[*taken[:i], way] for way in range(1, branch.options[i])]
    return law


P = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
Q = torch.tensor([0.15, 0.25, 0.3, 0.2, 0.1])


def test_the_enumeration_is_right():
    law = emitted_law(P, Q, 1.0)
    assert sum(law.values()) == pytest.approx(1) and list(law.values()) == pytest.approx(P.tolist(), abs=1e-6)


def test_accepting_one_per_cent_too_much_is_found_at_the_stated_sample_and_not_before():
    """Of this target and draft about 2e5 samples show it: 80% power at alpha 0.001. At a hundredth of them nothing is
    seen, and the power statement says so."""
    target = dict(enumerate(P.tolist()))
    generous = emitted_law(P, Q, 1.01)
    distance = sum(abs(generous[token] - target[token]) for token in target) / 2
    assert 0.001 < distance < 0.01
    n = samples_needed(target, generous, alpha=1e-3)
    assert 20_000 < n < 2_000_000

    def draw(law: dict[int, float], size: int, seed: int) -> dict[int, int]:
        import numpy as np

        weights = np.array(list(law.values())) / sum(law.values())
        return dict(enumerate(np.random.default_rng(seed).multinomial(size, weights).tolist()))

    runs = range(60)
    assert sum(fit(draw(generous, n, seed), target).p_value < 1e-3 for seed in runs) / 60 > 0.65
    assert sum(fit(draw(generous, n // 100, seed), target).p_value < 1e-3 for seed in runs) / 60 < 0.1
    assert sum(fit(draw(emitted_law(P, Q, 1.0), n, seed), target).p_value < 1e-3 for seed in runs) / 60 < 0.05
    assert fit(draw(target, n // 100, 0), target).detectable(1e-3) > distance
    small = fit(draw(target, 200 * n, 0), target).detectable(1e-3)
    assert small < distance
