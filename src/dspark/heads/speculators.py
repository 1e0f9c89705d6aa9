"""speculators' checkpoint format for DSpark, DFlash and EAGLE-3 heads: config.json and tensors, both ways.
It must never let a head pass that would compute something else when read by the other side.

Layer ids there are one above ours: k is the state after k layers, hidden_states[k] in transformers, 0 the embeddings.
A reduced vocabulary is `t2d`, a mask over target ids, and `d2t`, by how much each draft id is below its target id; rows
of the output are in ascending order of target ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dspark.heads.config import HeadConfig
from dspark.heads.deepspec import (
    check_exportable,
    layer_config,
    layer_fields,
    least_layers,
    need,
    sequential_fields,
    sequential_keys,
)

_ARCHITECTURES = {"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator", "eagle3": "Eagle3Speculator"}
_EAGLE_IDS = "eagle_aux_hidden_state_layer_ids"
# What vLLM counts on where the layers' configuration does not say how many states are fused.
_USUAL_EAGLE_STATES = 3
# Copies of the target's weights that its training keeps beside the head's.
_NOT_OURS = ("verifier_lm_head.weight", "verifier_norm.weight")
_BY_DRAFT_ID = ("lm_head.weight", "markov_head.markov_w2.weight")


def read_config(values: Mapping[str, Any], *, num_target_layers: int | None) -> HeadConfig:
    """From a parsed config.json. The format does not say how many layers the target has: where the caller does not
    either, it is taken to have as many as the ids need and one more."""
    kind = values["speculators_model_type"]
    if kind not in _ARCHITECTURES:
        raise ValueError(f"speculators_model_type {kind!r} is not supported: use one of {', '.join(_ARCHITECTURES)}")
    layers = values.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise ValueError("config.json lacks transformer_layer_config: copy the whole checkpoint again")
    need(values, "draft_vocab_size")
    fields = layer_fields(layers)
    size = values.get("target_hidden_size")
    if size is not None and size != fields["hidden_size"]:
        raise ValueError(f"a head of hidden size {fields['hidden_size']} for a target of {size} is not supported")
    read = _read_eagle if kind == "eagle3" else _read_block
    found = read(values, num_target_layers)
    stated = num_target_layers or values.get("num_target_layers") or least_layers(found["target_layer_ids"])
    return HeadConfig(**{**fields, **found}, draft_vocab_size=values["draft_vocab_size"], num_target_layers=stated)


def _read_block(values: Mapping[str, Any], num_target_layers: int | None) -> dict[str, Any]:
    """Fields of a DSpark or DFlash head, whose layers always norm queries and keys."""
    need(values, "aux_hidden_state_layer_ids", "mask_token_id", "block_size")
    from_anchor = _samples_from_anchor(values)
    if values["speculators_model_type"] == "dspark":
        need(values, "markov_rank", "enable_confidence_head")
        sequential = sequential_fields(values)
    else:
        sequential = {"confidence": False}
    if sequential.get("markov_type") == "rnn" and not from_anchor:
        raise ValueError("markov_head_type 'rnn' with sample_from_anchor false is not supported: use another head")
    return {
        **sequential,
        "qk_norm": True,
        "target_layer_ids": tuple(i - 1 for i in values["aux_hidden_state_layer_ids"]),
        "mask_token_id": values["mask_token_id"],
        "sample_from_anchor": from_anchor,
        "block_size": values["block_size"] if from_anchor else values["block_size"] - 1,
    }


def _samples_from_anchor(values: Mapping[str, Any]) -> bool:
    """Readers differ in what they take where the key is missing; the number of drafted tokens settles it."""
    stated = values.get("sample_from_anchor")
    if isinstance(stated, bool):
        return stated
    missing = values["block_size"] - (_speculative_tokens(values) or 0)
    if missing not in (0, 1):
        raise ValueError("config.json does not say whether the anchor predicts: add sample_from_anchor, true or false")
    return missing == 0


def _speculative_tokens(values: Mapping[str, Any]) -> int | None:
    methods = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens")


def _read_eagle(values: Mapping[str, Any], num_target_layers: int | None) -> dict[str, Any]:
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if values.get(name):
            raise ValueError(f"{name} of an eagle3 head is not supported: use a head without it")
    ids = values.get(_EAGLE_IDS)
    if not ids:
        if num_target_layers is None:
            raise ValueError(f"config.json lacks {_EAGLE_IDS}: add it, or load the head together with its target")
        ids = (2, num_target_layers // 2, num_target_layers - 3)
    return {
        "kind": "eagle3",
        "confidence": False,
        "target_layer_ids": tuple(i - 1 for i in ids),
        "block_size": _speculative_tokens(values) or 5,
        "norm_before_residual": bool(values.get("norm_before_residual", False)),
    }


def write_config(config: HeadConfig, *, target_name: str | None) -> dict[str, Any]:
    """The config.json of a head. ValueError where the format has no form for it."""
    check_exportable(config, whose="speculators'")
    if config.markov_type == "rnn" and config.markov_rank and not config.sample_from_anchor:
        raise ValueError("markov_type 'rnn' with sample_from_anchor false has another meaning there: use 'dspark'")
    kind = kind_of(config)
    ids = [i + 1 for i in config.target_layer_ids]
    layers = layer_config(config)
    keys: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "draft_vocab_size": config.draft_vocab_size,
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
        "speculators_config": _proposal(kind, config.block_size, target_name),
    }
    if kind == "eagle3":
        if len(ids) != _USUAL_EAGLE_STATES:
            layers["num_aux_hidden_states"] = len(ids)
        return {**keys, _EAGLE_IDS: ids, "norm_before_residual": config.norm_before_residual}
    keys |= {
        "aux_hidden_state_layer_ids": ids,
        "block_size": config.num_rows,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
    }
    return keys if kind == "dflash" else {**keys, **sequential_keys(config)}


def kind_of(config: HeadConfig) -> str:
    """What the format calls such a head."""
    plain = not config.markov_rank and not config.confidence
    return "eagle3" if config.kind == "eagle3" else "dflash" if plain else "dspark"


def _proposal(kind: str, num_tokens: int, target_name: str | None) -> dict[str, Any]:
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"architectures": [], "name_or_path": target_name},
    }


def read_tensors(config: HeadConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By our names: `draft_ids` for t2d and d2t, without copies of the target's weights."""
    tensors = {name: tensor for name, tensor in tensors.items() if name not in _NOT_OURS}
    mask, offsets = tensors.pop("t2d", None), tensors.pop("d2t", None)
    num = config.draft_vocab_size
    if num == config.vocab_size:
        return {**tensors, "draft_ids": torch.arange(num)}
    if offsets is None:
        raise ValueError("the weights lack d2t, which maps the reduced vocabulary: copy the whole checkpoint again")
    if offsets.shape != (num,) or offsets.is_floating_point():
        raise ValueError(f"d2t is not {num} whole numbers: config.json belongs to another head")
    ids = torch.arange(num) + offsets.long()
    if mask is not None and not torch.equal(mask.nonzero().flatten(), ids.sort().values):
        raise ValueError("t2d and d2t name different tokens: copy the whole checkpoint again")
    return {**tensors, "draft_ids": ids}


def write_tensors(config: HeadConfig, tensors: dict[str, Tensor], draft_ids: Tensor) -> dict[str, Tensor]:
    """By their names, rows of the output in ascending order of target ids."""
    ids, order = draft_ids.sort()
    tensors = {name: tensor[order] if name in _BY_DRAFT_ID else tensor for name, tensor in tensors.items()}
    if config.draft_vocab_size == config.vocab_size:
        return tensors
    mask = torch.zeros(config.vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {**tensors, "t2d": mask, "d2t": ids - torch.arange(len(ids))}
