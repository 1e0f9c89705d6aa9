"""The arithmetic of memory: bytes of weights by precision, of caches and of a pass, from headers and config.json alone.
It must never load a weight, look at the machine, or count a precision that a path would expand.

Shapes: O outputs, I inputs of a linear layer; T tokens of a pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from dspark.model.precision import METHOD, held_kind, keeps_int8, read_config

BF12 = 12.25 / 8
"""Bytes of a bfloat16 weight on the native path, which packs the exponents; measured on models, not a bound."""
MOST_DRAFTS = 32
"""Of a row, that a sliding window's pages are counted for."""
LEAST_CONTEXT = 512
"""Tokens for which a cache must have room, where nobody asked for more."""
CPU_CACHE_SHARE, CUDA_CACHE_SHARE = 0.25, 0.8
"""Of all memory on a CPU, of what is free on a GPU: what caches may take unless told otherwise."""
FREE_CACHE_SHARE = 0.8
"""Of what is free on a CPU, that a cache may take at most."""
_PLAIN = MappingProxyType({"int8": 1.0, "int4": 0.5 + 2 / 32})
"""Bytes of a weight as it lies in a file of ours."""
_MLP_ROWS = 256  # as in csrc/workspace.h
_BLOCK_INPUTS = MappingProxyType({"float32": 16, "bfloat16": 32, "int8": 64, "int4": 32})
_BLOCK_BYTES = MappingProxyType({"float32": 2048, "bfloat16": 2048, "int8": 2048, "int4": 576})
_JOINED = MappingProxyType(
    {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
)


class CacheLayer(Protocol):
    """What a layer's cache depends on (model/cache.LayerSpec is one)."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def window(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class _Layer:
    num_kv_heads: int
    head_dim: int
    window: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What config.json says. `element`: bytes of a number of the cache and of what is not packed."""

    layers: tuple[_Layer, ...]
    hidden: int
    num_heads: int
    intermediate: int
    vocab_size: int
    max_context: int
    num_ropes: int
    tied: bool
    element: int
    stored_element: int


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Bytes of a model's weights once it runs, and beyond them for a time while it is made ready."""

    num_bytes: int
    loading: int


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """Pages of a cache. `context_pages` hold one whole context; `available` pages would fit what may be taken."""

    num_pages: int
    window_pages: int
    context_pages: int
    available: int
    page_bytes: int
    num_bytes: int


def read_shape(folder: Path, *, dtype: str = "auto") -> Shape | None:
    """Of a model's folder; None where config.json does not say what is needed."""
    config = read_config(folder)
    config = config | (config.get("text_config") or {})
    stored = config.get("dtype") or config.get("torch_dtype")
    wide = dtype == "float32" or (dtype == "auto" and stored in (None, "float32"))
    try:
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        windows = _windows(config)
        ropes = config.get("rope_parameters") or {}
        return Shape(
            layers=tuple(_Layer(num_kv_heads=kv_heads, head_dim=head_dim, window=window) for window in windows),
            hidden=int(config["hidden_size"]),
            num_heads=heads,
            intermediate=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            max_context=int(config["max_position_embeddings"]),
            num_ropes=sum(isinstance(rope, Mapping) for rope in ropes.values()) or 1,
            tied=bool(config.get("tie_word_embeddings", False)),
            element=4 if wide else 2,
            stored_element=4 if stored in (None, "float32") else 2,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _windows(config: Mapping[str, Any]) -> list[int]:
    window, kinds = int(config.get("sliding_window") or 0), config.get("layer_types")
    if kinds:
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    return [window if config.get("model_type") == "mistral" else 0] * int(config["num_hidden_layers"])


def read_headers(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in the folder's safetensors files; empty where none can be read."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(file).items():
            shape = entry.get("shape") if isinstance(entry, Mapping) else None
            if isinstance(shape, list):
                found[name] = tuple(int(length) for length in shape)
    return found


def _header(file: Path) -> dict[str, Any]:
    """Of a safetensors file: eight bytes of length, then JSON."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            values = json.loads(stream.read(size)) if 0 < size < 2**27 else {}
    except (OSError, ValueError):
        return {}
    return {name: entry for name, entry in values.items() if name != "__metadata__"}


@dataclass(frozen=True, kw_only=True)
class _Model:
    """A model's tensors by what becomes of them: linears (O, I) by name; embeddings and all else in numbers. `stored`:
    int8 or int4, of those linears in `kept`; `converted`: what is read does not lie in the file's own pages."""

    shape: Shape
    linears: Mapping[str, tuple[int, int]]
    embeddings: int
    others: int
    stored: str | None
    kept: frozenset[str]
    converted: bool

    @property
    def tables(self) -> int:
        """Bytes of rotary tables."""
        return 8 * self.shape.num_ropes * self.shape.max_context * self.shape.layers[0].head_dim

    def with_head(self) -> dict[str, tuple[int, int]]:
        """The linears, a tied output projection among them: where it is packed, it is a copy."""
        linears = dict(self.linears)
        if self.shape.tied and "lm_head" not in linears:
            linears["lm_head"] = (self.shape.vocab_size, self.embeddings // self.shape.vocab_size)
        return linears

    def kind(self, name: str, otherwise: str | None) -> str | None:
        """Of a linear; `otherwise` where the model is not quantised at all."""
        return self.stored if name in self.kept else None if self.stored is not None else otherwise

    def dense(self, *, joined: bool = False) -> int:
        """Bytes of linears that are not packed; `joined`: of those alone that are copied to be one layer."""
        sizes = (size for name, size in self.linears.items() if not joined or name.rpartition(".")[2] in _JOINED)
        return self.shape.element * sum(rows * width for rows, width in sizes)


def _read_model(folder: Path, *, dtype: str) -> _Model | None:
    shape, headers = read_shape(folder, dtype=dtype), read_headers(folder)
    if shape is None or not headers:
        return None
    settings = read_config(folder).get("quantization_config") or {}
    linears, embeddings, others = {}, 0, 0
    for name, size in headers.items():
        base, _, last = name.rpartition(".")
        if last in ("scales", "qzeros", "g_idx", "weight_scale", "weight_shape", "weight_zero_point"):
            continue
        if len(size) != 2:
            others += math.prod(size)
        elif "embed" in name:
            embeddings += math.prod(size)
        else:
            linears[base] = _linear_size(last, size, settings)
    ours = settings.get("quant_method") == METHOD
    return _Model(
        shape=shape,
        linears=linears,
        embeddings=embeddings,
        others=others,
        stored=f"int{settings.get('bits')}" if ours else "int8" if keeps_int8(settings) else None,
        kept=frozenset(name for name in linears if ours or f"{name}.weight_scale" in headers),
        converted=bool(settings) and not (ours or keeps_int8(settings)) or shape.element != shape.stored_element,
    )


def _linear_size(part: str, size: tuple[int, ...], settings: Mapping[str, Any]) -> tuple[int, int]:
    """(O, I) of a weight, dense or in one of the packed forms that model/foreign and model/quantised read."""
    bits = int(settings.get("bits") or 4)
    rows, width = size
    if part == "codes":
        return rows, width * (2 if bits == 4 else 1)
    if part == "qweight":
        return (width * 8, rows) if settings.get("quant_method") == "awq" else (width, rows * 32 // bits)
    return (rows, width * 8) if part == "weight_packed" else (rows, width)


def weights(
    folder: Path, *, path: str = "native", quantization: str | None = None, dtype: str = "auto"
) -> Weights | None:
    """Of the model in a folder on a path: native, torch, cuda (torch on a GPU) or general. `quantization` is what is
    asked for beside what the files are. None where headers or config.json cannot be read."""
    model = _read_model(folder, dtype=dtype)
    if model is None:
        return None
    if path == "native":
        return _native_weights(model, quantization)
    return _torch_weights(model, path, quantization)


def _native_weights(model: _Model, quantization: str | None) -> Weights:
    element, kind = model.shape.element, model.stored or quantization
    linears = model.with_head()
    packed = sum(
        packed_bytes(model.kind(first, quantization), element, size) for first, size in _join(linears).values()
    )
    loading = model.dense(joined=True)
    if model.stored is not None:
        loading = int(loading / element * _PLAIN[model.stored])
    elif kind is not None:  # from float32, one at a time
        loading += 4 * max(rows * width for rows, width in linears.values())
    if model.converted and model.stored is None:
        loading += model.dense() - model.dense(joined=True)
    others = 4 * model.others + model.tables  # norms and biases are kept in float32
    return Weights(num_bytes=packed + model.embeddings * element + others, loading=loading)


def _torch_weights(model: _Model, path: str, quantization: str | None) -> Weights:
    element = model.shape.element
    rest = (model.embeddings + model.others) * element
    if path == "general":
        kind = model.stored
        linear = sum(_plain_bytes(model.kind(name, None), element, size) for name, size in model.linears.items())
        largest = max((rows * width for rows, width in model.with_head().values()), default=0)
        return Weights(num_bytes=linear + rest, loading=element * largest if kind else 0)
    kind = quantization if model.stored is None else held_kind("torch", model.stored)
    copied = path == "torch" or kind is not None
    linears = model.with_head() if copied else model.linears
    kinds = {name: kind if model.stored is None or name in model.kept else None for name in linears}
    linear = sum(_plain_bytes(kinds[name], element, size) for name, size in linears.items())
    loading = model.dense(joined=True) if path == "torch" else model.dense() if kind and not model.stored else 0
    return Weights(num_bytes=linear + rest + model.tables, loading=loading)


def _join(linears: Mapping[str, tuple[int, int]]) -> dict[str, tuple[str, tuple[int, int]]]:
    """Projections of one input as the one layer that they become, with the name of the first."""
    found: dict[str, tuple[str, tuple[int, int]]] = {}
    for name, (rows, width) in linears.items():
        owner, _, last = name.rpartition(".")
        key = f"{owner}.{_JOINED.get(last, last)}"
        first, (before, _) = found.get(key, (name, (0, 0)))
        found[key] = (first, (before + rows, width))
    return found


def packed_bytes(kind: str | None, element: int, size: tuple[int, int]) -> int:
    """Of a linear (O, I) on the native path, as csrc/linear.h lays it out: panels of 32 outputs, whole blocks of
    inputs. `kind` None: not quantised, of `element` bytes."""
    rows, width = size
    name = kind or ("float32" if element == 4 else "bfloat16")
    panels, blocks = -(-rows // 32), -(-width // _BLOCK_INPUTS[name])
    data = panels * blocks * _BLOCK_BYTES[name]
    if name == "int8":
        data += panels * 32 * 4
    return int(data * BF12 / 2) if name == "bfloat16" else data


def _plain_bytes(kind: str | None, element: int, size: tuple[int, int]) -> int:
    """Of a linear (O, I) in torch: dense, or as codes and scales."""
    rows, width = size
    if kind == "int8":
        return rows * width + 4 * rows
    if kind == "int4":
        return int(rows * width * _PLAIN[kind])
    return rows * width * element


def plan_cache(
    layers: Sequence[CacheLayer],
    *,
    page_size: int,
    element: int,
    max_context: int,
    max_seqs: int,
    max_tokens: int,
    budget: float,
) -> CachePlan:
    """As many pages as all rows can use, within `budget` bytes; at least one. Layers with a window need only that."""
    per_layer = [2 * page_size * layer.num_kv_heads * layer.head_dim * element for layer in layers]
    page_bytes, context_pages = sum(per_layer), -(-max_context // page_size)
    available = int(budget // page_bytes)
    num_pages = max(1, min(context_pages * max_seqs, available))
    window = max(layer.window for layer in layers)
    per_row = -(-window // page_size) + 2 + MOST_DRAFTS // page_size
    window_pages = max_seqs * per_row + -(-max_tokens // page_size)
    sizes = [min(num_pages, window_pages) if layer.window else num_pages for layer in layers]
    return CachePlan(
        num_pages=num_pages,
        window_pages=window_pages,
        context_pages=context_pages,
        available=available,
        page_bytes=page_bytes,
        num_bytes=sum(pages * size for pages, size in zip(sizes, per_layer, strict=True)),
    )


def activation_bytes(shape: Shape, *, num_tokens: int, num_logits: int) -> int:
    """Of one pass of T tokens, in float32, with its logits once more as probabilities."""
    heads, kv = shape.num_heads * shape.layers[0].head_dim, shape.layers[0].num_kv_heads * shape.layers[0].head_dim
    per_token = 2 * shape.hidden + 2 * heads + 2 * kv
    mlp = min(num_tokens, _MLP_ROWS) * 2 * shape.intermediate
    return 4 * (num_tokens * per_token + mlp + 2 * num_logits * shape.vocab_size)


def cache_budget(*, free: int, total: int, on_gpu: bool) -> int:
    """What a cache may take where nobody said."""
    return int(free * CUDA_CACHE_SHARE) if on_gpu else int(min(total * CPU_CACHE_SHARE, free * FREE_CACHE_SHARE))


def gib(num_bytes: float) -> str:
    """Bytes for people."""
    return f"{max(0.0, num_bytes) / 2**30:.2f} GiB"
