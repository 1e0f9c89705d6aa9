"""A tiny model with a byte tokenizer in a folder, as `LLM` loads it.
It must never need the network, nor differ between two calls with the same arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_models import tiny_model

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"


def tiny_folder(
    folder: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    num_extra: int = 0,
    shift: int = 0,
    merges: Sequence[tuple[str, str]] = (),
    eos: str = "<eos>",
) -> Path:
    """Byte-level vocabulary: 256 bytes, the end of text, `num_extra` words of its own, and what `merges` make of two
    tokens each; the model has 8 padding rows more. `shift` rotates the byte ids, which makes another vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: (i + shift) % 256 for i, letter in enumerate(alphabet)} | {eos: 256}
    vocab |= {f"<extra{i}>": 257 + i for i in range(num_extra)}
    vocab |= {one + other: len(vocab) + i for i, (one, other) in enumerate(merges)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([eos])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    model = tiny_model(family, vocab_size=len(vocab) + 8, seed=seed)
    model.config.eos_token_id = model.generation_config.eos_token_id = 256
    model.save_pretrained(folder)
    return folder
