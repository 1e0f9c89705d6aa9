"""export: a trained head or a draft language model in the format that another engine loads, and how to serve it there.
It must never write what the engine would refuse, or would read as another network: that is refused with the reason.

What the readers take was read in vLLM 0.32 (models/qwen3_dspark, llama_eagle3, transformers_utils/configs/speculators)
and SGLang 0.5.23 (models/dspark, llama_eagle3); tests/integrations checks it against an installed vLLM.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dspark.heads import speculators
from dspark.heads.checkpoint import TargetShape, is_head_folder, load_head, save_head, save_values
from dspark.heads.config import HeadConfig
from dspark.heads.deepspec import layer_config
from dspark.model.load import load_model, resolve
from dspark.model.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]

ENGINES = ("vllm", "sglang", "speculators", "deepspec", "llama.cpp")
DTYPES = ("bfloat16", "float16", "float32")
LM_TOKENS = 5
"""Drafts a step that the printed command asks of a draft language model: `dspark select` measures what pays."""
UNNAMED = "TARGET"
TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json tokenizer.model vocab.json merges.txt special_tokens_map.json "
    "added_tokens.json chat_template.jinja"
).split()


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written. `command`: starts a server with it; "" where nobody serves the format itself."""

    engine: str
    format: str
    path: Path
    command: str
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "engine": self.engine,
            "format": self.format,
            "path": str(self.path),
            "command": self.command,
            "notes": self.notes,
        }


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Where to, and how. `target`: the model that the draft is for, where it was said."""

    out: Path
    target: str | None
    dtype: str
    gguf_type: str
    progress: Progress | None


def export(
    checkpoint: str,
    *,
    to: str,
    out: str | Path,
    target: str | None = None,
    dtype: str = "bfloat16",
    gguf_type: str = "f16",
    progress: Progress | None = None,
) -> Export:
    """Write `checkpoint` (a head's folder, or a model's name, folder or GGUF file) into the folder `out` for an engine.

    `target`: the model that it drafts for, by name or folder; needed for heads that leave its embeddings out and do not
    name it. `dtype`: of the weights; `gguf_type` (f16, bf16, q8_0) where `to` is "llama.cpp". Raises ValueError where
    the engine cannot load it, with the reason.
    """
    _choice("--to", to, ENGINES)
    _choice("--dtype", dtype, DTYPES)
    source, folder = resolve(checkpoint, progress=progress), Path(out).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and not empty: give a new folder")
    wish = Wish(out=folder, target=target, dtype=dtype, gguf_type=gguf_type, progress=progress)
    return _export_head(source, to, wish) if is_head_folder(source) else _export_model(source, to, wish)


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} {value} is not known: choose one of {', '.join(choices)}")


# -- heads


def _export_head(source: Path, to: str, wish: Wish) -> Export:
    if to == "llama.cpp":
        raise ValueError("llama.cpp loads draft language models, no heads: export the head to vllm or sglang")
    head, target = _load(source, wish)
    return _HEADS[to](head, target, _provenance(source), wish)


def _load(source: Path, wish: Wish) -> tuple[Any, str | None]:
    """The head, float32, and its target's name. The target itself is loaded where the head lacks its rows, or where it
    was named by the caller, so that one for another target is refused."""
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    name = wish.target or values.get("target_name")
    if not (wish.target or values.get("embeddings_from_target")):
        return load_head(source), name
    if name is None:
        raise ValueError(f"the head in {source} leaves out its target's embeddings: name the target with --model")
    loaded = load_model(name, dtype="float32", progress=wish.progress)
    model: Any = loaded.model
    shape = TargetShape(
        hidden_size=int(model.get_input_embeddings().weight.shape[1]),
        num_layers=int(loaded.config.get_text_config().num_hidden_layers),
        vocab_size=loaded.vocab_size,
    )
    rows = {
        "embed": model.get_input_embeddings().weight.detach(),
        "head": model.get_output_embeddings().weight.detach(),
    }
    return load_head(source, target=shape, **rows), name


def _provenance(source: Path) -> Mapping[str, Any] | None:
    path = source / "provenance.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _as_speculators(head: Any, target: str | None, provenance: Mapping[str, Any] | None, wish: Wish) -> Export:
    save_head(head, wish.out, format="speculators", target_name=target, dtype=wish.dtype, provenance=provenance)
    return Export(engine="speculators", format="speculators", path=wish.out, command="")


def _as_deepspec(head: Any, target: str | None, provenance: Mapping[str, Any] | None, wish: Wish) -> Export:
    save_head(head, wish.out, format="deepspec", dtype=wish.dtype, provenance=provenance)
    return Export(engine="deepspec", format="deepspec", path=wish.out, command="")


def _for_vllm(head: Any, target: str | None, provenance: Mapping[str, Any] | None, wish: Wish) -> Export:
    """speculators' format, which says all that DeepSpec's says and holds reduced vocabularies and EAGLE-3 too."""
    config: HeadConfig = head.config
    method = speculators.kind_of(config)
    if reason := vllm_refusal(config):
        raise ValueError(f"vLLM cannot load this head: {reason}")
    made = _as_speculators(head, target, provenance, wish)
    notes = []
    if method in ("dspark", "dflash"):
        notes.append("vLLM drafts with it in its V2 runner, on GPUs")
    asked = {"method": method, "model": str(made.path), "num_speculative_tokens": config.block_size}
    return Export(engine="vllm", format=made.format, path=made.path, command=_vllm(target, asked), notes=notes)


def vllm_refusal(config: HeadConfig) -> str:
    """Why vLLM's readers would refuse a head, or read another network; "" where they would not. What speculators'
    format has no form for is refused by its writer."""
    kind = speculators.kind_of(config)
    if kind == "dspark" and not config.markov_rank:
        return "its DSpark heads have a Markov head, this one has none (markov_rank 0)"
    if kind == "dspark" and config.markov_type != "vanilla":
        return f"its Markov heads are vanilla, this one is {config.markov_type}"
    if kind == "dflash" and config.sample_from_anchor:
        return "its DFlash heads do not predict from the anchor, this one does (sample_from_anchor)"
    return ""


def _for_sglang(head: Any, target: str | None, provenance: Mapping[str, Any] | None, wish: Wish) -> Export:
    config: HeadConfig = head.config
    if reason := sglang_refusal(config):
        raise ValueError(f"SGLang cannot load this head: {reason}")
    if config.kind == "eagle3":
        return _sglang_eagle(head, target, provenance, wish)
    made = _as_deepspec(head, target, provenance, wish)
    flags = {"algorithm": "DSPARK", "draft-model-path": made.path, "num-draft-tokens": config.block_size + 1}
    return Export(engine="sglang", format=made.format, path=made.path, command=_sglang(target, flags))


def sglang_refusal(config: HeadConfig) -> str:
    """As `vllm_refusal`, for SGLang's."""
    if config.kind == "eagle3":
        if config.qk_norm or config.qkv_bias or config.o_bias:
            return "its EAGLE-3 layers are llama's, without norms of queries and keys and without biases"
        return (
            "its EAGLE-3 layers norm behind the residual (norm_before_residual)" if config.norm_before_residual else ""
        )
    return "" if config.markov_rank else "its DSpark heads have a Markov head, this one has none (markov_rank 0)"


def _sglang_eagle(head: Any, target: str | None, provenance: Mapping[str, Any] | None, wish: Wish) -> Export:
    """speculators' tensors, whose names its reader takes, under a llama configuration of its own."""
    config: HeadConfig = head.config
    values = {
        **layer_config(config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "num_aux_hidden_states": len(config.target_layer_ids),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.target_layer_ids),
            "use_aux_hidden_state": True,
        },
    }
    save_values(head, wish.out, values, dtype=wish.dtype, provenance=provenance)
    k = config.block_size
    flags = {
        "algorithm": "EAGLE3",
        "draft-model-path": wish.out,
        "num-steps": k,
        "eagle-topk": 1,
        "num-draft-tokens": k + 1,
    }
    return Export(engine="sglang", format="eagle3", path=wish.out, command=_sglang(target, flags))


_HEADS: Mapping[str, Callable[[Any, str | None, Mapping[str, Any] | None, Wish], Export]] = MappingProxyType(
    {"vllm": _for_vllm, "sglang": _for_sglang, "speculators": _as_speculators, "deepspec": _as_deepspec}
)


# -- language models


def _export_model(source: Path, to: str, wish: Wish) -> Export:
    if to in ("speculators", "deepspec"):
        raise ValueError(f"{to} is a format of heads and {source} is a language model: export it to vllm or sglang")
    if to == "llama.cpp":
        from dspark.integrations.gguf_export import write_gguf

        path = write_gguf(source, wish.out / "draft.gguf", type_name=wish.gguf_type, progress=wish.progress)
        command = f"llama-server -m {_quoted(wish.target)}.gguf -md {shlex.quote(str(path))} --draft-max {LM_TOKENS}"
        return Export(engine=to, format="gguf", path=path, command=command)
    _check_vocabulary(source, to, wish)
    _write_dense(source, wish)
    if to == "vllm":
        asked = {"method": "draft_model", "model": str(wish.out), "num_speculative_tokens": LM_TOKENS}
        command = _vllm(wish.target, asked)
    else:
        flags = {
            "algorithm": "STANDALONE",
            "draft-model-path": wish.out,
            "num-steps": LM_TOKENS,
            "eagle-topk": 1,
            "num-draft-tokens": LM_TOKENS + 1,
        }
        command = _sglang(wish.target, flags)
    return Export(engine=to, format="transformers", path=wish.out, command=command)


def _check_vocabulary(source: Path, to: str, wish: Wish) -> None:
    """Both engines draft with models that number their tokens as the target does."""
    if wish.target is None:
        return
    from dspark.engine.build import vocabulary_difference

    target = Tokenizer(resolve(wish.target, progress=wish.progress))
    if difference := vocabulary_difference(target, Tokenizer(source)):
        raise ValueError(
            f"{to} drafts with models of the target's vocabulary: {difference}; dspark drafts with foreign ones too"
        )


def _write_dense(source: Path, wish: Wish) -> None:
    """Weights in one float type, configuration and tokenizer; the folder appears whole."""
    import torch

    loaded = load_model(source, dtype="float32" if wish.dtype == "float32" else "bfloat16", progress=wish.progress)
    model: Any = loaded.model
    part = wish.out.with_name(f".{wish.out.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    try:
        model.to(getattr(torch, wish.dtype)).save_pretrained(part)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copy(source / name, part / name)
        if wish.out.exists():
            wish.out.rmdir()
        part.rename(wish.out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


# -- commands


def _quoted(target: str | None) -> str:
    return shlex.quote(target or UNNAMED)


def _vllm(target: str | None, asked: Mapping[str, Any]) -> str:
    return f"vllm serve {_quoted(target)} --speculative-config {shlex.quote(json.dumps(asked))}"


def _sglang(target: str | None, flags: Mapping[str, Any]) -> str:
    words = " ".join(f"--speculative-{name} {shlex.quote(str(value))}" for name, value in flags.items())
    return f"python -m sglang.launch_server --model-path {_quoted(target)} {words}"
