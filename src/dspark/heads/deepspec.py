"""DeepSpec's checkpoint format for DSpark heads: its config.json and ours, both ways. Its tensors have our names.
It must never let a head pass that would compute something else when read by the other side.

A config.json is transformers' configuration of the head's layers with the head's own keys beside it. Its
`target_layer_ids` count as ours do: l is the state after the 0-based layer l, hidden_states[l + 1] in transformers;
-1 the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.heads.config import HeadConfig

ARCHITECTURE = "Qwen3DSparkModel"
# DeepSpec's constructor asks for it; only its trainer uses it.
_NUM_ANCHORS = 512
_LAYER_KEYS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act max_position_embeddings rms_norm_eps rope_parameters rope_theta rope_scaling partial_rotary_factor "
    "original_max_position_embeddings attention_bias mlp_bias use_sliding_window sliding_window max_window_layers "
    "layer_types"
).split()


def read_config(values: Mapping[str, Any]) -> HeadConfig:
    """From a parsed config.json with architecture Qwen3DSparkModel."""
    need(values, "target_layer_ids", "mask_token_id", "block_size", "markov_rank", "enable_confidence_head")
    fields = layer_fields(values)
    ids = tuple(values["target_layer_ids"])
    return HeadConfig(
        **{**fields, "qk_norm": True},
        draft_vocab_size=fields["vocab_size"],
        target_layer_ids=ids,
        num_target_layers=values.get("num_target_layers") or least_layers(ids),
        block_size=values["block_size"],
        mask_token_id=values["mask_token_id"],
        **sequential_fields(values),
    )


def write_config(config: HeadConfig) -> dict[str, Any]:
    """The config.json of a head. ValueError where the format has no form for it."""
    check_exportable(config, whose="DeepSpec's")
    if config.kind != "dspark":
        raise ValueError("DeepSpec's format is written for DSpark heads only: save an eagle3 head as 'speculators'")
    if config.draft_vocab_size != config.vocab_size:
        raise ValueError("DeepSpec's format has no reduced vocabulary: save this head with format 'speculators'")
    if not config.sample_from_anchor:
        raise ValueError("DeepSpec's heads predict from the anchor: save this head with format 'speculators'")
    return {
        **layer_config(config),
        "architectures": [ARCHITECTURE],
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "num_anchors": _NUM_ANCHORS,
        **sequential_keys(config),
    }


def least_layers(ids: tuple[int, ...]) -> int:
    """Layers that a target has where nobody says how many: one more than the ids need, as heads leave the last out."""
    return max(ids, default=0) + 2


def need(values: Mapping[str, Any], *names: str) -> None:
    """ValueError naming the first of `names` that is not there."""
    for name in names:
        if values.get(name) is None:
            raise ValueError(f"config.json lacks {name}: add it, or copy the whole checkpoint again")


def sequential_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the Markov and confidence heads, whose keys DeepSpec and speculators share."""
    rank = values["markov_rank"]
    confidence = values["enable_confidence_head"]
    if rank:
        need(values, "markov_head_type")
    if confidence:
        need(values, "confidence_head_with_markov")
    return {
        "markov_rank": rank,
        "markov_type": values["markov_head_type"] if rank else "vanilla",
        "confidence": confidence,
        "confidence_with_markov": bool(confidence and values["confidence_head_with_markov"]),
        "confidence_temperatures": tuple(values.get("confidence_temperatures", ())),
    }


def sequential_keys(config: HeadConfig) -> dict[str, Any]:
    """The inverse of `sequential_fields`. The temperatures are a key of our own, which other readers pass over."""
    keys: dict[str, Any] = {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_type,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence and config.confidence_with_markov,
    }
    if config.confidence_temperatures:
        keys["confidence_temperatures"] = list(config.confidence_temperatures)
    return keys


def check_exportable(config: HeadConfig, *, whose: str) -> None:
    """ValueError for what exists only in our own format."""
    cure = "save it with format 'dspark'"
    if config.context != "fused":
        raise ValueError(f"{whose} format has no context '{config.context}': {cure}, or train with context 'fused'")
    if config.anchor_feature:
        raise ValueError(f"{whose} format has no anchor_feature: {cure}, or train with anchor_feature = false")
    if config.kind == "dspark" and config.mask_token_id is None:
        raise ValueError(f"{whose} format has no mask vector of the head's own: {cure}, or train with a mask_token_id")
    if config.kind == "dspark" and not config.qk_norm:
        raise ValueError(f"{whose} layers norm queries and keys: {cure}, or train with qk_norm = true")
    ids = list(config.target_layer_ids)
    if ids != sorted(set(ids)):
        raise ValueError(f"{whose} format has target_layer_ids in ascending order: {cure}, or train with them so")
    if ids[-1] == config.num_target_layers - 1:
        raise ValueError(f"{whose} readers refuse or norm the last layer's state: {cure}, or train without that layer")
    if config.qkv_bias != config.o_bias:
        raise ValueError(f"{whose} format has one switch for qkv_bias and o_bias: {cure}, or train with both alike")


def layer_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """HeadConfig's fields of the layers, from transformers' keys of Qwen3 or Llama, old or new, defaults filled in."""
    model_type = values.get("model_type", "qwen3")
    if model_type not in ("qwen3", "llama"):
        raise ValueError(f"layers of model_type {model_type!r} are not supported: use a head with qwen3 or llama ones")
    need(values, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if values.get("quantization_config"):
        raise ValueError("quantised weights of other formats are not read: use the checkpoint that was not quantised")
    parsed = _transformers_config(model_type, values)
    _check_layers(parsed)
    return {
        "hidden_size": parsed.hidden_size,
        "intermediate_size": parsed.intermediate_size,
        "num_layers": parsed.num_hidden_layers,
        "num_heads": parsed.num_attention_heads,
        "num_kv_heads": parsed.num_key_value_heads,
        "head_dim": parsed.head_dim,
        "vocab_size": parsed.vocab_size,
        "qk_norm": model_type == "qwen3",
        "qkv_bias": parsed.attention_bias,
        "o_bias": parsed.attention_bias,
        "rms_norm_eps": parsed.rms_norm_eps,
        "rope": {key: value for key, value in parsed.rope_parameters.items() if value is not None},
        "max_positions": parsed.max_position_embeddings,
    }


def _transformers_config(model_type: str, values: Mapping[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(model_type, **{key: values[key] for key in _LAYER_KEYS if key in values})
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"config.json is not a {model_type} configuration ({reason}): correct it") from error


def _check_layers(parsed: Any) -> None:
    cure = "use a head without it"
    if parsed.hidden_act != "silu":
        raise ValueError(f"hidden_act {parsed.hidden_act!r} is not supported: {cure} (silu)")
    if "sliding_attention" in (getattr(parsed, "layer_types", None) or ()):
        raise ValueError(f"sliding-window layers in a draft head are not supported: {cure}")
    if getattr(parsed, "mlp_bias", False):
        raise ValueError(f"mlp_bias is not supported: {cure}")
    rope = parsed.rope_parameters
    if any(isinstance(value, Mapping) for value in rope.values()) or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"rotary embeddings by layer type or of a part of the head are not supported: {cure}")


def layer_config(config: HeadConfig) -> dict[str, Any]:
    """transformers' keys of the head's layers, complete, so that no reader's defaults count."""
    keys = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope),
        "rope_theta": config.rope["rope_theta"],
        "attention_bias": config.qkv_bias,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    if not config.qk_norm:
        return {**keys, "mlp_bias": False}
    return {
        **keys,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_window_layers": config.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
    }
