"""NativeRunner: a decoder whose whole pass is one call into C++, on a CPU.
It must never keep the weights it was given beyond the embedding table, nor let a row's bits depend on its company."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_size_t, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.model.batch import IntArray, Packed
from dspark.model.build import library, reason
from dspark.model.cache import KVCache, LayerSpec
from dspark.model.precision import DEFAULT_GROUP
from dspark.model.quantised import Quantised, Weight, native, quantise
from dspark.model.runner import Output
from dspark.model.weights import DecoderWeights, LayerWeights

__all__ = ["NativeRunner", "library"]

# Kinds of packed linears, as in csrc/linear.h.
F32, BF16, BF12, I8, I4 = range(5)
_QUANTISED = {"int8": I8, "int4": I4}
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_ALIGNMENT = 64
_STATUS = {
    1: "out of memory for the pass: use a smaller limit of tokens per pass",
    2: "a token id lies outside the vocabulary",
    3: "a position lies outside the model's context",
}

# The structures of csrc/decoder.cpp, field for field.


class PackedLinear(Structure):
    _fields_ = [(name, c_int32) for name in ("kind", "n", "k", "unused")] + [("blob", c_void_p), ("bias", c_void_p)]


_NORMS = ("attn_norm", "q_norm", "k_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm")
_LINEARS = ("qkv", "o", "gate_up", "down")


class _Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in _NORMS),
        *((name, PackedLinear) for name in _LINEARS),
        ("window", c_int32),
        ("rope", c_int32),
    ]


class _Model(Structure):
    _fields_ = [
        ("layers", POINTER(_Layer)),
        ("embed", c_void_p),
        ("norm", c_void_p),
        ("rope_cos", POINTER(c_void_p)),
        ("rope_sin", POINTER(c_void_p)),
        ("head", PackedLinear),
        *((n, c_int32) for n in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate")),
        *((n, c_int32) for n in ("activation", "embed_is_bf16", "cache_is_bf16", "max_context", "num_threads")),
        ("num_embeddings", c_int32),
        *((n, c_float) for n in ("eps", "attn_scale", "embed_scale", "logit_softcap")),
    ]


class _Batch(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "positions", "row_starts", "logit_rows")),
        *((name, c_void_p) for name in ("tables", "slots", "table_widths", "group_of", "keys", "values", "taps")),
        *((name, c_void_p) for name in ("inputs", "reach", "logits")),
        *((name, c_int32) for name in ("num_tokens", "num_sequences", "num_logits", "page_size")),
    ]


class _Arena:
    """Memory for packed weights: one anonymous mapping in huge pages, filled from the front."""

    def __init__(self, size: int) -> None:
        self.mapping = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.mapping.madvise(mmap.MADV_HUGEPAGE)
        self.size = size
        self.used = 0
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))

    def next(self, bound: int) -> int:
        """Address of `bound` bytes; `keep` says how many of them stay."""
        assert self.used + bound <= self.size
        return self.address + self.used

    def keep(self, used: int) -> None:
        self.used += -(-used // _ALIGNMENT) * _ALIGNMENT


class _CachePointers:
    """Addresses of one KVCache's layers, looked up once per cache."""

    def __init__(self, cache: KVCache, runner: NativeRunner) -> None:
        num_layers, num_groups = runner.num_layers, len(cache.windows)
        assert max(runner.cache_layers) < len(cache.keys), "the cache belongs to another model"
        keys = [cache.keys[i] for i in runner.cache_layers]
        values = [cache.values[i] for i in runner.cache_layers]
        for spec, key, value in zip(runner.layer_specs, keys, values, strict=True):
            for tensor in (key, value):
                assert tensor.dtype == runner.cache_dtype and tensor.is_contiguous()
                assert tensor.shape[1:] == (cache.page_size, spec.num_kv_heads, spec.head_dim)
        self.cache = weakref.ref(cache)
        self.keys = (c_void_p * num_layers)(*(tensor.data_ptr() for tensor in keys))
        self.values = (c_void_p * num_layers)(*(tensor.data_ptr() for tensor in values))
        self.group_of = (c_int32 * num_layers)(*(cache.group_of[i] for i in runner.cache_layers))
        self.tables = (c_void_p * num_groups)()
        self.slots = (c_void_p * num_groups)()
        self.widths = (c_int32 * num_groups)()


class NativeRunner:
    """A ModelRunner (model/runner) over packed weights.

    quantization None keeps the weights' values exactly: float32 as they are, bfloat16 in 12 bits a weight where
    `compress`, else in 16. "int8" and "int4" quantise weights and, per row, what is multiplied by them, int4 weights in
    groups of `group_size`. Weights that come quantised stay as they are. The cache has the embeddings' dtype.
    `threads`: default torch's number. Not for use from two threads at once: calls wait.
    """

    name = "native"
    exact = True

    def __init__(
        self,
        weights: DecoderWeights,
        *,
        quantization: str | None = None,
        group_size: int = DEFAULT_GROUP,
        threads: int | None = None,
        compress: bool = True,
        cache_layers: Sequence[int] | None = None,
    ) -> None:
        """Packs every linear once (seconds for a billion weights). Raises ValueError for what it cannot run.

        `cache_layers`: which layer of the cache each of the model's layers reads and writes (default: its own index).
        """
        loaded = library()
        if loaded is None:
            raise ValueError(f"the native path is not available: {reason()}; install a C++ compiler, or use path torch")
        self._library = declare(loaded)
        self._check(weights)
        self._kind = _choose_kind(weights.embed.dtype, quantization, compress)
        self._group_size = group_size
        self._threads = threads or torch.get_num_threads()
        self._lock = threading.Lock()
        self._pointers: _CachePointers | None = None
        self.device = torch.device("cpu")
        self.cache_dtype = weights.embed.dtype
        self.vocab_size = weights.vocab_size
        self.hidden_size = weights.hidden_size
        self.num_layers = len(weights.layers)
        self.cache_layers = tuple(cache_layers) if cache_layers is not None else tuple(range(self.num_layers))
        self.max_context = weights.max_context
        self.layer_specs = [
            LayerSpec(num_kv_heads=weights.num_kv_heads, head_dim=weights.head_dim, window=layer.window)
            for layer in weights.layers
        ]
        self._kept: list[Any] = []  # what the C++ side points into
        self._batch = _Batch()
        self._create(weights)

    def forward(
        self,
        packed: Packed,
        cache: KVCache,
        *,
        taps: Sequence[int] = (),
        inputs: Tensor | None = None,
        reach: IntArray | None = None,
    ) -> Output:
        """One pass; see ModelRunner. logits (R, V) and taps (T, D) are new float32 tensors.

        `inputs` (T, D) float32 take the place of the tokens' embeddings. `reach` (T,): the last position that each row
        sees, its own by default; what lies there must have been written, by this pass or before.
        """
        assert inputs is None or (inputs.dtype == torch.float32 and inputs.is_contiguous())
        assert inputs is None or inputs.shape == (len(packed.tokens), self.hidden_size)
        num_tokens, num_logits = len(packed.tokens), len(packed.logit_rows)
        logits = torch.empty(num_logits, self.vocab_size)
        tapped = {index: torch.empty(num_tokens, self.hidden_size) for index in taps}
        assert all(0 <= index <= self.num_layers for index in tapped)
        tap_pointers = (c_void_p * (self.num_layers + 1))()
        for index, tensor in tapped.items():
            tap_pointers[index] = tensor.data_ptr()
        with self._lock:
            self._describe(packed, cache)
            batch = self._batch
            batch.logits = logits.data_ptr()
            batch.taps = ctypes.addressof(tap_pointers)
            batch.inputs = None if inputs is None else inputs.data_ptr()
            batch.reach = None if reach is None else address(reach)
            status = self._library.dspark_forward(self._handle, ctypes.byref(batch))
        if status:
            raise ValueError(f"the native pass failed: {_STATUS[status]}")
        return Output(logits=logits, taps=[tapped[index] for index in taps])

    def _describe(self, packed: Packed, cache: KVCache) -> None:
        """Point self._batch at the arrays of `packed` and `cache`."""
        pointers = self._pointers
        if pointers is None or pointers.cache() is not cache:
            pointers = self._pointers = _CachePointers(cache, self)
            batch = self._batch
            for name in ("keys", "values", "group_of", "tables", "slots"):
                setattr(batch, name, ctypes.addressof(getattr(pointers, name)))
            batch.table_widths = ctypes.addressof(pointers.widths)
            batch.page_size = cache.page_size
        for group, (table, slots) in enumerate(zip(packed.tables, packed.slots, strict=True)):
            pointers.tables[group] = address(table)
            pointers.slots[group] = address(slots)
            pointers.widths[group] = table.shape[1]
        batch = self._batch
        batch.tokens = address(packed.tokens)
        batch.positions = address(packed.positions)
        batch.row_starts = address(packed.row_starts)
        batch.logit_rows = address(packed.logit_rows)
        batch.num_tokens = len(packed.tokens)
        batch.num_sequences = len(packed.context_lens)
        batch.num_logits = len(packed.logit_rows)

    # -- construction

    def _check(self, weights: DecoderWeights) -> None:
        if weights.activation not in _ACTIVATIONS:
            raise ValueError(f"the native path has no activation {weights.activation!r}; use path torch")
        if weights.head_dim % 2 or weights.num_heads % weights.num_kv_heads:
            raise ValueError("the native path needs an even head_dim and whole groups of heads; use path general")

    def _create(self, weights: DecoderWeights) -> None:
        linears = [getattr(layer, name) for layer in weights.layers for name in _LINEARS] + [weights.head]
        bounds = [self._library.dspark_packed_bytes(self._kind_of(weight), *weight.shape) for weight in linears]
        self._arena = _Arena(sum(bounds) + _ALIGNMENT * len(bounds))
        layers = (_Layer * self.num_layers)(*(self._layer(layer) for layer in weights.layers))
        num_ropes = len(weights.rope_tables)
        args = _Model(
            layers=layers,
            embed=weights.embed.data_ptr(),
            norm=self._floats(weights.norm),
            rope_cos=(c_void_p * num_ropes)(*(self._floats(cos) for cos, _ in weights.rope_tables)),
            rope_sin=(c_void_p * num_ropes)(*(self._floats(sin) for _, sin in weights.rope_tables)),
            head=self._linear(weights.head, None),
            num_layers=self.num_layers,
            hidden=self.hidden_size,
            num_heads=weights.num_heads,
            num_kv_heads=weights.num_kv_heads,
            head_dim=weights.head_dim,
            intermediate=weights.layers[0].down.shape[1],
            activation=_ACTIVATIONS[weights.activation],
            embed_is_bf16=weights.embed.dtype == torch.bfloat16,
            cache_is_bf16=self.cache_dtype == torch.bfloat16,
            max_context=self.max_context,
            num_threads=self._threads,
            num_embeddings=weights.embed.shape[0],
            eps=weights.eps,
            attn_scale=weights.attn_scale,
            embed_scale=weights.embed_scale,
            logit_softcap=weights.logit_softcap,
        )
        assert weights.embed.is_contiguous()
        self._kept.append(weights.embed)
        self._handle = c_void_p(self._library.dspark_model_create(ctypes.byref(args)))
        if not self._handle:
            raise ValueError("out of memory for the model: use a smaller model or quantization int8 or int4")
        weakref.finalize(self, self._library.dspark_model_destroy, self._handle)

    def _layer(self, layer: LayerWeights) -> _Layer:
        biases = {"qkv": layer.qkv_bias, "o": layer.o_bias}
        return _Layer(
            **{name: self._floats(getattr(layer, name)) for name in _NORMS},
            **{name: self._linear(getattr(layer, name), biases.get(name)) for name in _LINEARS},
            window=layer.window,
            rope=layer.rope,
        )

    def _floats(self, tensor: Tensor | None) -> int | None:
        """Address of a float32 copy (or the tensor itself) that lives as long as the runner."""
        if tensor is None:
            return None
        kept = tensor.detach().to(torch.float32).contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def _kind_of(self, weight: Weight) -> int:
        return _QUANTISED[weight.kind] if isinstance(weight, Quantised) else self._kind

    def _linear(self, weight: Weight, bias: Tensor | None) -> PackedLinear:
        n, k = weight.shape
        kind = self._kind_of(weight)
        if kind == I4 and isinstance(weight, Tensor) and self._group_size != DEFAULT_GROUP:
            weight = quantise(weight, "int4", group_size=self._group_size, threads=self._threads)
        blob = self._arena.next(self._library.dspark_packed_bytes(kind, n, k))
        if isinstance(weight, Quantised):
            codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
            used = native().dspark_pack_codes(
                kind, n, k, weight.group_size, codes.data_ptr(), scales.data_ptr(), blob, self._threads
            )
        else:
            dtype = torch.bfloat16 if kind in (BF16, BF12) else torch.float32
            source = weight.detach().to(dtype).contiguous()
            used = self._library.dspark_pack(kind, n, k, source.data_ptr(), blob, self._threads)
        self._arena.keep(used)
        return PackedLinear(kind=kind, n=n, k=k, blob=blob, bias=self._floats(bias))

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of everything it keeps of the model: packed linears, embeddings, norms, rotary tables."""
        return self._arena.used + sum(t.numel() * t.element_size() for t in self._kept if isinstance(t, Tensor))


def _choose_kind(dtype: torch.dtype, quantization: str | None, compress: bool) -> int:
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"the native path runs bfloat16 and float32 weights, not {dtype}: load with dtype bfloat16")
    if quantization is not None:
        if quantization not in _QUANTISED:
            raise ValueError(f"unknown quantization {quantization!r}: use int8, int4 or none")
        return _QUANTISED[quantization]
    if dtype == torch.float32:
        return F32
    return BF12 if compress else BF16


def address(array: IntArray) -> int:
    assert array.dtype == np.int32 and array.flags.c_contiguous
    return array.__array_interface__["data"][0]


def declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Say what the functions take and return; harmless when said again."""
    loaded.dspark_packed_bytes.argtypes = [c_int32, c_int64, c_int64]
    loaded.dspark_packed_bytes.restype = c_size_t
    loaded.dspark_pack.argtypes = [c_int32, c_int64, c_int64, c_void_p, c_void_p, c_int32]
    loaded.dspark_pack.restype = c_size_t
    loaded.dspark_model_create.argtypes = [c_void_p]
    loaded.dspark_model_create.restype = c_void_p
    loaded.dspark_model_destroy.argtypes = [c_void_p]
    loaded.dspark_model_destroy.restype = None
    loaded.dspark_forward.argtypes = [c_void_p, c_void_p]
    loaded.dspark_forward.restype = c_int32
    return loaded
