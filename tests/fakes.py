"""Scripted drafters, a tokenizer of single letters, and a driver: what the engine's tests are made of.
They must never hold a law themselves: expectations come from plain decoding or from transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dspark.draft.base import Drafter, DraftRow, NoDrafter
from dspark.draft.block import added_layers
from dspark.engine.ends import StopWatcher
from dspark.engine.heads import build_head_drafter
from dspark.engine.loop import Engine, Speculator
from dspark.engine.scheduler import Scheduler
from dspark.model.cache import KVCache
from dspark.params import SamplingParams
from dspark.plan.admit import Admission
from dspark.plan.cost import CostTable, PacedTable, StepCost
from dspark.plan.history import History
from dspark.plan.length import FixedLength, PolicyInputs, build_policies
from dspark.sampling import Processors, RowSampler
from dspark.types import Draft, Request
from dspark.types import Sequence as Seq

Guesser = Callable[[DraftRow, int], list[int]]


class ScriptedDrafter:
    """Drafts what a function says."""

    name = "scripted"
    taps: Sequence[int] = ()
    num_places = 0

    def __init__(self, guess: Guesser, *, survival: float = 1.0) -> None:
        self.guess = guess
        self.survival = survival
        self.forgotten: list[int] = []
        self.observed = 0

    def propose(self, rows: Sequence[DraftRow], limits: Sequence[int], *, floors: Any = None) -> list[Draft]:
        drafts = []
        for row, limit in zip(rows, limits, strict=True):
            tokens = self.guess(row, limit)[:limit]
            survival = [self.survival ** (j + 1) for j in range(len(tokens))]
            drafts.append(Draft(tokens=tokens, survival=survival, source=self.name))
        return drafts

    def observe(self, rows: Sequence[DraftRow], verdicts: Sequence[Any], taps: Any = None) -> None:
        self.observed += len(rows)

    def forget(self, seq_id: int) -> None:
        self.forgotten.append(seq_id)


def perfect(answers: Mapping[tuple[int, ...], Sequence[int]]) -> Guesser:
    """Drafts the known answer of each prompt."""

    def guess(row: DraftRow, limit: int) -> list[int]:
        answer = answers[tuple(row.tokens[: row.num_prompt])]
        done = len(row.tokens) - row.num_prompt
        return list(answer[done : done + limit])

    return guess


def wrong_at(answers: Mapping[tuple[int, ...], Sequence[int]], offset: int, *, vocab_size: int) -> Guesser:
    """The known answer with the token at `offset` of every draft changed (offset 0: always wrong)."""
    truth = perfect(answers)

    def guess(row: DraftRow, limit: int) -> list[int]:
        tokens = truth(row, limit)
        if offset < len(tokens):
            tokens[offset] = (tokens[offset] + 1) % vocab_size
        return tokens

    return guess


def junk(*, vocab_size: int, seed: int = 0) -> Guesser:
    """Random tokens, a random number of them."""
    rng = random.Random(seed)

    def guess(row: DraftRow, limit: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randint(0, limit))]

    return guess


def mostly_right(answers: Mapping[tuple[int, ...], Sequence[int]], *, vocab_size: int, seed: int = 0) -> Guesser:
    """The known answer with each token changed one time in four."""
    truth, rng = perfect(answers), random.Random(seed)

    def guess(row: DraftRow, limit: int) -> list[int]:
        return [rng.randrange(vocab_size) if rng.random() < 0.25 else token for token in truth(row, limit)]

    return guess


class LetterStream:
    """Token t is the letter chr(97 + t % 26); final at once."""

    def push(self, token_id: int) -> str:
        return chr(97 + token_id % 26)

    def flush(self) -> str:
        return ""


def make_engine(
    runner: Any,
    *,
    drafter: Drafter | None = None,
    head: Any = None,
    max_drafts: int = 8,
    eos: Sequence[int] = (),
    num_pages: int = 256,
    page_size: int = 4,
    max_seqs: int = 8,
    max_tokens: int = 64,
    prefix_reuse: bool = True,
    speculator: Speculator | None = None,
    admission: Admission | None = None,
) -> Engine:
    """An engine with the step invariants asserted after every step. `head`: a draft head to draft with."""
    cache = KVCache(
        [*runner.layer_specs, *(added_layers(head) if head is not None else [])],
        num_pages=num_pages,
        page_size=page_size,
        prefix_reuse=prefix_reuse,
        dtype=runner.cache_dtype,
        device=runner.device,
    )
    if head is not None:
        drafter = build_head_drafter(
            head, cache, runner, num_valid_tokens=runner.vocab_size, quantization=None, threads=None
        )
    if speculator is None:
        policies = {"fixed": FixedLength(max_drafts)}
        speculator = Speculator(
            drafter=drafter or NoDrafter(), policies=policies, policy="fixed", max_tokens=max_drafts
        )
    return Engine(
        runner,
        cache,
        speculator=speculator,
        scheduler=Scheduler(
            cache,
            max_seqs=max_seqs,
            max_tokens=max_tokens,
            num_places=speculator.drafter.num_places,
            admission=admission,
        ),
        eos_token_ids=eos,
        num_valid_tokens=runner.vocab_size,
        max_context=min(runner.max_context, num_pages * page_size),
        check=True,
    )


def make_speculator(
    drafter: Drafter,
    *,
    cost: CostTable,
    policy: str = "adaptive",
    max_tokens: int = 6,
    draft_cost: CostTable | None = None,
    paced: bool = False,
) -> Speculator:
    """Every policy, over costs that are given; `paced`: they follow the clock as in the engine."""
    history = History()
    target: Any = StepCost(cost)
    draft: Any = None if draft_cost is None else PacedTable(draft_cost)
    for table in (target, draft):
        if table is not None and not paced:
            table.observe = lambda *args, **kwargs: None  # decisions of a test must not hang on the clock
    inputs = PolicyInputs(
        max_tokens=max_tokens,
        threshold=0.4,
        foresee=lambda seq_id, k: history.acceptance.foresee(seq_id, drafter.name, k),
        cost=target,
        draft_cost=draft,
    )
    return Speculator(
        drafter=drafter,
        policies=build_policies(inputs),
        policy=policy,
        max_tokens=max_tokens,
        cost=target,
        draft_cost=draft,
        history=history,
    )


def add(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seq_id: int,
    index: int = 0,
    priority: int = 0,
    grammar: Any = None,
) -> Seq:
    """Queue one prompt of token ids."""
    request = Request(id=f"r{seq_id}", prompt_token_ids=list(prompt), params=params, priority=priority)
    seq = Seq(id=seq_id, request=request, index=index, tokens=list(prompt), num_prompt=len(prompt))
    processors = Processors.build(params, vocab_size=engine.runner.vocab_size, eos_token_ids=engine.eos_token_ids)
    sampler = RowSampler(params, processors, tokens=prompt, num_prompt=len(prompt), index=index, grammar=grammar)
    watcher = StopWatcher(LetterStream(), stop=params.stop, include_stop=params.include_stop_str_in_output)
    engine.add(seq, sampler, watcher)
    return seq


def run(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Seq]:
    """Answer all prompts in one crowd; when idle, every page must be free."""
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    seqs = [add(engine, p, q, seq_id=i) for i, (p, q) in enumerate(zip(prompts, many, strict=True))]
    for _ in range(10_000):
        if not engine.has_work:
            break
        engine.step()
    else:
        raise AssertionError("the engine does not come to an end")
    engine.cache.check()
    assert not engine.cache.sequences
    assert all(len(pool.free) == pool.num_pages for pool in engine.cache.pools)
    return seqs


def random_prompts(count: int, *, vocab_size: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Prompts of unequal lengths, some of them repetitive so that lookup drafters have something to find."""
    rng = random.Random(seed)
    prompts = []
    for i in range(count):
        length = rng.randint(1, longest)
        motif = [rng.randrange(2, vocab_size) for _ in range(5)]
        prompts.append((motif * length)[:length] if i % 2 else [rng.randrange(2, vocab_size) for _ in range(length)])
    return prompts
