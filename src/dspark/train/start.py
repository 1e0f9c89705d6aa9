"""Where a head's weights come from before training: the target's own, or random.
It must never share storage with the target: training changes the head alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dspark.heads.checkpoint import load_head, make_head
from dspark.heads.config import HeadConfig
from dspark.model.weights import DecoderWeights, LayerWeights, dense
from dspark.train.answers import Example
from dspark.train.recipe import HeadRecipe


def config_for(
    recipe: HeadRecipe, weights: DecoderWeights, *, rope: dict[str, Any], draft_vocab_size: int
) -> HeadConfig:
    """The configuration of a new head for a target. Raises ValueError where the recipe does not fit the target."""
    first = weights.layers[0]  # its shape is every layer's
    target = recipe.context == "target"
    if target and recipe.kind == "eagle3":
        raise ValueError("an eagle3 head fuses the target's states: use head.context='fused'")
    if target:
        _check_copyable(weights, recipe.layers)
    return HeadConfig(
        kind=recipe.kind,
        context=recipe.context,
        hidden_size=weights.hidden_size,
        intermediate_size=recipe.intermediate_size or first.down.shape[1],
        num_layers=len(recipe.layers) if target else 1 if recipe.kind == "eagle3" else recipe.num_layers,
        num_heads=weights.num_heads,
        num_kv_heads=weights.num_kv_heads,
        head_dim=weights.head_dim,
        vocab_size=weights.vocab_size,
        draft_vocab_size=draft_vocab_size,
        block_size=recipe.block_size,
        target_layer_ids=recipe.layers,
        num_target_layers=len(weights.layers),
        mask_token_id=None if target else weights.vocab_size - 1,
        anchor_feature=recipe.anchor_feature and target,
        markov_rank=recipe.markov_rank if recipe.kind == "dspark" else 0,
        markov_type=recipe.markov_type,
        confidence=recipe.confidence and recipe.kind == "dspark",
        confidence_with_markov=recipe.markov_rank > 0,
        # A head with weights of its own has DeepSpec's form, so that other engines load it.
        qk_norm=first.q_norm is not None if target else recipe.kind == "dspark",
        qkv_bias=target and first.qkv_bias is not None,
        o_bias=target and first.o_bias is not None,
        rms_norm_eps=weights.eps,
        rope=rope,
        max_positions=weights.max_context,
    )


def rope_of(config: Any) -> dict[str, Any]:
    """Rope parameters of a transformers model's layers with full attention."""
    rope = dict(config.get_text_config().rope_parameters)
    return rope if "rope_type" in rope else dict(rope["full_attention"])


def _check_copyable(weights: DecoderWeights, layers: Sequence[int]) -> None:
    if any(not 0 <= i < len(weights.layers) for i in layers):
        raise ValueError(f"head.layers={list(layers)}: the target has layers 0 to {len(weights.layers) - 1}")
    chosen = [weights.layers[i] for i in layers]
    reasons = {
        "norms after attention and MLP": any(layer.post_attn_norm is not None for layer in chosen),
        "sliding windows": any(layer.window for layer in chosen),
        "several rotary tables": len(weights.rope_tables) > 1,
        "scaled embeddings": weights.embed_scale != 1.0,
        "an activation other than silu": weights.activation != "silu",
        "its own attention scale": abs(weights.attn_scale - weights.head_dim**-0.5) > 1e-6,
        "capped logits": weights.logit_softcap != 0.0,
    }
    if found := [name for name, holds in reasons.items() if holds]:
        raise ValueError(
            f"a head cannot start from this target's layers ({', '.join(found)}): use head.context='fused'"
        )


def draft_vocabulary(examples: Sequence[Example], vocab_size: int, size: int) -> Tensor:
    """Target ids, ascending, of the draft's tokens: those of the training answers by count, then of the prompts, then
    the lowest ids (frequent ones in a BPE vocabulary). size 0 or >= vocab_size: all."""
    if size == 0 or size >= vocab_size:
        return torch.arange(vocab_size)
    answers: Counter[int] = Counter()
    prompts: Counter[int] = Counter()
    for example in examples:
        answers.update(example.tokens[example.num_prompt :])
        prompts.update(example.tokens[: example.num_prompt])
    ranked = [token for counts in (answers, prompts) for token, _ in counts.most_common()]
    chosen = list(dict.fromkeys([*ranked, *range(vocab_size)]))[:size]
    return torch.tensor(sorted(chosen))


def new_head(config: HeadConfig, weights: DecoderWeights, draft_ids: Tensor, *, seed: int) -> Any:
    """Random weights by `seed`; embeddings, output rows and the final norm are the target's; in context "target" the
    layers too. The Markov bias starts at 0 and the anchor's feature without effect."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head: Any = make_head(config)
    state = head.state_dict()
    state["embed_tokens.weight"] = weights.embed
    output = dense(weights.head)
    state["lm_head.weight"] = output[draft_ids.to(output.device)]
    state["norm.weight"] = weights.norm
    if config.context == "target":
        for i, layer in enumerate(config.target_layer_ids):
            state |= {f"layers.{i}.{name}": tensor for name, tensor in _layer_state(weights.layers[layer], config)}
    head.load_state_dict({name: tensor.detach().float().clone() for name, tensor in state.items()})
    head.draft_ids = draft_ids.clone()
    with torch.no_grad():
        if config.kind == "eagle3":
            return head
        if config.mask_token_id is None:
            head.mask_embedding.copy_(weights.embed.float().mean(dim=0))
        if config.anchor_feature:
            head.feature_proj.weight.zero_()
        if head.markov_head is not None:
            head.markov_head.markov_w1.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(seed))
            head.markov_head.markov_w2.weight.zero_()
    return head


def finished_head(folder: str, config: HeadConfig, weights: DecoderWeights) -> Any:
    """The head in `folder`, in float32, to be trained further; it must be what `config` says but for its draft
    vocabulary and calibration. Raises ValueError."""
    head = load_head(folder, embed=weights.embed, head=dense(weights.head), dtype=torch.float32)
    free = {"confidence_temperatures": (), "draft_vocab_size": 0}
    found, wanted = head.config.as_dict() | free, config.as_dict() | free
    if differing := sorted(name for name in wanted if found[name] != wanted[name]):
        told = ", ".join(f"{name} is {found[name]!r}, not {wanted[name]!r}" for name in differing)
        raise ValueError(f"head.start {folder} is another head: {told}; give its own settings under [head]")
    head.config = replace(head.config, confidence_temperatures=())
    return head.train().requires_grad_(True)


def _layer_state(layer: LayerWeights, config: HeadConfig) -> list[tuple[str, Tensor]]:
    sizes = [config.num_heads * config.head_dim] + 2 * [config.num_kv_heads * config.head_dim]
    found = [("input_layernorm.weight", layer.attn_norm), ("post_attention_layernorm.weight", layer.mlp_norm)]
    found += [(f"self_attn.{name}_proj.weight", part) for name, part in zip("qkv", dense(layer.qkv).split(sizes))]
    found.append(("self_attn.o_proj.weight", dense(layer.o)))
    gate, up = dense(layer.gate_up).chunk(2)
    found += [("mlp.gate_proj.weight", gate), ("mlp.up_proj.weight", up), ("mlp.down_proj.weight", dense(layer.down))]
    if layer.qkv_bias is not None:
        found += [(f"self_attn.{name}_proj.bias", part) for name, part in zip("qkv", layer.qkv_bias.split(sizes))]
    if layer.o_bias is not None:
        found.append(("self_attn.o_proj.bias", layer.o_bias))
    if layer.q_norm is not None and layer.k_norm is not None:
        found += [("self_attn.q_norm.weight", layer.q_norm), ("self_attn.k_norm.weight", layer.k_norm)]
    return found
