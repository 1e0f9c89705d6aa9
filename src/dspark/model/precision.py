"""The precision of a model's weights: what a folder's config.json says of it, and how it is told to people.
It must never import torch, nor call weights quantised that a path has expanded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KINDS = ("int8", "int4")
GROUP_SIZES = (32, 64, 128)
"""Of int4; the kernel's own groups are of 32, and larger ones share a scale."""
DEFAULT_GROUP = 32
METHOD = "dspark"
VERSION = 1


def read_config(folder: Path) -> dict[str, Any]:
    """config.json; empty where it is not there or is no JSON object."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def read_settings(folder: Path) -> dict[str, Any] | None:
    """`quantization_config` of a folder, of whatever method; None where there is none."""
    settings = read_config(folder).get("quantization_config")
    return settings if isinstance(settings, dict) else None


def is_quantised_folder(folder: Path) -> bool:
    """Whether config.json says that the weights are quantised, in our format or another's."""
    return read_settings(folder) is not None


def is_ours(folder: Path) -> bool:
    """Whether they are in our format."""
    return (read_settings(folder) or {}).get("quant_method") == METHOD


def kind_of(settings: Mapping[str, Any], folder: Path) -> tuple[str, int]:
    """Kind and group size of a folder in our format. Raises ValueError for a version or values that are not read."""
    version, bits = settings.get("version"), settings.get("bits")
    if version != VERSION:
        raise ValueError(
            f"{folder} is in version {version} of dspark's quantised format and this dspark reads version {VERSION}: "
            "make it again with dspark quantize, or use the dspark that made it"
        )
    kind, group = f"int{bits}", settings.get("group_size", DEFAULT_GROUP)
    if kind not in KINDS or group not in GROUP_SIZES:
        raise ValueError(f"{folder} says bits={bits}, group_size={group}: make it again with dspark quantize")
    return kind, group


def keeps_int8(settings: Mapping[str, Any]) -> bool:
    """Whether a checkpoint of compressed-tensors is what our int8 is: weights in int8 with a scale for each row, and
    inputs in int8 with a scale for each of theirs, found as they come."""
    groups = settings.get("config_groups")
    if settings.get("quant_method") != "compressed-tensors" or settings.get("format") != "int-quantized" or not groups:
        return False
    return all(
        _int8(group.get("weights"), strategy="channel")
        and _int8(group.get("input_activations"), strategy="token")
        and group["input_activations"].get("dynamic") is True
        for group in groups.values()
    )


def _int8(scheme: Any, *, strategy: str) -> bool:
    wanted = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy}
    return isinstance(scheme, Mapping) and all(scheme.get(name) == value for name, value in wanted.items())


def held_kind(path: str, kind: str | None) -> str | None:
    """Of a folder in our format, the precision in which a path multiplies; None where it expands the weights."""
    return kind if path == "native" or (path == "torch" and kind == "int8") else None


def told(*, path: str, dtype: str, asked: str | None, stored: str | None, origin: str | None) -> str:
    """How the weights are held: `asked` by quantization, `stored` in our format on disk, `origin` of another's."""
    if stored is not None:
        if held_kind(path, stored) is not None:
            return f"{stored} as on disk"
        when = "in each pass" if path == "general" else "when loaded"
        return f"{stored} on disk, expanded to {dtype} {when}: the {path} path has no kernel for it"
    on_the_way = f"; on disk {origin}" if origin else ""
    if asked is not None:
        return f"{asked}, quantised when loaded{on_the_way}"
    return origin or dtype
