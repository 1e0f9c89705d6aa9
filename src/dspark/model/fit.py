"""Fit: whether a target, its draft and their caches find room, said before anything is loaded, and what would.
It must never refuse what it cannot estimate, nor propose what does not fit either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark.model.free_memory import Free
from dspark.model.memory import (
    LEAST_CONTEXT,
    Shape,
    activation_bytes,
    cache_budget,
    gib,
    plan_cache,
    read_headers,
    read_shape,
    weights,
)
from dspark.model.precision import is_quantised_folder

SMALLER = (None, "int8", "int4")
FEW_SEQS = 4
CONTEXTS = (8192, 4096, 2048, 1024)
"""Limits that are proposed where a context is too long."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to run. `path`, `draft_path` as in memory.weights. `head`, `draft`: folders of a draft head or model.
    The other fields are those of config.EngineConfig."""

    target: Path
    path: str
    quantization: str | None = None
    draft: Path | None = None
    draft_path: str = "native"
    draft_quantization: str | None = None
    head: Path | None = None
    num_drafts: int = 0
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    page_size: int = 16
    cache_gib: float | None = None


@dataclass(frozen=True, kw_only=True)
class Need:
    """One line of the table."""

    name: str
    num_bytes: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """`needs` while it runs; `peak` is the most at any time, also while loading. `least`: the peak with the smallest
    caches that the plan allows."""

    needs: tuple[Need, ...]
    peak: int
    least: int
    free: Free

    @property
    def total(self) -> int:
        return sum(need.num_bytes for need in self.needs)

    @property
    def fits(self) -> bool:
        return self.least <= self.free.num_bytes

    def as_dict(self) -> dict[str, Any]:
        """For JSON: bytes by name."""
        return {
            "needs": {need.name: need.num_bytes for need in self.needs},
            "total": self.total,
            "while_loading": self.peak,
            "free": self.free.num_bytes,
            "free_by": self.free.source,
            "fits": self.fits,
        }


def estimate(plan: Plan, free: Free) -> Estimate | None:
    """What the plan takes; None where a folder does not tell."""
    shape = read_shape(plan.target, dtype=plan.dtype)
    found = weights(plan.target, path=plan.path, quantization=plan.quantization, dtype=plan.dtype)
    if shape is None or found is None:
        return None
    needs = [Need(name="target weights", num_bytes=found.num_bytes, note=_precision(plan.target, plan.quantization))]
    peak, context = found.num_bytes + found.loading, _context(plan, shape)
    small = None
    if plan.draft is not None:
        small = read_shape(plan.draft, dtype=plan.dtype)
        draft = weights(plan.draft, path=plan.draft_path, quantization=plan.draft_quantization, dtype=plan.dtype)
        if small is None or draft is None:
            return None
        note = _precision(plan.draft, plan.draft_quantization)
        needs.append(Need(name="draft weights", num_bytes=draft.num_bytes, note=note))
        peak = max(peak, found.num_bytes + draft.num_bytes + draft.loading)
    if plan.head is not None:
        needs.append(Need(name="draft head", num_bytes=_head_bytes(plan.head), note="as on disk"))
    num_logits = min(plan.max_num_batched_tokens, plan.max_num_seqs * (1 + plan.num_drafts))
    margin = activation_bytes(shape, num_tokens=plan.max_num_batched_tokens, num_logits=num_logits)
    needs.append(Need(name="activations", num_bytes=margin, note=f"of {plan.max_num_batched_tokens} tokens a pass"))
    fixed = sum(need.num_bytes for need in needs)
    least = fixed
    for name, cached in (("target cache", shape), ("draft cache", small)):
        if cached is not None:
            num_bytes, smallest, note = _cache(
                plan, cached, free, taken=sum(n.num_bytes for n in needs), wanted=context
            )
            needs.append(Need(name=name, num_bytes=num_bytes, note=note))
            least += smallest
    total = sum(need.num_bytes for need in needs)
    return Estimate(needs=tuple(needs), peak=max(peak, total), least=max(peak, least), free=free)


def _context(plan: Plan, shape: Shape) -> int:
    return min(shape.max_context, plan.max_model_len or shape.max_context)


def _cache(plan: Plan, shape: Shape, free: Free, *, taken: int, wanted: int) -> tuple[int, int, str]:
    """Bytes of a cache as it would be made, of the smallest that would do, and how many tokens it holds."""
    context = min(wanted, shape.max_context)
    on_gpu = plan.path == "cuda"
    left = max(0, free.num_bytes - taken)
    own = plan.cache_gib * 2**30 if plan.cache_gib else cache_budget(free=left, total=free.total, on_gpu=on_gpu)
    sizes: dict[str, Any] = dict(
        page_size=plan.page_size,
        element=shape.element,
        max_seqs=plan.max_num_seqs,
        max_tokens=plan.max_num_batched_tokens,
    )
    full = plan_cache(shape.layers, max_context=context, budget=own, **sizes)
    enough = context if plan.max_model_len is not None else min(context, LEAST_CONTEXT)
    least = plan_cache(shape.layers, max_context=enough, budget=1e30, **(sizes | {"max_seqs": 1}))
    smallest = full.num_bytes if plan.cache_gib else least.num_bytes
    num_bytes = max(full.num_bytes, smallest)
    tokens = full.num_pages * plan.page_size
    return num_bytes, smallest, f"up to {tokens} tokens; on a CPU taken as they come"


def _precision(folder: Path, quantization: str | None) -> str:
    if is_quantised_folder(folder):
        return "quantised on disk"
    return quantization or "not quantised"


def _head_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) if read_headers(folder) else 0


def refusal(plan: Plan, free: Free) -> str | None:
    """Why the plan does not fit and what does, in one line; None where it fits or cannot be told."""
    found = estimate(plan, free)
    if found is None or found.fits:
        return None
    needs = ", ".join(f"{need.name} {gib(need.num_bytes)}" for need in found.needs)
    loading = f", up to {gib(found.peak)} while loading" if found.peak > found.total else ""
    what = plan.target.name + (f" with draft {plan.draft.name}" if plan.draft is not None else "")
    ways = "; ".join(cures(plan, free)) or "use a smaller model or a machine with more memory"
    return (
        f"{what} needs {gib(found.least)} ({needs}{loading}) and {gib(free.num_bytes)} are there "
        f"({free.source}): {ways}; or set check_memory to false to try all the same"
    )


def cures(plan: Plan, free: Free) -> list[str]:
    """Changes, from small to large, each of which makes it fit; at most three."""
    found = [told for told, changed in _changes(plan) if (e := estimate(changed, free)) is not None and e.fits]
    return found[:3]


def _changes(plan: Plan) -> list[tuple[str, Plan]]:
    found: list[tuple[str, Plan]] = []
    if plan.cache_gib is not None:
        found.append(("leave cache_gib out", replace(plan, cache_gib=None)))
    limit = plan.max_model_len or 1 << 30
    for length in CONTEXTS:
        if plan.max_model_len is not None and length < limit:
            found.append((f"lower max_model_len to {length}", replace(plan, max_model_len=length)))
    if plan.max_num_batched_tokens > plan.max_num_seqs:
        tokens = max(64, plan.max_num_seqs)
        found.append((f"lower max_num_batched_tokens to {tokens}", replace(plan, max_num_batched_tokens=tokens)))
    if plan.max_num_seqs > FEW_SEQS:
        found.append((f"lower max_num_seqs to {FEW_SEQS}", replace(plan, max_num_seqs=FEW_SEQS)))
    if plan.draft is not None and plan.draft_path == "native" and not is_quantised_folder(plan.draft):
        for kind in SMALLER[SMALLER.index(plan.draft_quantization) + 1 :]:
            found.append((f"the draft in {kind}", replace(plan, draft_quantization=kind)))
    if plan.path == "native" and not is_quantised_folder(plan.target):
        for kind in SMALLER[SMALLER.index(plan.quantization) + 1 :]:
            found.append((f"the target in {kind} (--quantization {kind})", replace(plan, quantization=kind)))
            if plan.draft is not None and plan.draft_path == "native" and not is_quantised_folder(plan.draft):
                both = replace(plan, quantization=kind, draft_quantization="int4")
                found.append((f"the target in {kind} and the draft in int4", both))
    if plan.draft is not None:
        found.append(("draft suffix, which has no weights", replace(plan, draft=None)))
    return found
