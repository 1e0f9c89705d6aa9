"""Candidates: the drafts that are to be measured, each precision of a model apart, and what they need in memory.
It must never load a model to learn its size, or drop a candidate without saying why.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dspark.bench.variants import QUANTIZATIONS, Variant, parse_variant

PRECISIONS = ("bf16", *QUANTIZATIONS)
BYTES = {"bf16": 2.0, "int8": 1.0 + 2 / 128, "int4": 0.5 + 2 / 32}
"""Of a weight of a linear layer, its scales included."""
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


def weight_bytes(folder: Path, precision: str) -> int | None:
    """Of a model's weights in a precision, by the headers of its files; None where there are none to be read. Linear
    layers are quantised, embeddings and norms are not."""
    total = 0.0
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        for name, entry in _header(file).items():
            shape = entry.get("shape") if isinstance(entry, Mapping) else None
            if not isinstance(shape, list):
                continue
            size = 1
            for length in shape:
                size *= int(length)
            linear = len(shape) == 2 and "embed" not in name and "lm_head" not in name
            total += size * (BYTES[precision] if linear else BYTES["bf16"])
    return int(total) if files else None


def _header(file: Path) -> dict[str, Any]:
    """Of a safetensors file: eight bytes of length, then JSON."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 0 < size < 2**27:
            return {}
        values = json.loads(stream.read(size))
    return {name: entry for name, entry in values.items() if name != "__metadata__"}


def free_bytes() -> int:
    """Memory that programs may still take."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def within(variants: Sequence[Variant], sizes: Mapping[str, int], free: int) -> tuple[list[Variant], dict[str, str]]:
    """Those that fit beside one another, in order, and the others with the reason."""
    kept, refused, left = [], {}, int(free * HEADROOM)
    for variant in variants:
        need = sizes.get(variant.name, 0)
        if need > left:
            smaller = [
                p for p in QUANTIZATIONS if variant.speculation.quantization is None and need * BYTES[p] / 2 < left
            ]
            cure = (
                f"measure it as :{smaller[0]}" if smaller else "measure it in a run of its own, or on a larger machine"
            )
            refused[variant.name] = f"needs {_gib(need)} of memory and {_gib(left)} are left: {cure}"
            continue
        left -= need
        kept.append(variant)
    return kept, refused


def _gib(num_bytes: int) -> str:
    return f"{max(0, num_bytes) / 2**30:.2f} GiB"
