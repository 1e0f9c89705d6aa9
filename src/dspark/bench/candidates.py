"""Candidates: the drafts that are to be measured, each precision of a model apart, and what they need in memory.
It must never load a model to learn its size, or drop a candidate without saying why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dspark.bench.variants import QUANTIZATIONS, Variant, parse_variant
from dspark.model.memory import gib

PRECISIONS = ("bf16", *QUANTIZATIONS)
HEADROOM = 0.9
"""Of the memory that is free, what may be planned with."""


@dataclass(kw_only=True)
class Candidates:
    """What is to be measured, and what cannot be: name -> reason with its cure. `num_bytes`: of weights."""

    variants: list[Variant] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)


def expand(drafts: Sequence[str], *, precisions: Sequence[str], is_head: Any = lambda name: False) -> list[Variant]:
    """Variants of the drafts named: models in each precision, unless the name has one. Raises ValueError for what is no
    draft, no precision, or named twice."""
    if unknown := sorted(set(precisions) - set(PRECISIONS)):
        raise ValueError(f"unknown precisions {unknown}: choose of {', '.join(PRECISIONS)}")
    found: list[Variant] = []
    for text in drafts:
        variant = parse_variant(text)
        if variant.plain:
            continue
        speculation = variant.speculation
        given = speculation.method != "model" or speculation.quantization is not None or is_head(speculation.model)
        for precision in ["given"] if given else precisions:
            if precision in ("given", "bf16"):
                found.append(variant)
            else:
                name, at, count = variant.name.partition("@")
                quantised = replace(speculation, quantization=precision)
                found.append(Variant(name=f"{name}:{precision}{at}{count}", speculation=quantised))
    names = [variant.name for variant in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"drafts named twice: {', '.join(twice)}; name each once")
    if not found:
        raise ValueError("no drafts to choose from: give some with --drafts, such as suffix ngram NAME")
    return found


def within(variants: Sequence[Variant], sizes: Mapping[str, int], free: int) -> tuple[list[Variant], dict[str, str]]:
    """Those that fit beside one another, in order, and the others with the reason. `sizes`: bytes by name, also of
    precisions that would help."""
    kept, refused, left = [], {}, int(free * HEADROOM)
    for variant in variants:
        need = sizes.get(variant.name, 0)
        if need > left:
            smaller = [
                p
                for p in QUANTIZATIONS
                if variant.speculation.quantization is None and sizes.get(f"{variant.name}:{p}", need) < left
            ]
            cure = (
                f"measure it as :{smaller[0]}" if smaller else "measure it in a run of its own, or on a larger machine"
            )
            refused[variant.name] = f"needs {gib(need)} of memory and {gib(left)} are left: {cure}"
            continue
        left -= need
        kept.append(variant)
    return kept, refused
