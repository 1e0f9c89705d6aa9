"""Target and build_engine: from names and settings to a loaded model and a loop that runs it.
It must never load the same weights twice in one process, or start an engine whose cache cannot hold one context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dspark.config import EngineConfig, SpeculationConfig
from dspark.draft.base import Drafter, registry
from dspark.draft.block import added_layers
from dspark.draft.portfolio import Portfolio
from dspark.draft.vocab import SharedVocabulary
from dspark.engine.fitting import device_of
from dspark.engine.heads import HeadCosts, build_head_drafter, load_draft_head, measure_head_cost
from dspark.engine.loop import Engine
from dspark.engine.measure import PassCost, known_cost
from dspark.engine.scheduler import Scheduler
from dspark.engine.speculator import Speculator
from dspark.engine.text_kinds import TextKinds
from dspark.model.cache import KVCache, LayerSpec
from dspark.model.free_memory import free_memory
from dspark.model.load import LoadedModel, load_model
from dspark.model.memory import cache_budget, gib, plan_cache
from dspark.model.runner import build_runner
from dspark.model.tokenizer import Tokenizer
from dspark.plan.admit import Admission
from dspark.plan.cost import PacedTable, StepCost
from dspark.plan.history import History
from dspark.plan.length import PolicyInputs, build_policies
from dspark.plan.pace import Pace
from dspark.verify.grammar import GrammarCompiler

Progress = Callable[[str, int, int], None]
MEASURING_POLICIES = ("adaptive", "shadow")
"""Policies for which passes are timed at the start; a profile recorded under "shadow" tells what they cost."""
HEAD_QUANTIZATION = "int8"
"""Of a head's layers on the native path: a draft may be rough, and the head reads half the memory."""
LEAST_SHARED = 0.1
"""Of a draft's tokens that the target must have too."""


@dataclass(kw_only=True)
class Target:
    """A model on disk and the runners made from it. Weights are loaded when a runner first needs them, shared between
    engines, and dropped in their loaded form once a runner holds its own. `given`: what stands for the loading where
    somebody else has loaded the model and keeps it; it is asked again for each use, its answer is not kept, and the
    torch path takes no copy of its weights."""

    name: str
    device: str
    dtype: str
    threads: int | None = None
    progress: Progress | None = None
    given: Callable[[], LoadedModel] | None = None
    tokenizer: Tokenizer = field(init=False)
    facts: LoadedModel = field(init=False)
    runners: dict[tuple, Any] = field(default_factory=dict)
    costs: dict[tuple, PassCost] = field(default_factory=dict)
    drafts: dict[tuple, Target] = field(default_factory=dict)
    heads: dict[str, Any] = field(default_factory=dict)
    _grammars: GrammarCompiler | None = None

    def __post_init__(self) -> None:
        loaded = self._load()
        self.tokenizer = Tokenizer(loaded.path) if loaded.tokenizer is None else loaded.tokenizer
        # What is kept must not keep the weights alive: runners hold their own.
        self.facts = replace(loaded, model=nn.Module())
        self._fresh: LoadedModel | None = loaded if self.given is None else None

    def _load(self) -> LoadedModel:
        if self.given is not None:
            return self.given()
        return load_model(self.name, dtype=self.dtype, device=self.device, progress=self.progress)

    def runner(self, *, path: str, exact: bool, quantization: str | None) -> Any:
        """The runner with these settings, made on first use."""
        key = (path, exact, quantization)
        if key not in self.runners:
            loaded = self._fresh or self._load()
            self._fresh = None
            self.runners[key] = build_runner(
                loaded.model,
                path=path,
                exact=exact,
                quantization=quantization,
                device=self.device,
                threads=self.threads,
                max_context=loaded.max_context,
                prepack=self.given is None,
            )
        return self.runners[key]

    def embeddings(self) -> tuple[Tensor, Tensor]:
        """The target's embedding and output rows (V, D), as they are on disk."""
        loaded = self._fresh or self._load()
        model: Any = loaded.model
        return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()

    def cost(self, runner: Any, *, page_size: int, fresh: bool = False) -> PassCost:
        """Seconds of a pass, measured once for each runner, and kept on disk for the next start. `fresh`: measured
        again in any case."""
        key = (id(runner),)
        if fresh or key not in self.costs:
            (quantization,) = (made_with[2] for made_with, made in self.runners.items() if made is runner)
            self.costs[key] = known_cost(
                runner,
                model=self.name,
                quantization=quantization,
                threads=self.threads,
                page_size=page_size,
                fresh=fresh,
            )
        return self.costs[key]

    def grammars(self, *, width: int) -> GrammarCompiler:
        """The compiler of grammars over this model's tokens. `width`: columns of the logits."""
        if self._grammars is None:
            self._grammars = GrammarCompiler(
                self.tokenizer.hf,
                width=width,
                eos_token_ids=self.facts.eos_token_ids,
                token_bytes=self.tokenizer.token_bytes,
            )
        return self._grammars

    def has_draft(self, name: str) -> bool:
        """Whether the draft model of that name is there already."""
        return (name, self.device, self.dtype) in self.drafts

    def lend_draft(self, name: str, draft: Target) -> None:
        """`draft` answers to `name` from now on."""
        self.drafts[name, self.device, self.dtype] = draft

    def draft(self, name: str) -> Target:
        """The draft model of that name, beside this target."""
        key = (name, self.device, self.dtype)
        if key not in self.drafts:
            self.drafts[key] = Target(
                name=name, device=self.device, dtype=self.dtype, threads=self.threads, progress=self.progress
            )
        return self.drafts[key]


def open_target(model: str, config: EngineConfig, *, progress: Progress | None = None) -> Target:
    """Resolve device "auto" and load."""
    return Target(name=model, device=device_of(config), dtype=config.dtype, threads=config.threads, progress=progress)


def build_engine(target: Target, config: EngineConfig, speculation: SpeculationConfig) -> Engine:
    """One engine over a target: its cache, scheduler, drafter and policy."""
    head = load_draft_head(target, speculation)
    runner = target.runner(path=config.path, exact=config.exact, quantization=config.quantization)
    max_context = min(target.facts.max_context, config.max_model_len or target.facts.max_context)
    added = added_layers(head) if head is not None else []
    cache, max_context = build_cache(runner, config, max_context=max_context, added=added)
    speculator = build_speculator(target, runner, config, speculation, max_context=max_context, cache=cache, head=head)
    speculator.text_kind = TextKinds(target.tokenizer.decode)
    return Engine(
        runner,
        cache,
        speculator=speculator,
        scheduler=Scheduler(
            cache,
            max_seqs=config.max_num_seqs,
            max_tokens=config.max_num_batched_tokens,
            num_places=speculator.drafter.num_places,
            admission=_admission(config, speculator),
        ),
        eos_token_ids=target.facts.eos_token_ids,
        num_valid_tokens=target.facts.num_valid_tokens,
        max_context=max_context,
        check=config.check,
    )


def _admission(config: EngineConfig, speculator: Speculator) -> Admission:
    """Requests are grouped by predicted acceptance where a step takes a draft pass for each token of its longest."""

    def expected(seq_id: int) -> float:
        return sum(speculator.history.acceptance.foresee(seq_id, speculator.drafter.name, speculator.max_tokens))

    by_token = speculator.draft_cost is not None
    pace = Pace(objective=config.objective)
    return Admission(pace=pace, cost=speculator.cost, expected=expected if by_token else None)


def build_speculator(
    target: Target,
    runner: Any,
    config: EngineConfig,
    speculation: SpeculationConfig,
    *,
    max_context: int,
    cache: KVCache,
    head: Any = None,
) -> Speculator:
    """The drafter by name, with a policy and measured costs where the policy is adaptive. `head`: the draft head that
    the settings ask for, over the target's own `cache`."""
    if head is not None:
        return _head_speculator(target, runner, config, speculation, cache=cache, head=head)
    drafter, draft_cost = _build_drafter(target, config, speculation, max_context=max_context)
    num_tokens = speculation.num_speculative_tokens if speculation.method != "none" else 0
    cost = target.cost(runner, page_size=config.page_size).step_cost() if _needs_cost(config, speculation) else None
    return _speculator(drafter, speculation, num_tokens=num_tokens, cost=cost, draft_cost=draft_cost)


def _needs_cost(config: EngineConfig, speculation: SpeculationConfig) -> bool:
    """A drafter that never drafts needs no measured cost, nor do policies that look at none; "latency" bounds steps."""
    drafts = speculation.method != "none" and speculation.num_speculative_tokens > 0
    return (drafts and speculation.policy in MEASURING_POLICIES) or config.objective == "latency"


def _speculator(
    drafter: Drafter,
    speculation: SpeculationConfig,
    *,
    num_tokens: int,
    history: History | None = None,
    cost: StepCost | None = None,
    draft_cost: PacedTable | None = None,
    block_costs: HeadCosts | None = None,
    block_sources: Mapping[str, str] = MappingProxyType({}),
) -> Speculator:
    """With every policy that the measured costs allow. `draft_cost` is of a pass a token, `block_costs` of a pass a
    draft of one of the `block_sources`."""
    history = history or _history(speculation)
    speculator = Speculator(
        drafter=drafter,
        policies={},
        policy=speculation.policy,
        max_tokens=num_tokens,
        cost=cost,
        draft_cost=draft_cost,
        block_costs=block_costs,
        block_sources=block_sources,
        history=history,
    )
    inputs = PolicyInputs(
        max_tokens=num_tokens,
        threshold=speculation.confidence_threshold,
        foresee=lambda seq_id, k: history.acceptance.foresee(seq_id, drafter.name, k),
        cost=cost,
        draft_cost=draft_cost,
        asking=lambda: speculator.asking,
    )
    speculator.policies.update(build_policies(inputs))
    return speculator


def _history(speculation: SpeculationConfig) -> History:
    return History() if speculation.history is None else History.load(speculation.history)


def _head_speculator(
    target: Target, runner: Any, config: EngineConfig, speculation: SpeculationConfig, *, cache: KVCache, head: Any
) -> Speculator:
    """A head, with method "auto" beside suffix lookup."""
    drafter = build_head_drafter(
        head,
        cache,
        runner,
        num_valid_tokens=target.facts.num_valid_tokens,
        quantization=speculation.quantization or HEAD_QUANTIZATION,
        threads=config.threads,
    )
    num_tokens = speculation.num_speculative_tokens
    lookup = registry()["suffix"](**speculation.drafter_settings()) if speculation.method == "auto" else None
    history = _history(speculation)
    survival = history.acceptance.survival
    if not _needs_cost(config, speculation):
        free = drafter if lookup is None else Portfolio(drafter, costs=None, lookup=lookup, survival=survival)
        return _speculator(free, speculation, num_tokens=num_tokens, history=history)
    costs = HeadCosts(
        passes=target.cost(runner, page_size=config.page_size).step_cost(),
        greedy=PacedTable(measure_head_cost(drafter, num_tokens=num_tokens)),
        sampled=PacedTable(measure_head_cost(drafter, num_tokens=num_tokens, temperature=1.0)),
    )
    portfolio = Portfolio(drafter, costs=costs, expected=history.expected, lookup=lookup, survival=survival)
    return _speculator(
        portfolio,
        speculation,
        num_tokens=num_tokens,
        history=history,
        cost=costs.passes,
        block_costs=costs,
        block_sources=portfolio.kinds,
    )


def _build_drafter(
    target: Target, config: EngineConfig, speculation: SpeculationConfig, *, max_context: int
) -> tuple[Drafter, PacedTable | None]:
    settings = speculation.drafter_settings()
    if speculation.method != "model":
        # Without a head for this target "auto" is what is left of it.
        name = "suffix" if speculation.method == "auto" else speculation.method
        return registry()[name](**settings), None
    assert speculation.model is not None
    draft = target.draft(speculation.model)
    path = "auto" if config.path == "native" else config.path
    runner = draft.runner(path=path, exact=config.exact, quantization=speculation.quantization)
    words = shared_vocabulary(target, draft)
    longest = draft.facts.max_context if words is not None else min(draft.facts.max_context, max_context)
    cache, _ = build_cache(runner, config, max_context=longest)
    num_valid_tokens = draft.facts.num_valid_tokens
    drafter = registry()["model"](
        runner=runner,
        cache=cache,
        vocab_size=target.facts.vocab_size,
        num_valid_tokens=num_valid_tokens if words else min(target.facts.num_valid_tokens, num_valid_tokens),
        max_chunk=config.max_num_batched_tokens,
        words=words,
    )
    cost = (
        PacedTable(draft.cost(runner, page_size=config.page_size).table) if _needs_cost(config, speculation) else None
    )
    return drafter, cost


def shared_vocabulary(target: Target, draft: Target) -> SharedVocabulary | None:
    """What a draft model of another family shares with the target; None where it names its tokens as the target does.

    Raises ValueError where they have too little in common.
    """
    if vocabulary_difference(target.tokenizer, draft.tokenizer) is None:
        return None
    words = SharedVocabulary(
        target.tokenizer,
        draft.tokenizer,
        max_target=target.facts.num_valid_tokens,
        max_draft=min(draft.facts.num_valid_tokens, draft.facts.vocab_size),
    )
    if len(words) < LEAST_SHARED * words.num_draft:
        raise ValueError(
            f"draft model {draft.name!r} shares {len(words)} of its {words.num_draft} tokens with the target: too few "
            "to draft with; use a draft of the target's family, or draft 'suffix' or 'ngram', which need none"
        )
    return words


def vocabulary_difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    """Where a draft model names its tokens otherwise than the target; None where it does not. Padding rows of the
    output layer do not count, nor that a draft lacks a few of the target's special tokens: it can never propose them.
    """
    ours, theirs = target.vocabulary(), draft.vocabulary()
    different = [token for token, index in theirs.items() if ours.get(token) != index]
    if different:
        token = different[0]
        return f"token {token!r} is {theirs[token]} there and {ours.get(token)} here"
    missing = len(ours) - len(theirs)
    return f"it lacks {missing} of the target's {len(ours)} tokens" if missing > 0.01 * len(ours) else None


def build_cache(
    runner: Any, config: EngineConfig, *, max_context: int, added: Sequence[LayerSpec] = ()
) -> tuple[KVCache, int]:
    """A cache within the memory given, with `added` layers behind the model's, and the context that it can hold."""
    specs = [*runner.layer_specs, *added]
    plan = plan_cache(
        specs,
        page_size=config.page_size,
        element=torch.empty(0, dtype=runner.cache_dtype).element_size(),
        max_context=max_context,
        max_seqs=config.max_num_seqs,
        max_tokens=config.max_num_batched_tokens,
        budget=config.cache_gib * 2**30 if config.cache_gib else _default_bytes(runner),
    )
    if plan.num_pages < plan.context_pages:
        if config.max_model_len is not None:
            raise ValueError(
                f"a context of {max_context} tokens needs {gib(plan.context_pages * plan.page_bytes)} of cache and "
                f"{gib(plan.available * plan.page_bytes)} are given: raise cache_gib or lower max_model_len"
            )
        max_context = plan.num_pages * config.page_size
    cache = KVCache(
        specs,
        num_pages=plan.num_pages,
        page_size=config.page_size,
        max_window_pages=plan.window_pages,
        prefix_reuse=config.prefix_reuse,
        dtype=runner.cache_dtype,
        device=runner.device,
    )
    return cache, max_context


def _default_bytes(runner: Any) -> float:
    free = free_memory(runner.device)
    return cache_budget(free=free.num_bytes, total=free.total, on_gpu=torch.device(runner.device).type == "cuda")
