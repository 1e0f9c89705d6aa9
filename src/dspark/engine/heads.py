"""Draft heads of a target: found, loaded, and turned into drafters with measured costs.
It must never take a head for a target that it was not made for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from dspark.config import SpeculationConfig
from dspark.draft.base import DraftRow, registry
from dspark.model.cache import KVCache
from dspark.model.load import resolve
from dspark.params import SamplingParams
from dspark.plan.cost import CostTable, PacedTable, StepCost, profile
from dspark.sampling import Processors, RowSampler

if TYPE_CHECKING:
    from dspark.draft.base import Drafter
    from dspark.engine.build import Target

PACKAGED: Mapping[str, str] = MappingProxyType({"smollm2-135m": "smollm2-135m"})
"""Target's registered name -> folder of its head under dspark/packaged_heads."""
MAX_PROFILE_ROWS = 8
PROFILE_CONTEXT = 64


def packaged_head(target_name: str) -> Path | None:
    """The folder of the head that comes with dspark for this target, if there is one."""
    folder = PACKAGED.get(target_name)
    if folder is None:
        return None
    path = Path(__file__).resolve().parent.parent / "packaged_heads" / folder
    return path if (path / "config.json").exists() else None


def is_head(folder: Path) -> bool:
    """Whether a folder holds a draft head rather than a model of its own."""
    from dspark.heads.checkpoint import is_head_folder

    return is_head_folder(folder)


def find_head(target: Target, speculation: SpeculationConfig) -> Path | None:
    """The folder of the head that the settings ask for; None when they ask for something else. Raises ValueError when
    they ask for a packaged head and there is none."""
    if speculation.method == "model":
        assert speculation.model is not None
        if target.has_draft(speculation.model):
            return None
        folder = resolve(speculation.model, progress=target.progress)
        return folder if is_head(folder) else None
    if speculation.method not in ("dspark", "auto"):
        return None
    if speculation.model is not None:
        return resolve(speculation.model, progress=target.progress)
    found = packaged_head(target.facts.name)
    if found is None and speculation.method == "dspark":
        raise ValueError(
            f"no draft head comes with dspark for {target.name!r}: train one (dspark train) and give its folder as "
            "--draft, or use draft 'auto' or 'suffix'"
        )
    return found


def load_draft_head(target: Target, speculation: SpeculationConfig) -> Any:
    """The head that the settings ask for, as a network; None when they ask for none."""
    folder = find_head(target, speculation)
    if folder is None:
        return None
    key = str(folder)
    if key not in target.heads:
        from dspark.heads.checkpoint import TargetShape, load_head

        embed, head = target.embeddings()
        shape = TargetShape(
            hidden_size=int(embed.shape[1]),
            num_layers=int(target.facts.config.get_text_config().num_hidden_layers),
            vocab_size=target.facts.vocab_size,
            dtype=embed.dtype,
        )
        target.heads[key] = load_head(folder, embed=embed, head=head, target=shape).to(target.device)
    return target.heads[key]


def build_head_drafter(
    head: Any, cache: KVCache, runner: Any, *, num_valid_tokens: int, quantization: str | None, threads: int | None
) -> Drafter:
    """The drafter of a head over the target's cache, natively where the target runs natively."""
    from dspark.draft.block import NativeBlocks, TorchBlocks, context_layers, native_chain

    layers = context_layers(head, runner.num_layers)
    if head.config.kind == "eagle3":
        return registry()["eagle3"](
            head=head, cache=cache, layer=layers[0], vocab_size=runner.vocab_size, num_valid_tokens=num_valid_tokens
        )
    blocks: Any
    chain = None
    if runner.name == "native":
        blocks = NativeBlocks(head, cache, layers, quantization=quantization, threads=threads)
        if head.confidence_head is not None:  # else confidence is a probability, which the chain does not compute
            exact = cache.keys[0].dtype == torch.float32
            chain = native_chain(head, threads=threads or torch.get_num_threads(), exact_weights=exact)
    else:
        blocks = TorchBlocks(head, cache, layers)
    return registry()["dspark"](
        head=head,
        cache=cache,
        blocks=blocks,
        layers=layers,
        vocab_size=runner.vocab_size,
        num_valid_tokens=num_valid_tokens,
        chain=chain,
    )


@dataclass(kw_only=True)
class HeadCosts:
    """Tables for draft/portfolio.Costs: `passes` of the target by packed rows, draft passes by `greedy` and by
    `sampled` rows."""

    passes: StepCost
    greedy: PacedTable
    sampled: PacedTable
    others: int = 0

    def target(self, rows: float) -> float:
        return self.passes.seconds(rows)

    def head(self, greedy: int, sampled: int) -> float:
        return (self.greedy.seconds(greedy) if greedy else 0.0) + (self.sampled.seconds(sampled) if sampled else 0.0)

    def observe_head(self, greedy: int, sampled: int, seconds: float) -> None:
        """A draft pass took so long; one over rows of both kinds says nothing of either."""
        if not sampled:
            self.greedy.observe(greedy, seconds)
        elif not greedy:
            self.sampled.observe(sampled, seconds)


def measure_head_cost(drafter: Any, *, num_tokens: int, temperature: float = 0.0) -> CostTable:
    """Seconds of a draft pass of `num_tokens` tokens by rows, on the drafter's own cache, behind PROFILE_CONTEXT.

    Sampled rows cost more than greedy ones: `temperature` says which are measured. A cache too small for a single row
    makes the cost infinite.
    """
    cache, config = drafter.cache, drafter.head.config
    size = config.num_rows
    room = min(pool.num_pages for pool in cache.pools) * cache.page_size
    behind = max(1, min(PROFILE_CONTEXT, drafter.max_positions - size - 1, room - size - 1))
    length = behind + size + 1
    rows = []
    for i in range(MAX_PROFILE_ROWS):
        seq_id = -1 - i
        cache.open(seq_id, [0])
        if not cache.reserve(seq_id, length):
            cache.close(seq_id)
            break
        state = torch.zeros(config.hidden_size, device=drafter.device, dtype=drafter.head.dtype)
        drafter.features[seq_id] = (behind - 1, state)
        rows.append(_profile_row(seq_id, behind, drafter.vocab_size, temperature))
    if not rows:
        return CostTable([(1, float("inf"))])

    def run(count: int) -> float:
        start = time.perf_counter()
        drafter.propose(rows[:count], [num_tokens] * count)
        return time.perf_counter() - start

    try:
        return profile(run, max_rows=len(rows))
    finally:
        for row in rows:
            drafter.forget(row.seq_id)
            cache.close(row.seq_id)


def _profile_row(seq_id: int, num_cached: int, vocab_size: int, temperature: float) -> DraftRow:
    params = SamplingParams(temperature=temperature)
    tokens = [0] * (num_cached + 1)
    processors = Processors.build(params, vocab_size=vocab_size, eos_token_ids=())
    sampler = RowSampler(params, processors, tokens=tokens, num_prompt=len(tokens))
    return DraftRow(
        seq_id=seq_id, tokens=tokens, num_prompt=len(tokens), num_cached=num_cached, params=params, sampler=sampler
    )
