"""Checkpoint: a draft head as a folder, in our own format, DeepSpec's or speculators'.
It must never return a head that does not fit its target, nor one with a tensor that the folder did not give.

A folder holds config.json, model.safetensors and, where known, provenance.json (how the head was made).

Our own config.json is HeadConfig with "dspark_head": 1 (the version), "embeddings_from_target" and "target_name". Where
embeddings_from_target is true, embed_tokens.weight and lm_head.weight are not stored: they are the target's rows
(lm_head those of `draft_ids`, which is stored as int32). A weight X stored as int8 has X_scale beside it, float32, one
a row.

Shapes: D hidden, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark.heads import deepspec, speculators
from dspark.heads.config import HeadConfig, head_config
from dspark.heads.eagle import EagleHead
from dspark.heads.semi_ar import SemiAutoregressiveHead

FORMATS = ("dspark", "deepspec", "speculators")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
VERSION = 1
WEIGHTS = "model.safetensors"
EMBED, OUTPUT, IDS, SCALE = "embed_tokens.weight", "lm_head.weight", "draft_ids", "_scale"


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """What of a target a head must fit. vocab_size: rows of its output. dtype: the one it computes in."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    dtype: torch.dtype = torch.float32


def make_head(config: HeadConfig) -> EagleHead | SemiAutoregressiveHead:
    """A head with fresh weights."""
    return EagleHead(config) if config.kind == "eagle3" else SemiAutoregressiveHead(config)


def save_head(
    head: nn.Module,
    folder: str | Path,
    *,
    format: str = "dspark",
    provenance: Mapping[str, Any] | None = None,
    target_name: str | None = None,
    store_embeddings: bool | None = None,
    dtype: str | None = None,
) -> None:
    """Write `head` as a checkpoint; ValueError where `format` has no form for it.

    target_name: hub id or folder of the target, for readers that look it up. store_embeddings false leaves the
    target's own rows out; the default stores them, but not for DSpark heads in our own format. An eagle3 head's output
    may be trained, and a reduced vocabulary's is not found by all readers: in speculators' format both are stored
    always. dtype: of the stored weights, the head's by default, one of DTYPES; in our own format also "int8" for the
    matrices of the layers and of the Markov head.
    """
    _check_request(format, dtype)
    config, draft_ids = _parts(head)
    if store_embeddings is None:
        store_embeddings = format != "dspark" or config.kind == "eagle3"
    tensors = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    if not store_embeddings:
        del tensors[EMBED]
        if format == "dspark" or (config.kind == "dspark" and config.draft_vocab_size == config.vocab_size):
            del tensors[OUTPUT]
    if dtype in DTYPES:
        tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
    stored = {"dtype": str(tensors["norm.weight"].dtype).removeprefix("torch.")}
    if format == "dspark":
        own = {"dspark_head": VERSION, "embeddings_from_target": not store_embeddings, "target_name": target_name}
        values = {**config.as_dict(), **own}
        tensors = {**(_quantise(tensors) if dtype == "int8" else tensors), IDS: draft_ids.to(torch.int32)}
    elif format == "deepspec":
        values = {**deepspec.write_config(config), **stored}
    else:
        values = {**speculators.write_config(config, target_name=target_name), **stored}
        tensors = speculators.write_tensors(config, tensors, draft_ids)
    _write(Path(folder), values, tensors, provenance)


def save_values(
    head: nn.Module,
    folder: str | Path,
    values: Mapping[str, Any],
    *,
    dtype: str,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write `head` with speculators' tensors, in one of DTYPES, under a config.json of the caller's `values`: for
    readers that share the names and not the configuration."""
    _check_request("speculators", dtype)
    config, draft_ids = _parts(head)
    tensors = {name: tensor.detach().cpu().to(DTYPES[dtype]) for name, tensor in head.state_dict().items()}
    tensors = speculators.write_tensors(config, tensors, draft_ids)
    _write(Path(folder), {**values, "dtype": dtype}, tensors, provenance)


def _parts(head: nn.Module) -> tuple[HeadConfig, Tensor]:
    config, draft_ids = head.config, head.draft_ids
    assert isinstance(config, HeadConfig) and isinstance(draft_ids, Tensor)
    return config, draft_ids.cpu()


def _check_request(format: str, dtype: str | None) -> None:
    if format not in FORMATS:
        raise ValueError(f"format={format!r} of a draft head is not known: use one of {', '.join(FORMATS)}")
    if dtype is not None and dtype not in (*DTYPES, "int8"):
        raise ValueError(f"dtype={dtype!r} of a draft head is not known: use one of {', '.join(DTYPES)}, int8")
    if dtype == "int8" and format != "dspark":
        raise ValueError(f"{format}'s format has no int8 weights: use a float dtype, or format 'dspark'")


def load_head(
    folder: str | Path,
    *,
    embed: Tensor | None = None,
    head: Tensor | None = None,
    target: TargetShape | None = None,
    dtype: torch.dtype | None = None,
) -> EagleHead | SemiAutoregressiveHead:
    """The head in `folder`, whichever format it has, in eval mode, its embeddings and output frozen.

    embed and head: the target's (V, D) embeddings and output, for a checkpoint that leaves them out; a head whose
    stored rows are the same shares them. target: what the head must fit. dtype: the target's by default, else float32.
    Every fault of the folder, and a head for another target, is a ValueError of one line.
    """
    try:
        values = _read_json(Path(folder) / "config.json")
        config, rename, optional = _read_config(values, target)
        _check_config(config, target)
        tensors = rename(_dequantise(_read_tensors(Path(folder))))
        ids = _draft_ids(config, tensors)
        _share(config, tensors, ids, embed=embed, head=head, optional=optional)
        dtype = dtype or (torch.float32 if target is None else target.dtype)
        return _assemble(config, tensors, ids, dtype)
    except ValueError as error:
        raise ValueError(f"draft head in {folder}: {error}") from error


def is_head_folder(folder: str | Path) -> bool:
    """Whether config.json in `folder` is a draft head's, in any of the formats; ValueError where it is not JSON."""
    path = Path(folder) / "config.json"
    return path.is_file() and _format_of(_read_json(path)) is not None


def _format_of(values: Mapping[str, Any]) -> str | None:
    if "dspark_head" in values:
        return "dspark"
    if "speculators_model_type" in values:
        return "speculators"
    architectures = values.get("architectures")
    return "deepspec" if isinstance(architectures, list) and deepspec.ARCHITECTURE in architectures else None


def _read_config(
    values: dict[str, Any], target: TargetShape | None
) -> tuple[HeadConfig, Callable[[dict[str, Tensor]], dict[str, Tensor]], bool]:
    """HeadConfig, what gives the tensors our names, and whether they may lack the embeddings and the output."""
    format = _format_of(values)
    if format is None:
        raise ValueError(
            f"config.json with architectures {values.get('architectures')} is not of a draft head: give a folder made "
            f"by dspark, DeepSpec ({deepspec.ARCHITECTURE}) or speculators"
        )
    try:
        if format == "dspark":
            config, from_target = _read_own(dict(values))
            return config, lambda tensors: tensors, from_target
        if format == "speculators":
            num_layers = None if target is None else target.num_layers
            config = speculators.read_config(values, num_target_layers=num_layers)
            return config, lambda tensors: speculators.read_tensors(config, tensors), True
        config = deepspec.read_config(values)
        return config, lambda tensors: {**tensors, IDS: torch.arange(config.vocab_size)}, True
    except (TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"config.json holds a value of the wrong type ({error}): correct it") from error


def _read_own(values: dict[str, Any]) -> tuple[HeadConfig, bool]:
    """Our own format's config.json -> HeadConfig and embeddings_from_target."""
    version, from_target = values.pop("dspark_head"), values.pop("embeddings_from_target", None)
    values.pop("target_name", None)
    if version != VERSION:
        raise ValueError(f"version {version!r} of the format is not known: this dspark reads {VERSION}, get another")
    if not isinstance(from_target, bool):
        raise ValueError("config.json lacks embeddings_from_target: add it, true or false")
    return head_config(values), from_target


def _check_config(config: HeadConfig, target: TargetShape | None) -> None:
    _check_types(config)
    mask = config.mask_token_id
    if mask is not None and not 0 <= mask < config.vocab_size:
        raise ValueError(f"mask_token_id={mask} is no id of {config.vocab_size} tokens: correct config.json")
    if target is None:
        return
    cure = "give the head that was made for this target"
    pairs = (
        ("a hidden size of {}", config.hidden_size, target.hidden_size),
        ("{} layers", config.num_target_layers, target.num_layers),
        ("a vocabulary of {}", config.vocab_size, target.vocab_size),
    )
    for words, ours, theirs in pairs:
        if ours != theirs:
            raise ValueError(f"it is for a target with {words.format(ours)}, this one has {theirs}: {cure}")


def _check_types(config: HeadConfig) -> None:
    """The types that HeadConfig takes on trust from code."""
    right = {field.name: _has_type_of(getattr(config, field.name), field.default) for field in fields(config)}
    right["mask_token_id"] = config.mask_token_id is None or _has_type_of(config.mask_token_id, 0)
    right["target_layer_ids"] = all(_has_type_of(i, 0) for i in config.target_layer_ids)
    right["confidence_temperatures"] = all(_has_type_of(t, 0.0) for t in config.confidence_temperatures)
    right["rope"] = isinstance(config.rope, Mapping) and {"rope_type", "rope_theta"} <= set(config.rope)
    if wrong := [name for name in right if not right[name]]:
        raise ValueError(f"{wrong[0]}={getattr(config, wrong[0])!r} in config.json cannot be used: correct it")


def _has_type_of(value: Any, like: Any) -> bool:
    if isinstance(like, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(like, bool)
    if isinstance(like, float):
        return isinstance(value, (int, float))
    return not isinstance(like, (int, str)) or isinstance(value, type(like))


def _draft_ids(config: HeadConfig, tensors: dict[str, Tensor]) -> Tensor:
    """(W,) int64, checked, taken out of `tensors`."""
    ids = tensors.pop(IDS, None)
    num, most = config.draft_vocab_size, config.vocab_size
    if ids is None:
        raise ValueError(f"the weights lack {IDS}: copy the whole checkpoint again")
    if ids.is_floating_point() or ids.shape != (num,):
        raise ValueError(f"{IDS} is not {num} whole numbers: config.json belongs to another head")
    ids = ids.long()
    if int(ids.min()) < 0 or int(ids.max()) >= most or len(ids.unique()) != num:
        raise ValueError(f"{IDS} is not {num} different ids below {most}: copy the checkpoint again")
    return ids


def _share(
    config: HeadConfig,
    tensors: dict[str, Tensor],
    ids: Tensor,
    *,
    embed: Tensor | None,
    head: Tensor | None,
    optional: bool,
) -> None:
    """Put the target's rows into `tensors` where they are missing, and where they are the same."""
    whole = config.draft_vocab_size == config.vocab_size and torch.equal(ids, torch.arange(len(ids)))
    for name, given, argument in ((EMBED, embed, "embed"), (OUTPUT, head, "head")):
        stored = tensors.get(name)
        if given is not None and given.shape != (config.vocab_size, config.hidden_size):
            raise ValueError(
                f"the target's weights given as {argument} are {tuple(given.shape)}, it needs "
                f"{(config.vocab_size, config.hidden_size)}: give the head that was made for this target"
            )
        if stored is None and optional:
            if given is None:
                raise ValueError(f"{name} is not stored, it is the target's: load the head together with its target")
            rows = given.detach()
            tensors[name] = rows if name == EMBED or whole else rows[ids.to(rows.device)]
        elif stored is not None and given is not None and (name == EMBED or whole):
            if stored.shape == given.shape and torch.equal(stored.to(given), given):
                tensors[name] = given.detach()


def _assemble(
    config: HeadConfig, tensors: dict[str, Tensor], ids: Tensor, dtype: torch.dtype
) -> EagleHead | SemiAutoregressiveHead:
    with torch.device("meta"):
        module = make_head(config)
    wanted = module.state_dict()
    _check_names(set(wanted), set(tensors))
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape or not tensor.is_floating_point():
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}, config.json asks for "
                f"{tuple(wanted[name].shape)} floats: config.json belongs to another head"
            )
    module.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)
    module.register_buffer(IDS, ids, persistent=False)
    module.embed_tokens.requires_grad_(False)
    module.lm_head.requires_grad_(False)
    return module.eval()


def _check_names(wanted: set[str], found: set[str]) -> None:
    for names, words in ((wanted - found, "the weights lack"), (found - wanted, "the weights have beside the head's")):
        if names:
            first = ", ".join(sorted(names)[:3])
            raise ValueError(f"{words} {first} ({len(names)} in all): config.json is another head's, or a file is lost")


def _quantise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of the layers and of the Markov head as int8, symmetric, with one scale a row."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not name.startswith(("layers.", "markov_head.")):
            found[name] = tensor
            continue
        scale = tensor.float().abs().amax(dim=1) / 127
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        found[name] = torch.round(tensor.float() / scale.unsqueeze(1)).clamp(-127, 127).to(torch.int8)
        found[name + SCALE] = scale
    return found


def _dequantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_quantise`, in float32."""
    for name in [name for name in tensors if name.endswith(".weight" + SCALE)]:
        scale, weight = tensors.pop(name), tensors.get(name.removesuffix(SCALE))
        if weight is None or weight.dtype != torch.int8 or scale.shape != weight.shape[:1]:
            raise ValueError(f"{name} does not belong to an int8 matrix of its rows: copy the checkpoint again")
        tensors[name.removesuffix(SCALE)] = weight.float() * scale.float().unsqueeze(1)
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read ({error.strerror}): give the folder of a draft head") from error
    except ValueError as error:  # not UTF-8, not JSON
        raise ValueError(f"{path.name} is not JSON ({error}): copy the checkpoint again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} is not a JSON object: copy the checkpoint again")
    return values


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors, from one file or the shards that an index names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / (WEIGHTS + ".index.json")
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and index.is_file():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise ValueError(f"{index.name} has no weight_map: copy the checkpoint again")
        names = sorted({Path(str(name)).name for name in shards.values()})
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            tensors |= load_file(folder / name)
        except OSError as error:
            raise ValueError(f"{name} cannot be read ({error.strerror or 'no such file'}): copy it there") from error
        except SafetensorError as error:
            raise ValueError(f"{name} is damaged or cut short ({error}): copy it again") from error
    return tensors


def _write(
    folder: Path, values: Mapping[str, Any], tensors: Mapping[str, Tensor], provenance: Mapping[str, Any] | None
) -> None:
    """Each file appears whole or not at all; config.json last, and a provenance that is another head's goes."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    part = folder / (WEIGHTS + ".part")
    # clone: tied weights are stored twice, under both names
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, part)
    part.chmod(0o644)  # the writer makes it private
    os.replace(part, folder / WEIGHTS)
    (folder / "provenance.json").unlink(missing_ok=True)
    if provenance is not None:
        _write_json(folder / "provenance.json", provenance)
    _write_json(folder / "config.json", values)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(part, path)


def read_head_config(folder: str | Path) -> HeadConfig:
    """The shape of the head in `folder`, without its weights. Raises ValueError."""
    try:
        return _read_config(_read_json(Path(folder) / "config.json"), None)[0]
    except ValueError as error:
        raise ValueError(f"draft head in {folder}: {error}") from error
