"""Checkpoints quantised by others: AWQ, GPTQ and compressed-tensors in integers, read without their packages.
It must never guess: what its layout does not say, or cannot be read here, is refused with the package that would.

Their weights are expanded when they are read, but for int8 with a scale a row, which is what our own kernels run.
Shapes: O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dspark.model.precision import keeps_int8
from dspark.model.quantised import Quantised, QuantisedLinear, Weight

Read = Callable[[str], Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each nibble of a word, lowest first (AutoAWQ, "gemm")."""
PACKAGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "awq": ("gptqmodel", "gptqmodel"),
        "gptq": ("gptqmodel", "gptqmodel"),
        "compressed-tensors": ("compressed_tensors", "compressed-tensors"),
        "torchao": ("torchao", "torchao"),
        "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
        "hqq": ("hqq", "hqq"),
        "quanto": ("optimum.quanto", "optimum-quanto"),
        "aqlm": ("aqlm", "aqlm"),
        "vptq": ("vptq", "vptq"),
        "eetq": ("eetq", "eetq"),
        "quark": ("quark", "amd-quark"),
        "auto-round": ("auto_round", "auto-round"),
    }
)
"""Method -> module and package with which transformers reads it."""


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 (..., N) -> uint8 (..., N * 32 / bits), the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2).to(torch.uint8)


def awq_weight(read: Read, name: str) -> Tensor:
    """(O, I) float32 from qweight (I, O / 8), qzeros (G, O / 8), scales (G, O): (q - zero) * scale (Lin et al.)."""
    order = torch.tensor(AWQ_ORDER).argsort()

    def columns(words: Tensor) -> Tensor:
        return unpack(words, 4).unflatten(-1, (-1, 8))[..., order].flatten(-2).float()

    codes, zeros, scales = columns(read(f"{name}.qweight")), columns(read(f"{name}.qzeros")), read(f"{name}.scales")
    rows, groups = codes.shape[0], scales.shape[0]
    if zeros.shape != scales.shape or codes.shape[1] != scales.shape[1] or rows % groups:
        raise ValueError(f"{name} is not in AWQ's layout: {_shapes(codes, zeros, scales)}")
    size = rows // groups
    zeros, scales = zeros.repeat_interleave(size, dim=0), scales.float().repeat_interleave(size, dim=0)
    return ((codes - zeros) * scales).T


def gptq_weight(read: Read, name: str, *, bits: int, offset: int, has_order: bool) -> Tensor:
    """(O, I) float32 from qweight (I * bits / 32, O), qzeros (G, O * bits / 32), scales (G, O) and, where there is one,
    g_idx (I), the group of each input (Frantar et al. 2022; AutoGPTQ's layout). `offset`: what was taken from zeros."""
    codes = unpack(read(f"{name}.qweight").T.contiguous(), bits).float()
    zeros, scales = unpack(read(f"{name}.qzeros"), bits), read(f"{name}.scales").float()
    groups, width = scales.shape[0], codes.shape[1]
    if zeros.shape != scales.shape or codes.shape[0] != scales.shape[1]:
        raise ValueError(f"{name} is not in GPTQ's layout: {_shapes(codes, zeros, scales)}")
    order = read(f"{name}.g_idx").long() if has_order else torch.arange(width) // -(-width // groups)
    if order.shape[0] != width or int(order.min()) < 0 or int(order.max()) >= groups:
        raise ValueError(f"{name}.g_idx names groups that are not there ({groups} of them)")
    zeros = ((zeros.int() + offset) & (2**bits - 1)).float()
    return (codes - zeros.T[:, order]) * scales.T[:, order]


def packed_weight(read: Read, name: str) -> Tensor:
    """(O, I) float32 from compressed-tensors' weight_packed (O, ...), weight_scale (O, G) and weight_shape, 4 bits,
    symmetric: (q - 8) * scale."""
    rows, width = (int(length) for length in read(f"{name}.weight_shape"))
    codes = unpack(read(f"{name}.weight_packed"), 4)[:, :width].float() - 8
    if codes.shape != (rows, width):
        raise ValueError(f"{name} is not in the layout of compressed-tensors: {_shapes(codes)}")
    return codes * _spread(read(f"{name}.weight_scale"), (rows, width), name)


def plain_weight(read: Read, name: str) -> Tensor:
    """(O, I) float32 from compressed-tensors' int8 weight (O, I) and weight_scale (O, G), (O,) or (1,)."""
    codes = read(f"{name}.weight")
    return codes.float() * _spread(read(f"{name}.weight_scale"), (codes.shape[0], codes.shape[1]), name)


def row_weight(read: Read, name: str) -> Quantised:
    """The same with a scale for each row, kept as it is."""
    codes, scales = read(f"{name}.weight"), read(f"{name}.weight_scale")
    if codes.dtype != torch.int8 or scales.numel() != codes.shape[0]:
        raise ValueError(f"{name} is not int8 with a scale a row: {_shapes(codes, scales)}")
    return Quantised(kind="int8", codes=codes, scales=scales.float().flatten(), num_inputs=int(codes.shape[1]))


def _spread(scale: Tensor, shape: tuple[int, int], name: str) -> Tensor:
    """A scale for each weight."""
    rows, width = shape
    wide = scale.float().reshape(-1, 1) if scale.dim() < 2 else scale.float()
    if wide.shape[0] not in (1, rows) or wide.shape[1] > width:
        raise ValueError(f"{name}.weight_scale has shape {tuple(scale.shape)} for a weight of {shape}")
    size = -(-width // wide.shape[1])
    return wide.repeat_interleave(size, dim=1)[:, :width]


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)


class Reader:
    """How a checkpoint of some method is read: which tensors make a weight, and what is told of it."""

    def __init__(self, *, mark: str, parts: tuple[str, ...], make: Callable[..., Weight], told: str) -> None:
        self.mark, self.parts, self.make, self.told = mark, parts, make, told

    def weights(self, names: set[str], read: Read) -> Iterator[tuple[str, Weight]]:
        """Every parameter by name. Raises ValueError for a weight that lacks a part."""
        quantised = {name.removesuffix(self.mark) for name in names if name.endswith(self.mark)}
        for base in sorted(quantised):
            if missing := [part for part in self.parts if base + part not in names]:
                raise ValueError(f"the weights lack {base}{missing[0]}: the copy is incomplete")
            yield f"{base}.weight", self.make(read, base, names)
        own = {base + part for base in quantised for part in (*self.parts, self.mark, ".g_idx", ".weight")}
        for name in sorted(names - own):
            yield name, read(name)


def reader_for(settings: Mapping[str, Any]) -> Reader | str:
    """Of a `quantization_config`; or why its weights are not read here."""
    method = str(settings.get("quant_method"))
    makers = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
    return makers[method](settings) if method in makers else f"{method} is not read by dspark itself"


def _awq(settings: Mapping[str, Any]) -> Reader | str:
    bits = settings.get("bits", settings.get("w_bit", 4))
    version = str(settings.get("version", settings.get("format", "gemm"))).lower()
    if bits != 4 or version != "gemm":
        return f"AWQ with bits={bits}, version={version!r}"
    parts = (".qweight", ".qzeros", ".scales")
    return Reader(mark=".qweight", parts=parts, make=lambda read, name, _: awq_weight(read, name), told="AWQ, 4 bits")


def _gptq(settings: Mapping[str, Any]) -> Reader | str:
    bits = settings.get("bits", 4)
    layout = str(settings.get("checkpoint_format") or settings.get("format") or "gptq")
    if bits not in (4, 8) or layout not in ("gptq", "gptq_v2"):
        return f"GPTQ with bits={bits}, checkpoint_format={layout!r}"
    offset = 1 if layout == "gptq" else 0

    def make(read: Read, name: str, names: set[str]) -> Tensor:
        return gptq_weight(read, name, bits=bits, offset=offset, has_order=f"{name}.g_idx" in names)

    parts = (".qweight", ".qzeros", ".scales")
    return Reader(mark=".qweight", parts=parts, make=make, told=f"GPTQ, {bits} bits")


def _compressed(settings: Mapping[str, Any]) -> Reader | str:
    layout = settings.get("format")
    groups = settings.get("config_groups")
    schemes = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, Mapping) else []
    bits = {scheme.get("num_bits") for scheme in schemes}
    plain = all(
        scheme.get("type", "int") == "int"
        and scheme.get("symmetric", True)
        and scheme.get("strategy") in ("tensor", "channel", "group")
        and scheme.get("actorder") in (None, "weight", "static")
        for scheme in schemes
    )
    if not schemes or not plain or (layout, bits) not in (("pack-quantized", {4}), ("int-quantized", {8})):
        return f"compressed-tensors with format={layout!r}, bits={sorted(map(str, bits))}"
    if layout == "pack-quantized":
        parts = (".weight_packed", ".weight_scale", ".weight_shape")
        return Reader(
            mark=".weight_packed",
            parts=parts,
            make=lambda read, name, _: packed_weight(read, name),
            told="compressed-tensors, 4 bits",
        )
    return Reader(
        mark=".weight_scale",
        parts=(".weight", ".weight_scale"),
        make=lambda read, name, _: (row_weight if keeps_int8(settings) else plain_weight)(read, name),
        told="compressed-tensors, 8 bits",
    )


def require_package(settings: Mapping[str, Any], folder: Path, why: str) -> None:
    """Raises ValueError naming the package with which transformers would read this, unless it is there."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

    method = str(settings.get("quant_method"))
    if method not in KNOWN and method not in PACKAGES:
        raise ValueError(
            f"quant_method {method!r} is known neither to dspark nor to transformers: give the dense model"
        )
    if method not in PACKAGES:
        return  # transformers reads it by itself, or says what it lacks
    module, package = PACKAGES[method]
    if not _is_there(module):
        raise ValueError(
            f"{folder} is quantised ({why}), which transformers reads with the package {package}: "
            f"pip install {package}, or give the dense model and --quantization int8 or int4"
        )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def load_foreign(folder: Path, reader: Reader, *, config: Any, dtype: torch.dtype) -> Any:
    """The network, dense weights in `dtype`. Raises ValueError for what is damaged or missing."""
    from dspark.model.skeleton import build_skeleton, place

    network = build_skeleton(config, dtype=dtype)
    shapes = {name: parameter.shape for name, parameter in network.named_parameters(remove_duplicate=False)}
    names, read = _tensors(folder)
    for name, tensor in reader.weights(names, read):
        if name not in shapes:
            continue
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"{name} in {folder} has shape {tuple(tensor.shape)} and should have {tuple(shapes[name])}: "
                "config.json belongs to another model"
            )
        if isinstance(tensor, Quantised):
            network.set_submodule(name.removesuffix(".weight"), QuantisedLinear(tensor, None, dtype=dtype))
        else:
            place(network, name, tensor.to(dtype).contiguous())
    network.tie_weights()
    empty = [name for name, parameter in network.named_parameters() if parameter.is_meta]
    if empty:
        raise ValueError(
            f"the weights in {folder} lack {', '.join(empty[:3])} ({len(empty)} in all): the copy is incomplete or "
            "config.json belongs to another model"
        )
    return network


def _tensors(folder: Path) -> tuple[set[str], Read]:
    """Names in all files of the folder, and how one is read."""
    from safetensors import SafetensorError, safe_open

    files: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            opened = safe_open(str(path), framework="pt")
            files |= dict.fromkeys(opened.keys(), opened)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is damaged or cut short ({error}): copy it again") from error
    return set(files), lambda name: files[name].get_tensor(name)
