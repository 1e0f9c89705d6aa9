"""A tiny llama in a GGUF file with a byte-level vocabulary, written in code: input for the converter's tests.
It must never touch the network, nor differ between two calls with the same arguments."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

HIDDEN, INNER, NUM_LAYERS, NUM_HEADS, CONTEXT = 32, 64, 2, 2, 128
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NUM_PADDING = 5
END_ID = 2
MERGES = ["1 2", "h e", "l l", "he ll", "Ġ w"]
CHAT = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def tokens() -> list[str]:
    """Specials, the 256 bytes, the merges, then padding rows: as Qwen's files have them."""
    known = SPECIAL + list(bytes_to_unicode().values()) + [merge.replace(" ", "") for merge in MERGES]
    return known + [f"[PAD{len(known) + offset}]" for offset in range(NUM_PADDING)]


def weights() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(7)

    def draw(*shape: int) -> np.ndarray:
        return (generator.standard_normal(shape) * 0.1).astype(np.float32)

    tensors = {"token_embd.weight": draw(len(tokens()), HIDDEN), "output_norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(NUM_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = np.ones(HIDDEN, np.float32)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors[f"blk.{layer}.{name}.weight"] = draw(HIDDEN, HIDDEN)
        for name in ("ffn_gate", "ffn_up"):
            tensors[f"blk.{layer}.{name}.weight"] = draw(INNER, HIDDEN)
        tensors[f"blk.{layer}.ffn_down.weight"] = draw(HIDDEN, INNER)
    return tensors


def write(path: Path, *, pre: str = "smollm", architecture: str = "llama", omit: str | None = None) -> Path:
    """Write the file; `omit` leaves out one tensor. Matrices are stored in Q8_0, so that dequantising is tested too."""
    names = tokens()
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(names))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    num_plain = len(names) - len(SPECIAL) - NUM_PADDING
    writer.add_token_types([3] * len(SPECIAL) + [1] * num_plain + [5] * NUM_PADDING)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(END_ID)
    writer.add_bos_token_id(1)
    writer.add_chat_template(CHAT)
    for name, tensor in weights().items():
        if name == omit:
            continue
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
