"""save_model: a language model that was trained further, as a folder that `load_model` takes.
It must never leave half a folder under the finished name, nor pass the result off as the model it came from."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.model.registry import SOURCE_FILE, read_source

if TYPE_CHECKING:
    from torch import nn

WEIGHTS = "model.safetensors"
PROVENANCE = "provenance.json"
_LEFT_OUT = (WEIGHTS, "model.safetensors.index.json", SOURCE_FILE, PROVENANCE)
_KEPT = (".json", ".jinja", ".model", ".txt", ".tiktoken")


def save_model(network: nn.Module, source: Path, folder: Path, *, provenance: Mapping[str, Any]) -> None:
    """Write `network`'s weights in bf16, with configuration and tokenizer of `source`, the folder it was loaded from,
    and provenance.json, which has the source's own origin and licence as "base". Raises ValueError where the disk is
    full."""
    temporary = folder.with_name(folder.name + ".part")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for file in sorted(source.iterdir()):
            if file.is_file() and file.suffix in _KEPT and file.name not in _LEFT_OUT:
                shutil.copyfile(file, temporary / file.name)
        _write_weights(network, temporary)
        base = read_source(source) or _read_json(source / PROVENANCE)
        (temporary / PROVENANCE).write_text(json.dumps({**provenance, "base": base}, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ValueError(f"the model cannot be written to {folder} ({error}): free space and run again") from None


def _write_weights(network: nn.Module, folder: Path) -> None:
    """Every weight once: of tied ones the input's, which the configuration ties to the output's on loading."""
    import torch
    from safetensors.torch import save_file

    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in network.named_parameters()}
    parameters = {p.data_ptr() for p in network.parameters()}
    for name, entry in network.state_dict().items():
        if name not in tensors and entry.data_ptr() not in parameters:  # neither a weight nor one under a second name
            tensors[name] = entry.detach().cpu().contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2), encoding="utf-8")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
