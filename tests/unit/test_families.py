"""model/families: what is extracted, what is refused, and that the model survives it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from driver import Driver, own_logits
from dspark.model.decoder import TorchRunner
from dspark.model.families import extract
from tiny_models import FAMILIES, WINDOW, tiny_model

TEXT = [(5 * i * i + 3 * i + 1) % 96 for i in range(30)]


def _small(**changes: Any) -> dict[str, Any]:
    shape = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    return shape | dict(num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None) | changes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_stays_usable_and_nothing_is_held_twice(family: str) -> None:
    model = tiny_model(family)
    before = own_logits(model, TEXT)
    weights, reason = extract(model)
    assert weights is not None and reason == ""
    assert torch.equal(own_logits(model, TEXT), before)
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for layer in weights.layers:
        for tensor in (layer.qkv, layer.o, layer.gate_up, layer.down):
            assert tensor.untyped_storage().data_ptr() in storages
    again, _ = extract(model)
    assert again is not None
    assert all(a.qkv.data_ptr() == b.qkv.data_ptr() for a, b in zip(again.layers, weights.layers, strict=True))
    assert again.layers[1].qkv.shape == weights.layers[1].qkv.shape == (128, 48)


def test_what_sets_families_apart() -> None:
    found = {family: extract(tiny_model(family))[0] for family in FAMILIES}
    gemma, qwen2, qwen3, mistral, llama = (found[name] for name in ("gemma3", "qwen2", "qwen3", "mistral", "llama"))
    assert gemma and qwen2 and qwen3 and mistral and llama
    assert [layer.window for layer in gemma.layers] == [WINDOW, WINDOW, 0, WINDOW]
    assert len(gemma.rope_tables) == 2 and gemma.layers[2].rope != gemma.layers[0].rope
    assert gemma.activation == "gelu_tanh" and gemma.logit_softcap == 30.0
    assert gemma.embed_scale == pytest.approx(48**0.5) and gemma.attn_scale == pytest.approx(20**-0.5)
    assert gemma.layers[0].post_attn_norm is not None and gemma.layers[0].post_mlp_norm is not None
    assert gemma.head is gemma.embed and qwen2.head is qwen2.embed and qwen3.head is not qwen3.embed
    assert qwen2.layers[0].qkv_bias is not None and llama.layers[0].qkv_bias is None
    assert qwen3.layers[0].q_norm is not None and qwen2.layers[0].q_norm is None
    assert {layer.window for layer in mistral.layers} == {WINDOW}
    assert {layer.window for layer in (*llama.layers, *qwen2.layers)} == {0}


def test_max_context_limits_the_tables() -> None:
    weights, _ = extract(tiny_model("llama"), max_context=40)
    assert weights is not None and weights.max_context == 40
    whole, _ = extract(tiny_model("llama"))
    assert whole is not None and whole.max_context == 512


def test_biases_of_attention_are_kept() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_small(attention_bias=True))).eval()
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.self_attn.o_proj):
            torch.nn.init.normal_(linear.bias)
    weights, _ = extract(model)
    assert weights is not None and weights.layers[0].o_bias is not None
    driver = Driver(TorchRunner(weights))
    driver.open(0)
    torch.testing.assert_close(driver.step({0: TEXT})[0], own_logits(model, TEXT), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (transformers.LlamaConfig(**_small(mlp_bias=True)), "biases in the MLP"),
        (transformers.LlamaConfig(**_small(hidden_act="relu")), "activation relu"),
        (
            transformers.LlamaConfig(
                **_small(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
            ),
            "type dynamic",
        ),
        (transformers.Gemma3TextConfig(**_small(head_dim=8, attn_logit_softcapping=50.0)), "capped attention"),
        (transformers.Gemma3TextConfig(**_small(head_dim=8, use_bidirectional_attention=True)), "bidirectional"),
        (transformers.Gemma2Config(**_small(head_dim=8)), "model type gemma2"),
        (transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96), "model type gpt2"),
    ],
)
def test_refusals_name_the_cause(config: Any, word: str) -> None:
    weights, reason = extract(transformers.AutoModelForCausalLM.from_config(config))
    assert weights is None and word in reason


def test_a_replaced_linear_is_refused() -> None:
    model = tiny_model("qwen2")
    model.model.layers[1].mlp.down_proj = torch.nn.Sequential(model.model.layers[1].mlp.down_proj)
    weights, reason = extract(model)
    assert weights is None and "Sequential" in reason
