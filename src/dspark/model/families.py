"""extract: a loaded transformers model of a known family as DecoderWeights.
It must never copy a family's code: a family is a row of facts, and what a row cannot say is refused with a reason.

Shapes: D hidden, H heads, G key-value heads, E head_dim, F intermediate, N positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dspark.model.quantised import QuantisedLinear, Weight, join
from dspark.model.weights import DecoderWeights, LayerWeights


@dataclass(frozen=True, kw_only=True)
class Family:
    """What sets a family apart.

    class_name: of the causal LM. norm_offset: added to the stored norm weights. sandwich: norms also after attention
    and MLP, under other names. window: "none", "all" layers, or by the configuration's "layer_types".
    """

    class_name: str
    norm_offset: float = 0.0
    sandwich: bool = False
    window: str = "none"


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(class_name="LlamaForCausalLM"),
        "mistral": Family(class_name="MistralForCausalLM", window="all"),
        "qwen2": Family(class_name="Qwen2ForCausalLM", window="layer_types"),
        "qwen3": Family(class_name="Qwen3ForCausalLM", window="layer_types"),
        "gemma3_text": Family(class_name="Gemma3ForCausalLM", norm_offset=1.0, sandwich=True, window="layer_types"),
    }
)
_ACTIVATIONS = MappingProxyType({"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"})
# Frequencies that depend on the position alone, so that a table holds them. Not here: "dynamic" and "longrope", which
# depend on the length of the whole context (and would make a cached key stale as it grows).
_STATIC_ROPES = frozenset({"default", "linear", "llama3", "yarn"})


def extract(model: Any, *, max_context: int | None = None) -> tuple[DecoderWeights | None, str]:
    """(weights, "") or (None, why this model is not covered).

    Query, key and value projections are joined into one tensor, so are gate and up; the model's own parameters become
    views of the joined tensors, so nothing is held twice and the model goes on working. `max_context` limits the
    rotary tables (default: the configuration's max_position_embeddings).
    """
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        return None, f"the fast paths do not cover model type {model.config.model_type}"
    reason = _refusal(model, family)
    if reason:
        return None, f"the fast paths do not cover this {model.config.model_type}: {reason}"
    config, inner = model.config, model.model
    tables, rope_of = _rope_tables(model, max_context or config.max_position_embeddings)
    windows = _windows(config, family)
    layers = [_layer(layer, family, windows[i], rope_of[i]) for i, layer in enumerate(inner.layers)]
    attention = inner.layers[0].self_attn
    scale = getattr(inner.embed_tokens, "embed_scale", None)
    embed, head = inner.embed_tokens.weight.detach(), _weight(model.lm_head)
    return (
        DecoderWeights(
            layers=layers,
            embed=embed,
            head=embed if isinstance(head, Tensor) and head.data_ptr() == embed.data_ptr() else head,
            norm=_norm(inner.norm, family),
            rope_tables=tables,
            num_heads=int(config.num_attention_heads),
            num_kv_heads=int(config.num_key_value_heads),
            head_dim=int(attention.head_dim),
            activation=_ACTIVATIONS[_activation(config)],
            eps=float(config.rms_norm_eps),
            attn_scale=float(attention.scaling),
            embed_scale=1.0 if scale is None else float(scale.to(embed.dtype)),
            logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        ),
        "",
    )


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _refusal(model: Any, family: Family) -> str:
    """Why the description does not hold for this model; "" when it does."""
    config = model.config
    if type(model).__name__ != family.class_name:
        return f"its class is {type(model).__name__}, not {family.class_name}"
    if _activation(config) not in _ACTIVATIONS:
        return f"activation {_activation(config)}"
    if getattr(config, "attn_logit_softcapping", None):
        return "capped attention scores"
    if getattr(config, "use_bidirectional_attention", False):
        return "bidirectional attention"
    if family.window == "all" and getattr(config, "layer_types", None):
        return "layer types that the model's own code does not follow"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"layers with {', '.join(sorted(kinds))}"
    if ropes := _rope_types(model) - _STATIC_ROPES:
        return f"rotary embeddings of type {', '.join(sorted(ropes))}"
    rotated = _rope_tables(model, 1)[0][0][0].shape[1]
    if rotated != model.model.layers[0].self_attn.head_dim:
        return f"rotary embeddings of {rotated} elements of each head"
    for name, module in model.model.layers.named_modules():
        if name.endswith("_proj") and type(module) not in (nn.Linear, QuantisedLinear):
            return f"{name} is a {type(module).__name__}"
        if name.endswith(("gate_proj", "up_proj", "down_proj")) and module.bias is not None:
            return "biases in the MLP"
    if model.lm_head.bias is not None:
        return "a bias in the head"
    if len({parameter.dtype for parameter in model.parameters()}) > 1:
        return "parameters of several dtypes"
    return ""


def _rope_types(model: Any) -> set[str]:
    kinds = model.model.rotary_emb.rope_type
    return set(kinds.values()) if isinstance(kinds, dict) else {kinds}


def _rope_tables(model: Any, num_positions: int) -> tuple[list[tuple[Tensor, Tensor]], list[int]]:
    """Tables (cos, sin), each (N, E) float32, made by the model's own rotary module; and each layer's table."""
    rotary = model.model.rotary_emb
    num_layers = len(model.model.layers)
    kinds: list[str | None] = [None] * num_layers
    if isinstance(rotary.rope_type, dict):
        kinds = list(model.config.layer_types[:num_layers])
    names = sorted(set(kinds), key=str)
    device = model.model.embed_tokens.weight.device
    positions = torch.arange(num_positions, device=device)[None]
    probe = torch.empty(0, dtype=torch.float32, device=device)
    tables = []
    with torch.no_grad():
        for name in names:
            cos, sin = rotary(probe, positions) if name is None else rotary(probe, positions, name)
            tables.append((cos[0].contiguous(), sin[0].contiguous()))
    return tables, [names.index(kind) for kind in kinds]


def _windows(config: Any, family: Family) -> list[int]:
    """Each layer's attention window, 0 for full attention."""
    window = int(getattr(config, "sliding_window", None) or 0)
    if family.window == "none":
        window = 0
    if family.window == "layer_types":
        return [window if kind == "sliding_attention" else 0 for kind in config.layer_types]
    return [window] * int(config.num_hidden_layers)


def _norm(module: Any, family: Family) -> Tensor:
    return module.weight.detach().float() + family.norm_offset


def _layer(layer: Any, family: Family, window: int, rope: int) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    if family.sandwich:
        post_attn, mlp_norm, post_mlp = (
            layer.post_attention_layernorm,
            layer.pre_feedforward_layernorm,
            layer.post_feedforward_layernorm,
        )
    else:
        post_attn, mlp_norm, post_mlp = None, layer.post_attention_layernorm, None
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    return LayerWeights(
        attn_norm=_norm(layer.input_layernorm, family),
        qkv=_join_weights(qkv),
        qkv_bias=None if qkv[0].bias is None else _join([linear.bias for linear in qkv]),
        q_norm=None if q_norm is None else _norm(q_norm, family),
        k_norm=None if k_norm is None else _norm(k_norm, family),
        o=_weight(attention.o_proj),
        o_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.detach(),
        post_attn_norm=None if post_attn is None else _norm(post_attn, family),
        mlp_norm=_norm(mlp_norm, family),
        gate_up=_join_weights([mlp.gate_proj, mlp.up_proj]),
        down=_weight(mlp.down_proj),
        post_mlp_norm=None if post_mlp is None else _norm(post_mlp, family),
        window=window,
        rope=rope,
    )


def _weight(linear: Any) -> Weight:
    return linear.quantised if isinstance(linear, QuantisedLinear) else linear.weight.detach()


def _join_weights(linears: list[Any]) -> Weight:
    if all(isinstance(linear, QuantisedLinear) for linear in linears):
        return join([linear.quantised for linear in linears])
    if any(isinstance(linear, QuantisedLinear) for linear in linears):
        return torch.cat([linear.weight.detach() for linear in linears])
    return _join([linear.weight for linear in linears])


def _join(parameters: list[nn.Parameter]) -> Tensor:
    """The parameters one after another along their first dimension; they become views of the result."""
    joined = _already_joined(parameters)
    if joined is None:
        joined = torch.cat([parameter.detach() for parameter in parameters])
        start = 0
        for parameter in parameters:
            parameter.data = joined[start : start + parameter.shape[0]]
            start += parameter.shape[0]
    return joined


def _already_joined(parameters: list[nn.Parameter]) -> Tensor | None:
    """The tensor an earlier call joined them into, if these are its views."""
    first, size = parameters[0], 0
    for parameter in parameters:
        here = first.storage_offset() + size
        same = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or parameter.storage_offset() != here or not parameter.is_contiguous():
            return None
        size += parameter.numel()
    rows = sum(parameter.shape[0] for parameter in parameters)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
