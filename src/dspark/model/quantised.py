"""Quantised: the weight of a linear layer as integers and scales, row by row, and how such a weight is made.
It must never be rounded twice: what runs from it natively has the bits of quantising the same weight on the fly.

Shapes: O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.model.precision import DEFAULT_GROUP, GROUP_SIZES, KINDS

STORED = MappingProxyType({"int8": (torch.int8, torch.float32), "int4": (torch.uint8, torch.bfloat16)})
"""Types of codes and scales."""
_NATIVE_KIND = {"int8": 3, "int4": 4}  # as in csrc/linear.h
_LEAST = 7.5e-37  # rows whose largest weight is smaller count as zero: a reciprocal would overflow


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """Stands where a dense weight (O, I) would.

    int8: codes (O, I) int8, scales (O,) float32. int4: codes (O, (I + 1) // 2) uint8, a byte holding inputs 2j (low
    nibble) and 2j + 1 as value + 8; scales (O, G) bfloat16. `num_inputs` is I.
    """

    kind: str
    codes: Tensor
    scales: Tensor
    num_inputs: int
    group_size: int = DEFAULT_GROUP

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.codes.shape[0]), self.num_inputs

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales))

    def integers(self) -> Tensor:
        """(O, I) int8."""
        if self.kind == "int8":
            return self.codes
        pairs = torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(1)
        return pairs[:, : self.num_inputs].to(torch.int8) - 8

    def dense(self, dtype: torch.dtype) -> Tensor:
        """(O, I): integers times scales, rounded once to `dtype`."""
        scales = self.scales.float()
        if self.kind == "int8":
            return (self.codes.float() * scales[:, None]).to(dtype)
        wide = scales.repeat_interleave(self.group_size, dim=1)[:, : self.num_inputs]
        return (self.integers().float() * wide).to(dtype)


Weight = Tensor | Quantised
"""Of a linear layer, (O, I)."""


def join(parts: Sequence[Quantised]) -> Quantised:
    """Weights of the same inputs, one after another along the outputs."""
    first = parts[0]
    assert len({(part.kind, part.group_size, part.num_inputs) for part in parts}) == 1
    return Quantised(
        kind=first.kind,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        num_inputs=first.num_inputs,
        group_size=first.group_size,
    )


def code_shapes(kind: str, shape: tuple[int, int], group_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and of the scales of a weight of `shape` (O, I)."""
    rows, width = shape
    if kind == "int8":
        return (rows, width), (rows,)
    return (rows, (width + 1) // 2), (rows, -(-width // group_size))


def quantise(weight: Tensor, kind: str, *, group_size: int = DEFAULT_GROUP, threads: int | None = None) -> Quantised:
    """The weight (O, I) in integers. int8: one scale a row, round to nearest. int4: for each group the best of several
    scales, each fitted by least squares; made by the native code, on a CPU.

    Raises ValueError where there is no compiler to build that.
    """
    assert kind in KINDS and (kind == "int8" or group_size in GROUP_SIZES)
    group = group_size if kind == "int4" else DEFAULT_GROUP
    if kind == "int8" and (weight.device.type != "cpu" or not has_native()):
        codes, scales = quantise_rows(weight, exact=True)
        return Quantised(kind=kind, codes=codes, scales=scales[:, 0], num_inputs=int(weight.shape[1]))
    source = weight.detach().float().contiguous()
    code_shape, scale_shape = code_shapes(kind, (source.shape[0], source.shape[1]), group)
    code_dtype, scale_dtype = STORED[kind]
    codes, scales = torch.empty(code_shape, dtype=code_dtype), torch.empty(scale_shape, dtype=scale_dtype)
    pointers = source.data_ptr(), codes.data_ptr(), scales.data_ptr()
    native().dspark_quantise(_NATIVE_KIND[kind], *source.shape, group, *pointers, threads or torch.get_num_threads())
    return Quantised(kind=kind, codes=codes, scales=scales, num_inputs=int(source.shape[1]), group_size=group)


def quantise_rows(x: Tensor, *, exact: bool = False) -> tuple[Tensor, Tensor]:
    """x (M, I) -> int8 (M, I) and scales (M, 1) float32, with x about int8 * scale: at most half a scale off. A row
    that is not finite has no scale (NaN). exact: products rounded once, which gives the bits of csrc/linear_rows.h."""
    wide = x.float()
    top = wide.abs().amax(dim=1, keepdim=True)
    some = (top > _LEAST) & top.isfinite()
    inverse = torch.where(some, 127.0 / top, 0.0)
    scale = torch.where(some, top / 127.0, torch.where(top.isfinite(), 0.0, torch.nan))
    product = wide.double() * inverse.double() if exact else wide * inverse
    return torch.round(torch.nan_to_num(product)).to(torch.int8), scale


def has_native() -> bool:
    from dspark.model.build import library

    return library() is not None


def native() -> ctypes.CDLL:
    """The library with its doors for codes declared. Raises ValueError without one."""
    from dspark.model.build import library, reason

    loaded = library()
    if loaded is None:
        raise ValueError(f"int4 weights are made by the native code ({reason()}): install a C++ compiler, or use int8")
    loaded.dspark_quantise.argtypes = [c_int32, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_void_p, c_int32]
    loaded.dspark_quantise.restype = None
    loaded.dspark_pack_codes.argtypes = [*[c_int32, c_int64, c_int64, c_int32], *[c_void_p] * 3, c_int32]
    loaded.dspark_pack_codes.restype = c_size_t
    return loaded


def kind_held(network: nn.Module) -> str | None:
    """The precision of a network's quantised linears; None where it has none."""
    return next((module.kind for module in network.modules() if isinstance(module, QuantisedLinear)), None)


class QuantisedLinear(nn.Module):
    """Takes the place of an nn.Linear in a model of transformers. Its own `forward` expands the weight for the time of
    the call: the fast paths take `quantised` instead."""

    def __init__(self, quantised: Quantised, bias: Tensor | None, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("codes", quantised.codes)
        self.register_buffer("scales", quantised.scales)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.kind, self.group_size, self.dtype = quantised.kind, quantised.group_size, dtype
        self.out_features, self.in_features = quantised.shape

    @property
    def quantised(self) -> Quantised:
        codes, scales = self.get_buffer("codes"), self.get_buffer("scales")
        return Quantised(
            kind=self.kind, codes=codes, scales=scales, num_inputs=self.in_features, group_size=self.group_size
        )

    @property
    def weight(self) -> Tensor:
        """Expanded, (O, I)."""
        return self.quantised.dense(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O)."""
        return F.linear(x, self.weight.to(x.dtype), self.bias)
