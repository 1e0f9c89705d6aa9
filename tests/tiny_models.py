"""Tiny transformers models with fixed random weights, built in code: targets for tests.
They must never touch the network, nor differ between two calls with the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
WINDOW = 12  # of the sliding layers (mistral: all, gemma3: three of four): short, so that tests run past its wrap


@dataclass(frozen=True, kw_only=True)
class TinyLoaded:
    """The fields of dspark.model.load.LoadedModel, for a model that lies in no folder."""

    model: Any
    config: Any
    path: Path
    name: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    num_valid_tokens: int
    max_context: int
    dtype: torch.dtype
    tokenizer: Any = None


def _shape(vocab_size: int) -> dict[str, Any]:
    return dict(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
    )


def _llama(vocab_size: int) -> Any:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_shape(vocab_size), rope_parameters=rope))


def _mistral(vocab_size: int) -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_shape(vocab_size), sliding_window=WINDOW))


def _qwen2(vocab_size: int) -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_shape(vocab_size), tie_word_embeddings=True))


def _qwen3(vocab_size: int) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_shape(vocab_size)))


def _gemma3(vocab_size: int) -> Any:
    shape = _shape(vocab_size) | {"num_hidden_layers": 4}
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        **shape, sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=20, final_logit_softcapping=30.0
    )
    return transformers.Gemma3ForCausalLM(config)


_BUILDERS: dict[str, Callable[[int], Any]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}


def _fill(model: Any, seed: int) -> None:
    """Weights wide enough that attention looks at particular tokens and the argmax has a margin.

    Tied embeddings are narrow (and the last norm wide), or the model would only repeat its last token.
    """
    generator = torch.Generator().manual_seed(seed)
    tied = bool(model.config.tie_word_embeddings)
    norm_base = 0.0 if "Gemma" in type(model).__name__ else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name == "model.norm.weight":
                parameter.copy_(norm_base + (4.0 if tied else 0.5) + 0.2 * noise)
            elif "norm" in name:
                parameter.copy_(norm_base + 0.3 * noise)
            elif name == "model.embed_tokens.weight":
                parameter.copy_(noise * (0.08 if tied else 1.0))
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * 2.0 / parameter.shape[1] ** 0.5)


def tiny_model(family: str, *, vocab_size: int = 96, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A transformers model of that family in eval mode, without gradients.

    Three layers (gemma3: four, the third with full attention), hidden 48, 4 heads, 2 key-value heads of 16,
    512 positions. llama has scaled rotary frequencies, mistral and gemma3 sliding windows of `WINDOW`.
    """
    model = _BUILDERS[family](vocab_size)
    _fill(model, seed)
    return model.to(dtype).eval().requires_grad_(False)


def tiny_loaded(family: str, *, vocab_size: int = 96, dtype: torch.dtype = torch.float32, seed: int = 0) -> TinyLoaded:
    """The same model as `model.load.load_model` would give it."""
    model = tiny_model(family, vocab_size=vocab_size, dtype=dtype, seed=seed)
    return TinyLoaded(
        model=model,
        config=model.config,
        path=Path("."),
        name=f"tiny-{family}",
        eos_token_ids=(1,),
        vocab_size=vocab_size,
        num_valid_tokens=vocab_size,
        max_context=model.config.max_position_embeddings,
        dtype=dtype,
    )
