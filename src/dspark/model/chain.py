"""NativeChain: the greedy sequential part of a block drafter as one call into C++, on a CPU.
It must never choose other tokens than the network itself would (heads/markov), but for rounding of its weights.

Shapes: R rows, B positions, W draft vocabulary, V target vocabulary, D hidden, K rank.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import Structure, c_float, c_int32, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.model.batch import IntArray
from dspark.model.build import library, reason
from dspark.model.native import BF16, F32, PackedLinear, address, declare

_KINDS = {"vanilla": 0, "gated": 1, "rnn": 2}


class _Args(Structure):
    _fields_ = [
        ("first", c_void_p),
        ("second", PackedLinear),
        *((name, c_void_p) for name in ("gate", "gate_bias", "sure", "words")),
        ("sure_bias", c_float),
        *((name, c_int32) for name in ("kind", "rank", "hidden", "num_words", "sure_with_rank", "num_threads")),
    ]


class _Batch(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("logits", "hidden", "anchors", "limits", "tokens", "confidence")),
        *((name, c_int32) for name in ("num_rows", "block")),
    ]


class NativeChain:
    """Bias W2 z on given logits, the likeliest token, and so on; see heads/markov for z and the kinds."""

    def __init__(
        self,
        *,
        words: Tensor,
        hidden_size: int,
        kind: str = "vanilla",
        first: Tensor | None = None,
        second: Tensor | None = None,
        gate: tuple[Tensor, Tensor] | None = None,
        confidence: tuple[Tensor, Tensor] | None = None,
        threads: int,
        exact_weights: bool = False,
    ) -> None:
        """words (W,) target ids of the draft's tokens; first (V, K), second (W, K), None for no bias; gate: weight and
        bias of the kind's linear; confidence: weight (D [+ K]) and bias. second is kept in bfloat16 unless
        `exact_weights`."""
        loaded = library()
        if loaded is None:
            raise ValueError(f"the native path is not available: {reason()}; install a C++ compiler, or use path torch")
        self._library = declare(loaded)
        self._kept: list[Any] = []
        self.num_words = len(words)
        self.hidden_size = hidden_size
        rank = 0 if first is None else first.shape[1]
        args = _Args(words=address(self._keep(words.to(torch.int32).numpy())))
        args.kind, args.rank, args.hidden = _KINDS[kind], rank, hidden_size
        args.num_words, args.num_threads = self.num_words, threads
        if first is not None and second is not None:
            args.first = self._floats(first)
            args.second = self._pack(second, F32 if exact_weights else BF16, threads)
            if kind != "vanilla":
                assert gate is not None
                args.gate, args.gate_bias = self._floats(gate[0]), self._floats(gate[1])
        if confidence is not None:
            args.sure = self._floats(confidence[0].flatten())
            args.sure_bias = float(confidence[1].detach())
            args.sure_with_rank = int(confidence[0].numel() > hidden_size)
        loaded.dspark_chain_create.argtypes = [c_void_p]
        loaded.dspark_chain_create.restype = c_void_p
        loaded.dspark_chain_destroy.argtypes = [c_void_p]
        loaded.dspark_chain_destroy.restype = None
        loaded.dspark_chain_run.argtypes = [c_void_p, c_void_p]
        loaded.dspark_chain_run.restype = c_int32
        self._handle = c_void_p(loaded.dspark_chain_create(ctypes.byref(args)))
        if not self._handle:
            raise ValueError("out of memory for the draft head: use a smaller draft vocabulary")
        weakref.finalize(self, loaded.dspark_chain_destroy, self._handle)

    def __call__(
        self, logits: Tensor, hidden: Tensor, anchors: IntArray, limits: IntArray
    ) -> tuple[IntArray, np.ndarray]:
        """logits (R, B, W), hidden (R, B, D) float32; anchors, limits (R,) -> tokens (R, B) target ids and confidence
        logits (R, B); positions from limits[r] on mean nothing."""
        num_rows, block, _ = logits.shape
        assert logits.is_contiguous() and hidden.is_contiguous()
        assert logits.shape[2] == self.num_words and hidden.shape == (num_rows, block, self.hidden_size)
        tokens = np.zeros((num_rows, block), np.int32)
        confidence = np.zeros((num_rows, block), np.float32)
        batch = _Batch(
            logits=logits.data_ptr(),
            hidden=hidden.data_ptr(),
            anchors=address(anchors),
            limits=address(limits),
            tokens=address(tokens),
            confidence=confidence.ctypes.data,
            num_rows=num_rows,
            block=block,
        )
        if self._library.dspark_chain_run(self._handle, ctypes.byref(batch)):
            raise ValueError("out of memory for the draft: lower max_num_seqs")
        return tokens, confidence

    def _keep(self, value: Any) -> Any:
        self._kept.append(value)
        return value

    def _floats(self, tensor: Tensor) -> int:
        return self._keep(tensor.detach().to(torch.float32).contiguous()).data_ptr()

    def _pack(self, weight: Tensor, kind: int, threads: int) -> PackedLinear:
        n, k = weight.shape
        source = weight.detach().to(torch.bfloat16 if kind == BF16 else torch.float32).contiguous()
        size = self._library.dspark_packed_bytes(kind, n, k)
        memory = self._keep(np.zeros(size + 64, np.uint8))
        blob = memory.ctypes.data + -memory.ctypes.data % 64
        self._library.dspark_pack(kind, n, k, source.data_ptr(), blob, threads)
        return PackedLinear(kind=kind, n=n, k=k, blob=blob, bias=None)
