"""`dspark info`: what this installation is and what it runs on, for bug reports and for tuning.
It must never fail because a part is missing: that is what one wants to read here."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from dspark import __version__
from dspark.cli import options
from dspark.cli.progress import MIB
from dspark.config import Config

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "accelerate", "numpy")
FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """With MODEL, also what it needs in memory and how it would be run."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="a model to tell of; the same as --model")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options.add_engine_arguments(parser)
    options.add_speculation_arguments(parser)
    parser.set_defaults(model=None)


def run(args: argparse.Namespace) -> int:
    """Print what is known of this machine, then of the model if one is named."""
    facts = machine()
    if (model := options.named_model(args)) is not None:
        facts |= model_facts(model, options.read_config(args))
    if args.json:
        print(json.dumps(facts, default=str))
    else:
        _print(facts)
    return 0


def model_facts(model: str, config: Config) -> dict[str, Any]:
    """Bytes by what takes them, asked before anything is loaded; then how it runs, or why it does not."""
    from dspark.cli.generate import load

    facts: dict[str, Any] = {"memory": _memory(model, config)}
    try:
        return facts | {"model": load(model, config=config).info()}
    except ValueError as error:
        return facts | {"model": {"refused": str(error)}}


def _memory(model: str, config: Config) -> dict[str, Any]:
    try:
        from dspark.engine.fitting import estimate_memory

        found = estimate_memory(model, config.engine, config.speculation)
    except (ImportError, ValueError) as error:
        return {"unknown": str(error)}
    return {"unknown": "the folder does not tell"} if found is None else found.as_dict()


def machine() -> dict[str, Any]:
    """Versions, processor, native extension, devices and the cache folder."""
    return {
        "dspark": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": cpu(),
        **_torch_facts(),
        "cache": _cache(),
    }


def cpu() -> dict[str, Any]:
    """Name, usable cores and the instructions that matter to the kernels."""
    lines = _cpuinfo()
    flags = set(lines.get("flags", lines.get("Features", "")).split())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": lines.get("model name") or platform.processor() or platform.machine(),
        "cores": usable,
        "features": [name for name in FEATURES if name in flags],
    }


def _cpuinfo() -> dict[str, str]:
    """The first processor's entries of Linux's table; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_facts() -> dict[str, Any]:
    """Threads, devices and the state of the native extension (which is compiled here if it has not been yet)."""
    try:
        import torch

        from dspark.model import build
    except ImportError as error:
        return {"threads": None, "devices": [], "native": {"available": False, "reason": str(error)}}
    gpus = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    available = build.library() is not None
    return {
        "threads": torch.get_num_threads(),
        "devices": ["cpu", *gpus],
        "native": {"available": available, "reason": build.reason() or "compiled for this machine"},
    }


def _cache() -> dict[str, Any]:
    from dspark.model.registry import cache_dir, list_models

    return {"folder": str(cache_dir()), "models": [row.name for row in list_models() if row.cached]}


def _print(facts: dict[str, Any], *, indent: str = "") -> None:
    for key, value in facts.items():
        if key == "memory" and "needs" in value:
            print(f"{indent}memory")
            for line in memory_lines(value):
                print(f"{indent}  {line}")
        elif isinstance(value, dict):
            print(f"{indent}{key}")
            _print(value, indent=indent + "  ")
        else:
            shown = ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else value
            print(f"{indent}{key:<{22 - len(indent)}} {shown}")


def memory_lines(memory: dict[str, Any]) -> list[str]:
    """The table of bytes for people."""
    rows = list(memory["needs"].items())
    rows += [("together", memory["total"]), ("most, while loading", memory["while_loading"])]
    rows += [(f"free ({memory['free_by']})", memory["free"])]
    lines = [f"{name:<40} {size / MIB:12,.1f} MiB" for name, size in rows]
    return [*lines, "it fits" if memory["fits"] else "it does not fit (caches on a CPU are only taken as they fill)"]
