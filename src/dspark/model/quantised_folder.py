"""The folder of a quantised model in our own format: written from a dense model, and read into a network.
It must never be written over what is there, nor be read where any part of it is missing or of another version.

`model.safetensors` holds, for each linear NAME of the model's network, NAME.codes and NAME.scales (model/quantised),
and every other parameter as it was. `config.json` is the dense model's, with a `quantization_config` whose
`quant_method` is "dspark".
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark.model.precision import DEFAULT_GROUP, GROUP_SIZES, METHOD, VERSION, kind_of, read_settings
from dspark.model.quantised import STORED, Quantised, QuantisedLinear, code_shapes, quantise
from dspark.model.registry import SOURCE_FILE, make_source, read_source
from dspark.model.skeleton import build_skeleton, place

WEIGHTS = "model.safetensors"
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
_NOT_COPIED = ("config.json", "model.safetensors.index.json", SOURCE_FILE)
Progress = Callable[[str, int, int], None]


def write_quantised(
    network: Any,
    source: Path,
    out: Path,
    *,
    kind: str,
    group_size: int = DEFAULT_GROUP,
    provenance: Mapping[str, object],
    progress: Progress | None = None,
) -> int:
    """Write the folder `out` of the dense `network` that was loaded from `source`; returns bytes of weights.

    Raises ValueError for an `out` with something in it, and for networks that the fast paths do not run.
    """
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group size {group_size} is not supported: choose one of {', '.join(map(str, GROUP_SIZES))}")
    check_out(out)
    _check_covered(network)
    from safetensors.torch import save_file

    tensors = _quantised_tensors(network, kind=kind, group_size=group_size, progress=progress)
    partial = out.parent / f".{out.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / WEIGHTS).chmod(0o644)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"] = _settings(network, kind=kind, group_size=group_size)
        _write_json(partial / "config.json", config)
        for pattern in _COPIED:
            for path in source.glob(pattern):
                if path.name not in _NOT_COPIED:
                    shutil.copyfile(path, partial / path.name)
        _write_json(partial / SOURCE_FILE, provenance)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def check_out(out: Path) -> None:
    """Raises ValueError for a place with something in it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty: give another folder, or remove what is there")


def quantised_source(name: str, source: Path, *, precision: str) -> dict[str, object]:
    """The provenance record: that of the dense model, and what was made of it."""
    before = read_source(source) or {}
    sha256, licence = str(before.get("sha256", "")), str(before.get("licence", "as the dense model's"))
    origin = {"name": before.get("name", name), "quantised_from": name, "precision": precision}
    return make_source(sha256=sha256, licence=licence, origin=origin)


def _check_covered(network: Any) -> None:
    from dspark.model.families import extract

    weights, reason = extract(network, max_context=1)
    if weights is None:
        raise ValueError(f"{reason}: only models of the fast paths can be quantised")
    if any(isinstance(module, QuantisedLinear) for module in network.modules()):
        raise ValueError("the model is quantised already: quantise the dense one that it was made from")


def _settings(network: Any, *, kind: str, group_size: int) -> dict[str, object]:
    settings: dict[str, object] = {"quant_method": METHOD, "version": VERSION, "bits": 8 if kind == "int8" else 4}
    if kind == "int4":
        settings["group_size"] = group_size
    return settings | {"dtype": str(network.get_input_embeddings().weight.dtype).removeprefix("torch.")}


def _quantised_tensors(network: Any, *, kind: str, group_size: int, progress: Progress | None) -> dict[str, Tensor]:
    """Every parameter by name; those of linears as codes and scales. A tied output projection gets its own."""
    found: dict[str, Tensor] = {}
    linears = _linears(network)
    for index, (name, linear) in enumerate(linears.items()):
        if progress is not None:
            progress("quantise", index, len(linears))
        weight = quantise(linear.weight.detach(), kind, group_size=group_size)
        found |= {f"{name}.codes": weight.codes.contiguous(), f"{name}.scales": weight.scales.contiguous()}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if name.removesuffix(".weight") not in linears:
            found[name] = parameter.detach().clone()
    if progress is not None:
        progress("quantise", len(linears), len(linears))
    return found


def _linears(network: Any) -> dict[str, Any]:
    return {name: module for name, module in network.named_modules() if type(module) is nn.Linear}


def load_quantised(folder: Path, *, config: Any, dtype: torch.dtype) -> Any:
    """The network, whose linears are QuantisedLinear; all else in `dtype`. `config` of transformers.

    Raises ValueError for a damaged file, and for parts that are missing or of another shape.
    """
    settings = read_settings(folder)
    assert settings is not None
    kind, group = kind_of(settings, folder)
    network = build_skeleton(config, dtype=dtype)
    with _opened(folder / WEIGHTS) as file:
        names = set(file.keys())
        for name, linear in _linears(network).items():
            weight = _read(file, names, name, kind, group, (linear.out_features, linear.in_features))
            bias = None if linear.bias is None else _parameter(file, names, f"{name}.bias", linear.bias).to(dtype)
            network.set_submodule(name, QuantisedLinear(weight, bias, dtype=dtype))
        for name, parameter in list(network.named_parameters()):
            if not isinstance(network.get_submodule(name.rpartition(".")[0]), QuantisedLinear):
                place(network, name, _parameter(file, names, name, parameter).to(dtype))
    return network


def _read(file: Any, names: set[str], name: str, kind: str, group: int, shape: tuple[int, int]) -> Quantised:
    parts = []
    wanted = zip(("codes", "scales"), code_shapes(kind, shape, group), STORED[kind], strict=True)
    for part, part_shape, dtype in wanted:
        tensor = _tensor(file, names, f"{name}.{part}", part_shape)
        if tensor.dtype != dtype:
            raise ValueError(f"{name}.{part} is {tensor.dtype} and should be {dtype}: make the folder again")
        parts.append(tensor)
    return Quantised(kind=kind, codes=parts[0], scales=parts[1], num_inputs=shape[1], group_size=group)


def _parameter(file: Any, names: set[str], name: str, like: Tensor) -> Tensor:
    return _tensor(file, names, name, tuple(like.shape))


def _tensor(file: Any, names: set[str], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in names:
        raise ValueError(f"the weights lack {name}: the copy is incomplete or config.json belongs to another model")
    tensor = file.get_tensor(name)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)} and should have {shape}: make the folder again")
    return tensor


class _opened:
    """safe_open, whose errors become one line for users."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            self.file = safe_open(str(self.path), framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.path} is damaged or cut short ({error}): copy it again") from error
        return self.file.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
