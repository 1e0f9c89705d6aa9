"""rope_tables: rotary tables of a head from its configuration.
It must never differ from what transformers computes for the same parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.heads.config import HeadConfig


def rope_tables(config: HeadConfig, num_positions: int, *, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin (num_positions, E) float32."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    llama = LlamaConfig(
        hidden_size=config.num_heads * config.head_dim,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters=dict(config.rope),
    )
    rotary = LlamaRotaryEmbedding(llama).to(device)
    with torch.no_grad():
        positions = torch.arange(num_positions, device=device)[None]
        cos, sin = rotary(torch.empty(0, dtype=torch.float32, device=device), positions)
    return cos[0].contiguous(), sin[0].contiguous()
