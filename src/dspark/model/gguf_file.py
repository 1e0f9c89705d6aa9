"""The GGUF file: checked, and converted once into a folder of dense bfloat16 weights that transformers reads.

It must never leave a half-written folder under the final name, nor touch the GGUF file itself.

The GGUF format keeps less of a tokenizer than `tokenizer.json` does: pre-tokenizer and normaliser are only named
(`tokenizer.ggml.pre`), and padding rows of the embedding are listed like tokens. `_FIXES` puts back what is lost.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Progress = Callable[[str, int, int], None]

_LOG = logging.getLogger(__name__)
_UNUSED = 5  # token type of GGUF: a row of the embedding that no text ever produces
_NUM_STEPS = 4


def read_metadata(path: Path, *, keys: Sequence[str]) -> dict[str, Any]:
    """Those of the file's metadata `keys` that it has. Raises ValueError for a broken or truncated file."""
    reader = _open(path)
    return {key: field.contents() for key in keys if (field := reader.get_field(key)) is not None}


def tensor_types(path: Path) -> dict[str, int]:
    """How many tensors the file keeps in each of GGUF's types, such as {"Q4_K": 168, "Q6_K": 29}."""
    return dict(Counter(tensor.tensor_type.name for tensor in _open(path).tensors).most_common())


def convert(
    gguf: Path,
    target: Path,
    *,
    source: Mapping[str, object],
    family: str | None = None,
    eos_token_ids: Sequence[int] = (),
    progress: Progress | None = None,
) -> None:
    """Write the folder `target`: config, bf16 safetensors, tokenizer, generation config and provenance `source`.

    `family` names the tokenizer's fixes (None: as the file says itself); `eos_token_ids` replaces the file's own end
    tokens when not empty. The caller holds the cache's lock: the temporary folder has a fixed name, so that what an
    interrupted run left is cleared by the next. Raises ValueError for files that cannot be converted.
    """
    partial = target.parent / f".{target.name}.partial"
    for leftover in (partial, target):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    try:
        _write_folder(gguf, partial, family=family, eos_token_ids=eos_token_ids, progress=progress)
        told = {**source, "tensor_types": tensor_types(gguf)}
        (partial / "dspark_source.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _tell(progress, _NUM_STEPS)


def _write_folder(
    gguf: Path, folder: Path, *, family: str | None, eos_token_ids: Sequence[int], progress: Progress | None
) -> None:
    _tell(progress, 0)
    facts = read_metadata(
        gguf,
        keys=(
            "general.architecture",
            "tokenizer.ggml.pre",
            "tokenizer.ggml.tokens",
            "tokenizer.ggml.token_type",
            "tokenizer.ggml.eos_token_id",
            "tokenizer.ggml.eot_token_id",
        ),
    )
    _tell(progress, 1)
    _write_tokenizer(gguf, folder, facts, family=family or facts.get("tokenizer.ggml.pre"))
    _tell(progress, 2)
    _write_model(gguf, folder, facts)
    _tell(progress, 3)
    ends = list(eos_token_ids) or _end_tokens(facts)
    _edit_json(folder / "generation_config.json", lambda config: config.update(eos_token_id=ends))
    _edit_json(folder / "config.json", lambda config: config.pop("_model_name_or_path", None))
    (folder / "model.safetensors").chmod(0o644)  # the writer makes it private; a cache may be shared


def _write_model(gguf: Path, folder: Path, facts: Mapping[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    try:
        with without_bars():
            model, report = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent),
                gguf_file=gguf.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
                output_loading_info=True,
                local_files_only=True,
            )
    except (ValueError, KeyError, RuntimeError, NotImplementedError, OSError) as error:
        raise ValueError(_cannot(gguf, facts, error)) from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{gguf.name} lacks the weights {', '.join(missing[:3])} ({len(missing)} in all): it is not a whole model"
        )
    model.hf_quantizer = None  # transformers refuses to save while it believes that the weights are still in blocks
    with without_bars():
        model.save_pretrained(str(folder), max_shard_size="1TB")


def _write_tokenizer(gguf: Path, folder: Path, facts: Mapping[str, Any], *, family: str | None) -> None:
    from transformers import AutoTokenizer

    try:
        with without_bars():
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    except (ValueError, KeyError, RuntimeError, NotImplementedError, OSError) as error:
        raise ValueError(_cannot(gguf, facts, error)) from error
    tokenizer.save_pretrained(str(folder))
    padding = _padding_tokens(facts)
    if family is not None and family not in _FIXES and facts.get("tokenizer.ggml.pre") is not None:
        _LOG.warning("no fixes are known for the tokenizer family %r of %s: its splits may differ", family, gguf.name)

    def repair(tokenizer_json: dict[str, Any]) -> None:
        _FIXES.get(family or "", _leave)(tokenizer_json)
        _drop_tokens(tokenizer_json, padding)

    _edit_json(folder / "tokenizer.json", repair)

    def forget_machine(config: dict[str, Any]) -> None:
        for key in ("is_local", "local_files_only", "name_or_path"):
            config.pop(key, None)
        # The one class name that every version of transformers takes to mean "as tokenizer.json says".
        config["tokenizer_class"] = "PreTrainedTokenizerFast"

    _edit_json(folder / "tokenizer_config.json", forget_machine)


def _padding_tokens(facts: Mapping[str, Any]) -> set[str]:
    """The names of the unused rows at the end of the vocabulary (they make the row count a round number)."""
    tokens = facts.get("tokenizer.ggml.tokens") or []
    types = facts.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    end = len(tokens)
    while end > 0 and types[end - 1] == _UNUSED:
        end -= 1
    return set(tokens[end:])


def _drop_tokens(tokenizer_json: dict[str, Any], names: set[str]) -> None:
    if not names:
        return
    vocab = tokenizer_json["model"]["vocab"]
    if isinstance(vocab, dict):
        tokenizer_json["model"]["vocab"] = {name: index for name, index in vocab.items() if name not in names}
    else:
        tokenizer_json["model"]["vocab"] = [row for row in vocab if row[0] not in names]
    tokenizer_json["added_tokens"] = [row for row in tokenizer_json["added_tokens"] if row["content"] not in names]


def _end_tokens(facts: Mapping[str, Any]) -> list[int]:
    """The file's own end tokens, and Qwen's end of text, at which upstream stops too though the file omits it."""
    ends = [facts[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in facts]
    tokens = facts.get("tokenizer.ggml.tokens") or []
    if facts.get("tokenizer.ggml.pre") == "qwen2" and "<|endoftext|>" in tokens:
        ends.append(tokens.index("<|endoftext|>"))
    return list(dict.fromkeys(ends))


def _leave(tokenizer_json: dict[str, Any]) -> None:
    """Nothing is lost in this family."""


def _split_digits(tokenizer_json: dict[str, Any]) -> None:
    """SmolLM: every digit is a token of its own, then byte-level splitting."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer_json["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}


def _normalise_nfc(tokenizer_json: dict[str, Any]) -> None:
    """Qwen 2: text is composed (NFC) before it is split."""
    tokenizer_json["normalizer"] = {"type": "NFC"}


_FIXES: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "smollm": _split_digits,
    "qwen2": _normalise_nfc,
    "gemma": _leave,
    "default": _leave,
    "gpt-2": _leave,
}


def _open(path: Path) -> Any:
    from gguf import GGUFReader

    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; give the path of a GGUF file") from error
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file (it does not start with 'GGUF'): download it again")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        raise ValueError(f"{path} is broken or truncated: download it again ({first_line(error)})") from error


def _cannot(gguf: Path, facts: Mapping[str, Any], error: Exception) -> str:
    architecture = facts.get("general.architecture", "unknown")
    return (
        f"cannot convert {gguf.name} (architecture {architecture}): {first_line(error)}; give a folder with "
        "config.json and safetensors instead"
    )


def first_line(error: Exception) -> str:
    """An exception in one line; a KeyError, whose text is only the key, with its name."""
    line = next(iter(str(error).strip().splitlines()), "")
    return line if line and not isinstance(error, KeyError) else f"{type(error).__name__} {line}".strip()


def _edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class _BarFilter(io.TextIOBase):
    """A stderr that drops progress bars (writes that begin with a carriage return) and passes on everything else."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._after_bar = False

    def write(self, text: str) -> int:
        if text.startswith("\r") or (self._after_bar and not text.strip()):
            self._after_bar = True
            return len(text)
        self._after_bar = False
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Keep other people's progress bars off stderr: the caller's `progress` is the only one shown."""
    with contextlib.redirect_stderr(_BarFilter(sys.stderr)):  # type: ignore[type-var]
        yield


def _tell(progress: Progress | None, done: int) -> None:
    if progress is not None:
        progress("convert", done, _NUM_STEPS)
