"""The loaded model: from a name, folder, GGUF file or hub id to a network in eval mode and the facts about it.

It must never reach for the network when a folder is given, nor run code that came with a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.model import registry
from dspark.model.foreign import load_foreign, reader_for, require_package
from dspark.model.gguf_file import convert, first_line, without_bars
from dspark.model.precision import METHOD, keeps_int8, read_settings
from dspark.model.quantised import QuantisedLinear, kind_held
from dspark.model.quantised_folder import load_quantised
from dspark.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
    from torch import nn

Progress = Callable[[str, int, int], None]

DTYPES = ("bfloat16", "float32", "auto")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
_HEAD = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A causal language model ready to run.

    `vocab_size` counts rows of the output projection (V); ids at or above `num_valid_tokens` are padding rows and must
    never be emitted. `max_context` is in tokens. `tokenizer` is None when the folder holds none. `quantization`: of
    weights that are still quantised in memory, "int8" or "int4"; `origin` says how they lie on disk where that differs
    from how they are held.
    """

    model: nn.Module
    config: Any
    path: Path
    name: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    num_valid_tokens: int
    max_context: int
    dtype: torch.dtype
    tokenizer: Tokenizer | None
    quantization: str | None = None
    origin: str | None = None


def resolve(model: str, *, progress: Progress | None = None) -> Path:
    """The folder of `model`: a registry name, a folder, a .gguf file (converted once) or a hub id, in this order.

    Raises ValueError saying which of them failed and what can be given instead.
    """
    if model in registry.MODELS:
        return registry.fetch(model, progress=progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return _convert_gguf(path.resolve(), progress=progress)
        raise ValueError(f"{model} is a file but not a .gguf file: give a model folder, a .gguf file or a name")
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(model):
        raise ValueError(f"{model} does not exist: give a model folder, a .gguf file, or {_names()}")
    return _snapshot(model)


def load_model(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> LoadedModel:
    """Resolve `model` and load it from safetensors, frozen and in eval mode.

    `dtype` "auto" keeps float32 checkpoints in float32 and loads all others in bfloat16. Raises ValueError for missing
    or damaged files, unknown architectures and devices that are not there.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not supported: choose one of {', '.join(DTYPES)}")
    device = _check_device(device)
    folder = resolve(str(model), progress=progress)
    _check_folder(folder)
    network, torch_dtype, origin = _load_network(folder, dtype=dtype)
    network.requires_grad_(False)
    network.eval()
    network.to(device)
    config = network.config.get_text_config()
    output = network.get_output_embeddings()
    if output is None:
        raise ValueError(f"{folder} is not a causal language model (it has no output projection): choose another model")
    vocab_size = int(output.out_features if isinstance(output, QuantisedLinear) else output.weight.shape[0])
    tokenizer = Tokenizer(folder) if _has_tokenizer(folder) else None
    num_valid = vocab_size if tokenizer is None else min(tokenizer.num_tokens, vocab_size)
    return LoadedModel(
        model=network,
        config=network.config,
        path=folder,
        name=str(model) if str(model) in registry.MODELS else folder.name,
        eos_token_ids=_end_tokens(network, folder, tokenizer, num_valid=num_valid),
        vocab_size=vocab_size,
        num_valid_tokens=num_valid,
        max_context=_max_context(config, folder),
        dtype=torch_dtype,
        tokenizer=tokenizer,
        quantization=kind_held(network),
        origin=origin,
    )


def _load_network(folder: Path, *, dtype: str) -> tuple[Any, torch.dtype, str | None]:
    """The network, its dtype, and how its weights lie on disk where that is told."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig

    settings = read_settings(folder)
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        stored = getattr(config.get_text_config(), "dtype", None)
        wide = dtype == "float32" or (dtype == "auto" and stored in (None, torch.float32))
        torch_dtype = torch.float32 if wide else torch.bfloat16
        if settings is None:
            return _load_dense(folder, config, dtype=torch_dtype), torch_dtype, _gguf_origin(folder, torch_dtype)
        network, origin = _load_packed(folder, config, settings, dtype=torch_dtype)
        return network, torch_dtype, origin
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        raise ValueError(f"cannot load the model in {folder}: {first_line(error)}") from error


def _load_dense(folder: Path, config: Any, *, dtype: torch.dtype) -> Any:
    """By transformers, all of it."""
    from transformers import AutoModelForCausalLM

    with without_bars():
        network, report = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"the weights lack {', '.join(missing[:3])} ({len(missing)} in all): the copy is incomplete or "
            "config.json belongs to another model"
        )
    return network


def _load_packed(folder: Path, config: Any, settings: dict[str, Any], *, dtype: torch.dtype) -> tuple[Any, str | None]:
    """A checkpoint with a `quantization_config`, ours or another's, and what is told of how it lies on disk."""
    kept = str(dtype).removeprefix("torch.")
    if settings.get("quant_method") == METHOD:
        network, origin = load_quantised(folder, config=config, dtype=dtype), None
    else:
        reader = reader_for(settings)
        if isinstance(reader, str):
            require_package(settings, folder, reader)
            return _load_dense(folder, config, dtype=dtype), f"{settings.get('quant_method')}, run by transformers"
        network = load_foreign(folder, reader, config=config, dtype=dtype)
        origin = f"{reader.told}{'' if keeps_int8(settings) else f', expanded to {kept}'}"
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        network.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return network, origin


def _gguf_origin(folder: Path, dtype: torch.dtype) -> str | None:
    """Of a folder that was converted from a GGUF file."""
    source = registry.read_source(folder)
    if source is None:
        return None
    kinds = source.get("tensor_types") or {}
    listed = ", ".join(f"{count} in {kind}" for kind, count in kinds.items())
    return f"GGUF{f' ({listed})' if listed else ''}, expanded to {str(dtype).removeprefix('torch.')}"


def _end_tokens(network: Any, folder: Path, tokenizer: Tokenizer | None, *, num_valid: int) -> tuple[int, ...]:
    """Every id at which generation ends, without repetition: generation config, config, registry, tokenizer."""
    source = registry.read_source(folder) or {}
    entry = registry.MODELS.get(str(source.get("name")))
    candidates: list[int] = []
    for config in (getattr(network, "generation_config", None), network.config.get_text_config()):
        ends = getattr(config, "eos_token_id", None)
        if ends is not None:
            candidates.extend([ends] if isinstance(ends, int) else ends)
    candidates.extend(entry.eos_token_ids if entry else ())
    candidates.extend(tokenizer.eos_token_ids if tokenizer else ())
    return tuple(dict.fromkeys(int(end) for end in candidates if 0 <= end < num_valid))


def _max_context(config: Any, folder: Path) -> int:
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ValueError(f"config.json in {folder} does not say how long a context may be: set max_position_embeddings")


def _check_device(device: str | torch.device) -> torch.device:
    import torch

    try:
        checked = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={str(device)!r} is not a device: give cpu, cuda or cuda:N") from error
    if checked.type == "cuda" and (checked.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {checked} is not there ({torch.cuda.device_count()} CUDA devices): use device cpu")
    return checked


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: give a folder in the layout of transformers, or {_names()}")
    if not _has_weights(folder):
        raise ValueError(f"{folder} has no complete safetensors weights: add them (other weight formats are not read)")


def _has_weights(folder: Path) -> bool:
    """Whether all weight files are there: one file, or every shard that the index names."""
    if (folder / "model.safetensors").is_file():
        return True
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return all((folder / shard).is_file() for shard in set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError):
        return False


def _has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    return any((folder / name).is_file() for name in names)


def _convert_gguf(gguf: Path, *, progress: Progress | None) -> Path:
    """The converted folder of a user's GGUF file; the key changes when the file does."""
    if re.search(r"-\d{5}-of-\d{5}$", gguf.stem):
        raise ValueError(f"{gguf.name} is one part of a split GGUF file: merge the parts (llama-gguf-split --merge)")
    key = _file_key(gguf)
    root = registry.cache_dir()
    name = f"gguf-{re.sub(r'[^A-Za-z0-9.-]+', '_', gguf.stem)}-{key}"
    folder = root / "models" / name
    if registry.is_converted(folder):
        return folder
    try:
        with registry.locked(root, name, progress=progress):
            if not registry.is_converted(folder):
                origin = {"file": gguf.name, "bytes": gguf.stat().st_size}
                source = registry.make_source(sha256=_sha256(gguf), licence="as stated by the file", origin=origin)
                convert(gguf, folder, source=source, progress=progress)
    except OSError as error:
        raise ValueError(f"cannot convert {gguf} into {root}: {error}; free space or set DSPARK_CACHE") from error
    return folder


def _file_key(path: Path) -> str:
    """A short key of a file's name, size, time of change and first megabyte (a whole hash takes seconds a gigabyte)."""
    stat = path.stat()
    digest = hashlib.sha256(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns}:".encode())
    with open(path, "rb") as file:
        digest.update(file.read(_HEAD))
    return digest.hexdigest()[:12]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_HEAD):
            digest.update(chunk)
    return digest.hexdigest()


def _snapshot(hub_id: str) -> Path:
    """The local folder of a hub model: a complete cached one without asking the hub, else downloaded."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        cached = Path(huggingface_hub.snapshot_download(hub_id, local_files_only=True))
        if (cached / "config.json").is_file() and _has_weights(cached):
            return cached
    except LocalEntryNotFoundError:
        pass  # not cached: ask the hub
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(
            f"{hub_id!r} is not cached and cannot be fetched from the hub ({first_line(error)}): check the id and the "
            f"network, or work offline with a model folder, a .gguf file, or {_names()}"
        ) from error


def _names() -> str:
    return f"one of the packaged models ({', '.join(registry.MODELS)})"
