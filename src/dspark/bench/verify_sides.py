"""The sides of `dspark verify`: two engines over the same weights, or servers.
It must never let the sides differ in anything but speculation, where that is ours to decide.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dspark.bench.endpoint import Endpoint, RemoteSide, draw_remote, spoil
from dspark.bench.verify import MAX_PROMPT_TOKENS, SAMPLED_SEQS, Sides
from dspark.config import SpeculationConfig
from dspark.params import SamplingParams
from dspark.quality.control import make_generous
from dspark.quality.goodness import two_samples
from dspark.quality.joint import LogitTap
from dspark.quality.oracle import tie_bound
from dspark.quality.pairs import Pair, local_ends, local_judge, remote_ends, remote_judge
from dspark.quality.sampled import Plan, Prefix, Sampled, Tested, choose_prefixes, try_samples
from dspark.quality.sides import LocalSide, chat_encoder
from dspark.types import SpeculationRecord

SAMPLED_TASKS = ("mtbench", "gsm8k", "humaneval", "mmlu")
"""Whose answers prefixes are taken from, in this order."""
MAX_TEXT_TOKENS = 200


def local_sides(args: argparse.Namespace, llm: Any, speculation: SpeculationConfig) -> Sides:
    """`llm` decodes plainly; the other side is another engine over its weights."""
    import torch

    config = llm.engine_config
    other = llm.variant(speculation=speculation)
    room = max(64, min(MAX_PROMPT_TOKENS, llm.engine.max_context - args.max_tokens - 1))
    encode = chat_encoder(llm.tokenizer, max_tokens=room)
    exact = bool(llm.info()["exact"])
    bound = tie_bound(str(llm.info()["dtype"]), quantization=config.quantization, exact=exact)
    words = [(letter, spelling) for letter in "ABCDEFGHIJ" for spelling in (letter, f" {letter}")]
    ids = [(llm.tokenizer.encode(spelling, add_special_tokens=False), letter) for letter, spelling in words]

    def sample(pairs: Sequence[Pair], plan: Plan, heard: Callable[[Sampled], None]) -> Sampled:
        return _sample_locally(args, llm, speculation, pairs, plan=plan, heard=heard)

    return Sides(
        plain=LocalSide(llm, name="plain", encode=encode),
        other=LocalSide(other, name="speculative", encode=encode),
        judge=local_judge(llm, bound=bound),
        late=local_ends(llm),
        exact=exact,
        bound=bound,
        told=True,
        config={"plain": llm.info(), "speculative": other.info()},
        sample=sample,
        letter_ids={listed[-1]: letter for listed, letter in ids if len(listed) == 1},
        threads=config.threads or torch.get_num_threads(),
        device=str(llm.info().get("device", "cpu")),
    )


def _sample_locally(
    args: argparse.Namespace,
    llm: Any,
    speculation: SpeculationConfig,
    pairs: Sequence[Pair],
    *,
    plan: Plan,
    heard: Callable[[Sampled], None],
) -> Sampled:
    answers = _answers(pairs, count=args.prefixes)
    texts = []
    for pair in answers:
        assert pair.plain.prompt is not None and pair.plain.tokens is not None
        prompt = list(pair.plain.prompt)[-MAX_TEXT_TOKENS:]
        texts.append((f"{pair.question.task}/{pair.question.id}", [*prompt, *pair.plain.tokens], len(prompt)))
    settings = {"max_num_seqs": SAMPLED_SEQS, "seed": plan.seed}
    tap = LogitTap(llm.variant(speculation=SpeculationConfig()))
    spoilt = llm.variant(speculation=speculation, **settings)
    control = spoilt, make_generous(spoilt, share=plan.share, seed=plan.seed)
    prefixes = choose_prefixes(llm, texts, plan=plan)
    other = llm.variant(speculation=speculation, **settings)
    return try_samples(tap, other, control, prefixes, plan=plan, on_tested=heard)


def _answers(pairs: Sequence[Pair], *, count: int) -> list[Pair]:
    """Of so many questions, plainly answered, the longest ones of each task first."""
    usable = [p for p in pairs if not p.refused and p.question.task in SAMPLED_TASKS and (p.plain.num_tokens or 0) >= 8]
    usable.sort(key=lambda p: -(p.plain.num_tokens or 0))
    usable.sort(key=lambda p: SAMPLED_TASKS.index(p.question.task))
    by_task = [[p for p in usable if p.question.task == task] for task in SAMPLED_TASKS]
    longest = max(map(len, by_task))
    return [listed[i] for i in range(longest) for listed in by_task if i < len(listed)][:count]


def remote_sides(args: argparse.Namespace) -> Sides:
    """Two servers, or ours with and without speculation in the request."""
    switch = args.url2 is None
    plain = Endpoint(args.url, model=args.served_model, extra={"speculation": False} if switch else {})
    other = Endpoint(args.url2 or args.url, model=args.served_model, extra={"include_metrics": True} if switch else {})

    def sample(pairs: Sequence[Pair], plan: Plan, heard: Callable[[Sampled], None]) -> Sampled:
        return _sample_remotely(args, plain, other, pairs, plan=plan, heard=heard)

    return Sides(
        plain=RemoteSide(plain, name="plain", concurrency=args.batch),
        other=RemoteSide(other, name="speculative", concurrency=args.batch),
        judge=remote_judge(bound=0.0 if args.exact else args.bound),
        late=remote_ends,
        exact=bool(args.exact),
        bound=0.0 if args.exact else args.bound,
        told=False,
        config={"plain": {"model": plain.model}, "speculative": {"model": other.model}, "per_request_switch": switch},
        sample=sample,
    )


def _sample_remotely(
    args: argparse.Namespace,
    plain: Endpoint,
    other: Endpoint,
    pairs: Sequence[Pair],
    *,
    plan: Plan,
    heard: Callable[[Sampled], None],
) -> Sampled:
    """Two sets of samples: the law itself is not known. The prompts are the questions with most of their answers."""
    sampled = Sampled(plan=plan, num_overruled=1, drafts_told=False)
    usable = [p for p in pairs if not p.refused and p.question.task in SAMPLED_TASKS and len(p.plain.text) >= 8]
    other.extra.pop("include_metrics", None)
    for number, pair in enumerate(usable[: args.prefixes]):
        text = pair.plain.text
        prompt = f"{pair.question.messages[-1]['content']}\n{text[: 2 * len(text) // 3]}"
        params = SamplingParams(temperature=1.0, max_tokens=plan.depth + 1)
        first, second = (draw_remote(side, prompt, params, samples=plan.samples) for side in (plain, other))
        spoilt: Counter = spoil(second, share=plan.share, seed=plan.seed + number)
        name = f"{pair.question.task}/{pair.question.id}"
        prefix = Prefix(name=name, tokens=(), manner="temperature 1", params=params)
        tested = Tested(
            prefix=prefix,
            fit=two_samples(first, second),
            control=two_samples(first, spoilt),
            record=SpeculationRecord(),
        )
        sampled.tested.append(tested)
        heard(sampled)
    return sampled
