"""Linear layers of the torch path: prepacked, plain, in fixed row tiles, or int8 with a scale for each row.
A row's result in int8 and in tiles must never depend on the other rows.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.model.quantised import Quantised, Weight, quantise, quantise_rows

# A linear layer is a function (M, I) -> (M, O), in the input's dtype.
Linear = Callable[[Tensor], Tensor]

_TILE = 16
_EXACT_SUM = 1024  # int8 products whose sum float32 holds exactly: 1024 * 127 * 127 < 2 ** 24


def make_linear(
    weight: Weight,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    exact: bool = False,
    quantization: str | None = None,
    prepack: bool = True,
) -> Linear:
    """The linear x -> x @ weight.T + bias for weight (O, I) and bias (O,).

    exact: a row's bits do not depend on the number of rows (CPU). quantization: None or "int8". Quantised weights stay
    so in int8; in int4 they are expanded to `dtype`, once. prepack: where oneDNN can, with a copy of the weight in its
    own layout; else with the weight itself.
    """
    assert quantization in (None, "int8")
    if isinstance(weight, Quantised):
        if weight.kind == "int8":
            return Int8Linear(weight, bias)
        assert dtype is not None
        weight = weight.dense(dtype)
    elif quantization == "int8":
        return Int8Linear(weight, bias)
    linear: Linear = PackedLinear(weight, bias) if prepack and can_prepack(weight) else PlainLinear(weight, bias)
    return TiledLinear(linear) if exact else linear


def can_prepack(weight: Tensor) -> bool:
    """Whether this torch build can lay that weight out for oneDNN ahead of time."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PlainLinear:
    """torch's own linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """oneDNN's linear over a weight in oneDNN's own layout, which spares a reordering in every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _TILE)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class TiledLinear:
    """Runs another linear on tiles of 16 rows, the last filled up with zeros: one shape, so one order of summing."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -num_rows % _TILE))
        tiles = [self.linear(tile) for tile in padded.split(_TILE)]
        return torch.cat(tiles)[:num_rows] if len(tiles) > 1 else tiles[0][:num_rows]


class Int8Linear:
    """Weights in int8 with a scale for each output, inputs in int8 with a scale for each row, sums in integers."""

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        packed = weight if isinstance(weight, Quantised) else quantise(weight, "int8")
        self.quantised, self.scale = packed.codes, packed.scales
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        rows, scale = quantise_rows(x)
        out = int_matmul(rows, self.quantised).float() * scale * self.scale
        return (out if self.bias is None else out + self.bias).to(x.dtype)


def int_matmul(a: Tensor, b: Tensor) -> Tensor:
    """int8 a (M, I), b (O, I) -> a @ b.T (M, O), exact."""
    if hasattr(torch, "_int_mm"):
        if a.device.type == "cpu":
            return torch._int_mm(a, b.t())
        if a.device.type == "cuda" and b.shape[0] % 8 == 0 and b.shape[1] % 8 == 0:
            num_rows = a.shape[0]  # cuBLAS wants more than 16 rows, in eights
            return torch._int_mm(F.pad(a, (0, 0, 0, max(24, -(-num_rows // 8) * 8) - num_rows)), b.t())[:num_rows]
    return _int_matmul_in_floats(a, b)


def _int_matmul_in_floats(a: Tensor, b: Tensor) -> Tensor:
    parts = zip(a.split(_EXACT_SUM, dim=1), b.split(_EXACT_SUM, dim=1), strict=True)
    return torch.stack([F.linear(x.float(), y.float()).to(torch.int32) for x, y in parts]).sum(0, dtype=torch.int32)
