"""Variant: one way of decoding that a benchmark compares, and its short spelling on the command line.
It must never hold an engine: it is settings and a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.config import HEAD_METHODS, METHODS, POLICIES, SpeculationConfig

PLAIN = "none"
LOOP = "loop"
QUANTIZATIONS = ("int8", "int4")
SPELLING = "a method or a model, then any of :int8 :int4 :fixed :adaptive :exact and @k"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """`engine` are overrides of EngineConfig fields. `name` is unique in a run."""

    name: str
    speculation: SpeculationConfig
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether it decodes without speculation: only such a variant can be a reference for another's text."""
        return self.speculation.method == "none"


def parse_variant(text: str) -> Variant:
    """`none`, `loop`, `ngram@4`, `suffix:exact`, `qwen2.5-coder-0.5b:int4@4`, `folder/model:int8:fixed@3`.

    `loop` goes through all phases of speculation with drafts of no tokens: what the loop itself costs. `:exact` runs
    this variant in exact mode. `@k` is num_speculative_tokens. Raises ValueError with the spelling.
    """
    name = text.strip()
    settings: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    rest, at, count = name.rpartition("@")
    if at:
        if not (count.isascii() and count.isdigit()):
            raise ValueError(f"draft {text!r}: {count!r} is no number of tokens; write {SPELLING}")
        settings["num_speculative_tokens"] = int(count)
    else:
        rest = name
    base, modifiers = _split_modifiers(rest)
    for modifier in modifiers:
        if modifier in QUANTIZATIONS:
            settings["quantization"] = modifier
        elif modifier in POLICIES:
            settings["policy"] = modifier
        else:
            engine["exact"] = True
    if not base or base == "model":
        raise ValueError(f"draft {text!r} names no method or model; write {SPELLING}")
    if "quantization" in settings and base in (*METHODS, LOOP) and base not in HEAD_METHODS:
        raise ValueError(f"draft {text!r}: {base} has no weights to quantise; :int8 and :int4 go with a draft model")
    if base == LOOP:
        settings = {"method": "ngram", "num_speculative_tokens": 0}
        return Variant(name=name, speculation=SpeculationConfig(**settings), engine=engine)
    return Variant(name=name, speculation=SpeculationConfig.from_draft(base, **settings), engine=engine)


def _split_modifiers(text: str) -> tuple[str, list[str]]:
    """Known words after colons from the right; a colon of a path stays in the name."""
    modifiers: list[str] = []
    while ":" in text:
        head, _, tail = text.rpartition(":")
        if tail not in (*QUANTIZATIONS, *POLICIES, "exact"):
            break
        text, modifiers = head, [tail, *modifiers]
    return text, modifiers


def parse_variants(text: str) -> list[Variant]:
    """A comma-separated list, plain decoding first whether named or not, and a plain variant for each other engine.

    Raises ValueError for an empty list and for a name given twice.
    """
    variants = [parse_variant(part) for part in text.split(",") if part.strip()]
    names = [variant.name for variant in variants]
    if not variants:
        raise ValueError("no drafts to compare: give a list such as none,ngram,suffix")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"drafts named twice: {', '.join(twice)}; name each once")
    return with_references(variants)


def with_references(variants: Sequence[Variant]) -> list[Variant]:
    """The baseline first, then, before the first variant that needs one, a plain variant with the same engine."""
    baseline = next((v for v in variants if v.plain and not v.engine), parse_variant(PLAIN))
    ordered = [baseline]
    for variant in variants:
        if variant is baseline:
            continue
        listed = [v for v in (*ordered, *variants) if v.plain and dict(v.engine) == dict(variant.engine)]
        if not listed:
            ordered.append(Variant(name=f"{PLAIN}:exact", speculation=baseline.speculation, engine=variant.engine))
        ordered.append(variant)
    return ordered


def reference_of(variant: Variant, variants: Sequence[Variant]) -> Variant:
    """The plain variant whose text this one must reproduce: the one with the same engine."""
    for other in variants:
        if other.plain and dict(other.engine) == dict(variant.engine):
            return other
    raise AssertionError(f"no plain variant beside {variant.name}")
