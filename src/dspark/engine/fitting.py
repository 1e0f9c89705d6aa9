"""Fitting: the engine's settings as a plan of memory, which is refused before anything is loaded where it has no room.
It must never load a model to learn its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dspark.config import HEAD_METHODS, EngineConfig, SpeculationConfig
from dspark.engine.heads import is_head, packaged_head
from dspark.model.build import library
from dspark.model.families import FAMILIES
from dspark.model.fit import Estimate, Plan, estimate, refusal
from dspark.model.free_memory import free_memory
from dspark.model.load import Progress, resolve
from dspark.model.precision import read_config


def device_of(config: EngineConfig) -> str:
    """The device, "auto" resolved."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def plan_of(
    model: str, config: EngineConfig, speculation: SpeculationConfig, *, progress: Progress | None = None
) -> Plan:
    """Folders, paths and settings; models by name are fetched. Raises ValueError for a target that is not there."""
    target = resolve(model, progress=progress)
    draft, head = _draft_folders(model, speculation, progress=progress)
    on_gpu = torch.device(device_of(config)).type == "cuda"
    draft_path = "auto" if config.path == "native" else config.path
    return Plan(
        target=target,
        path=path_of(target, config.path, on_gpu=on_gpu),
        quantization=config.quantization,
        draft=draft,
        draft_path="native" if draft is None else path_of(draft, draft_path, on_gpu=on_gpu),
        draft_quantization=speculation.quantization,
        head=head,
        num_drafts=speculation.num_speculative_tokens if speculation.method != "none" else 0,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        page_size=config.page_size,
        cache_gib=config.cache_gib,
    )


def path_of(folder: Path, path: str, *, on_gpu: bool) -> str:
    """The path that "auto" will take, as far as config.json tells; on a GPU "cuda" stands for path torch."""
    known = read_config(folder).get("model_type") in FAMILIES
    if path == "auto":
        path = "general" if not known else "torch" if on_gpu or library() is None else "native"
    return "cuda" if path == "torch" and on_gpu else path


def _draft_folders(
    model: str, speculation: SpeculationConfig, *, progress: Progress | None
) -> tuple[Path | None, Path | None]:
    """Of a draft model, and of a head. A draft that is not there is refused where it is loaded, by its own message."""
    if speculation.model is None:
        return None, packaged_head(model) if speculation.method in HEAD_METHODS else None
    try:
        folder = resolve(speculation.model, progress=progress)
    except ValueError:
        return None, None
    return (None, folder) if speculation.method in HEAD_METHODS or is_head(folder) else (folder, None)


def estimate_memory(
    model: str, config: EngineConfig, speculation: SpeculationConfig, *, progress: Progress | None = None
) -> Estimate | None:
    """What they will take; None where the folders do not tell."""
    return estimate(plan_of(model, config, speculation, progress=progress), free_memory(device_of(config)))


def check_memory(model: str, config: EngineConfig, speculation: SpeculationConfig, *, progress: Any = None) -> None:
    """Raises ValueError naming what does not fit and what does, unless the settings leave the check out."""
    if not config.check_memory:
        return
    if (
        told := refusal(plan_of(model, config, speculation, progress=progress), free_memory(device_of(config)))
    ) is not None:
        raise ValueError(told)
