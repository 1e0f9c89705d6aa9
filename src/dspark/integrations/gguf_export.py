"""write_gguf: a language model as a GGUF file, for llama.cpp.
It must never write a model or a tokenizer that llama.cpp would read as another one: what it has no form for is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from dspark.model.load import LoadedModel, load_model

Progress = Callable[[str, int, int], None]

ARCHITECTURES: Mapping[str, str] = MappingProxyType({"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"})
"""transformers' model type -> the architecture's name in the gguf package."""
TYPES = ("f16", "bf16", "q8_0")
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens in the format."""
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_BLOCK = 32  # elements of a row that q8_0 scales together


def write_gguf(source: Path, path: Path, *, type_name: str = "f16", progress: Progress | None = None) -> Path:
    """The model in the folder `source` as the file `path`; matrices in `type_name`, the rest in float32.

    Raises ValueError for a family, a rotary embedding or a tokenizer that is not covered, by its name.
    """
    from gguf import GGUFWriter

    if type_name not in TYPES:
        raise ValueError(f"--type {type_name} is not known: choose one of {', '.join(TYPES)}")
    loaded = load_model(source, progress=progress)
    kind = loaded.config.model_type
    if kind not in ARCHITECTURES:
        raise ValueError(f"GGUF files of {kind} models are not written: known are {', '.join(ARCHITECTURES)}")
    _check_layers(loaded.config)
    if loaded.tokenizer is None:
        raise ValueError(f"{source} has no tokenizer, which a GGUF file holds: add tokenizer.json")
    words = read_words(loaded)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    writer = GGUFWriter(str(part), kind)
    try:
        _write_facts(writer, loaded, type_name)
        _write_words(writer, loaded, words)
        _write_tensors(writer, loaded, type_name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _check_layers(config: Any) -> None:
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"rotary embeddings of type {rope.get('rope_type')} are not written into GGUF files")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError("layers with a sliding window are not written into GGUF files")
    if config.hidden_act != "silu":
        raise ValueError(f"activation {config.hidden_act} is not written into GGUF files")
    if getattr(config, "mlp_bias", False):
        raise ValueError("biases in the MLP are not written into GGUF files")
    if config.model_type != "qwen2" and getattr(config, "attention_bias", False):
        raise ValueError(f"biases in the attention of {config.model_type} are not written into GGUF files")


def _write_facts(writer: Any, loaded: LoadedModel, type_name: str) -> None:
    import gguf

    config: Any = loaded.config
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_name(loaded.name)
    writer.add_file_type(
        {"f16": gguf.LlamaFileType.MOSTLY_F16, "bf16": gguf.LlamaFileType.MOSTLY_BF16}.get(
            type_name, gguf.LlamaFileType.MOSTLY_Q8_0
        )
    )
    writer.add_vocab_size(loaded.vocab_size)
    writer.add_context_length(loaded.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(float(config.rms_norm_eps))


# -- the tokenizer


@dataclass(frozen=True, kw_only=True)
class Words:
    """Every row of the vocabulary: text and kind; merges as the format writes them; how texts are split first."""

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    pre: str


def read_words(loaded: LoadedModel) -> Words:
    """From a byte-level tokenizer. Raises ValueError where the format has no name for the way it splits texts."""
    assert loaded.tokenizer is not None
    hf = loaded.tokenizer.hf
    backend = getattr(hf, "backend_tokenizer", None)
    spec: Any = json.loads(backend.to_str()) if backend is not None else {"model": {"type": None}}
    if spec["model"]["type"] != "BPE" or spec["model"].get("byte_fallback"):
        raise ValueError(
            f"tokenizers of type {spec['model']['type']} with pieces of text are not written into GGUF files"
        )
    tokens = [f"[PAD{index}]" for index in range(loaded.vocab_size)]
    kinds = [UNUSED] * loaded.vocab_size
    for token, index in spec["model"]["vocab"].items():
        tokens[index], kinds[index] = token, NORMAL
    for added in spec["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in spec["model"]["merges"]]
    return Words(tokens=tokens, kinds=kinds, merges=merges, pre=_pre_tokenizer(spec))


def _pre_tokenizer(spec: Mapping[str, Any]) -> str:
    """The format's name for how texts are split before merging."""
    outer = spec.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", [outer])
    shapes = [_shape_of(step) for step in steps]
    composed = (spec.get("normalizer") or {}).get("type")
    known = {
        (("ByteLevel", True),): "gpt-2",
        (("Digits", True), ("ByteLevel", True)): "smollm",
        (("Split", _LLAMA3), ("ByteLevel", False)): "llama-bpe",
    }
    if composed == "NFC" and shapes == [("Split", _QWEN2), ("ByteLevel", False)]:
        return "qwen2"
    name = known.get(tuple(shapes)) if composed is None else None
    if name is None:
        shown = " then ".join(str(step.get("type")) for step in steps)
        raise ValueError(
            f"the way this tokenizer splits texts ({shown}, normaliser {composed}) has no name in GGUF files that "
            "dspark knows (gpt-2, smollm, qwen2, llama-bpe)"
        )
    return name


def _shape_of(step: Mapping[str, Any]) -> tuple[str, Any]:
    kind = str(step.get("type"))
    if kind == "Digits":
        return kind, bool(step.get("individual_digits"))
    if kind == "ByteLevel":
        return kind, bool(step.get("use_regex", True))
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return kind, step["pattern"].get("Regex")
    return kind, None


def _write_words(writer: Any, loaded: LoadedModel, words: Words) -> None:
    assert loaded.tokenizer is not None
    hf = loaded.tokenizer.hf
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.kinds)
    writer.add_token_merges(words.merges)
    for token, add in ((hf.bos_token_id, writer.add_bos_token_id), (hf.pad_token_id, writer.add_pad_token_id)):
        if token is not None:
            add(int(token))
    if loaded.eos_token_ids:
        writer.add_eos_token_id(loaded.eos_token_ids[0])
    if len(loaded.eos_token_ids) > 1:
        writer.add_eot_token_id(loaded.eos_token_ids[1])
    first = loaded.tokenizer.encode("a")[:1]
    writer.add_add_bos_token(bool(first) and first == [hf.bos_token_id])
    if loaded.tokenizer.has_chat_template:
        writer.add_chat_template(loaded.tokenizer.chat_template)


# -- the weights


def _write_tensors(writer: Any, loaded: LoadedModel, type_name: str) -> None:
    import gguf

    config: Any = loaded.config
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, ARCHITECTURES[config.model_type]), config.num_hidden_layers
    )
    tied = bool(config.tie_word_embeddings)
    for name, tensor in loaded.model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        wanted = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if wanted is None:
            raise ValueError(f"{name} has no place in a GGUF file of {config.model_type} models")
        array = _ordered(name, tensor, config).float().numpy()
        kind = _type_of(array, type_name)
        if kind is None:
            writer.add_tensor(wanted, array)
        else:
            writer.add_tensor(wanted, gguf.quantize(array, kind), raw_dtype=kind)


def _ordered(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Queries and keys of llama are rotated in neighbouring pairs there, in halves here."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type != "llama" or heads is None:
        return tensor
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _type_of(array: np.ndarray, type_name: str) -> Any:
    """None for float32: norms, biases."""
    from gguf import GGMLQuantizationType

    if array.ndim == 1:
        return None
    if type_name == "q8_0" and array.shape[1] % _BLOCK:
        type_name = "f16"  # a row that does not come out even in blocks
    return getattr(GGMLQuantizationType, type_name.upper())
