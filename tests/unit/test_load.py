"""Loading: names, folders, GGUF files and hub ids end in a frozen model with true facts, or in one line that helps.
It must never need the network: the hub is replaced, models are tiny and built here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import huggingface_hub
import pytest
import tokenizers
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import tiny_gguf
from dspark.model import registry
from dspark.model.load import load_model, resolve


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A tiny float32 llama folder without a tokenizer; do not write into it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
        bos_token_id=None,
        eos_token_id=[3, 5],
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [7, 3]
    folder = tmp_path_factory.mktemp("plain")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def copy(plain, tmp_path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in plain.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def _fails(model: object, words: str, **kwargs) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        load_model(str(model), **kwargs)
    assert "\n" not in str(caught.value)


def test_folder_facts(plain):
    loaded = load_model(plain)
    assert loaded.path == plain and loaded.name == plain.name
    assert loaded.eos_token_ids == (7, 3, 5)
    assert (loaded.vocab_size, loaded.num_valid_tokens, loaded.max_context) == (40, 40, 96)
    assert loaded.tokenizer is None
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


@pytest.mark.parametrize(
    ("asked", "stored", "got"),
    [
        ("auto", "float32", torch.float32),
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float16", torch.bfloat16),
        ("float32", "bfloat16", torch.float32),
        ("bfloat16", "float32", torch.bfloat16),
    ],
)
def test_dtype(asked, stored, got, copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"dtype": stored}))
    loaded = load_model(copy, dtype=asked)
    assert loaded.dtype == got
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {got}


def test_a_folder_never_asks_the_hub(plain, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("asked the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    load_model(plain)


def test_gguf_is_converted_once_with_the_file_s_own_weights(tmp_path, monkeypatch, cache):
    path = tiny_gguf.write(tmp_path / "tiny model.gguf")
    loaded = load_model(path, dtype="bfloat16")
    assert loaded.path.parent == cache / "models"
    stored = load_file(loaded.path / "model.safetensors")
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors}
    assert torch.equal(stored["model.embed_tokens.weight"], tensors["token_embd.weight"].bfloat16())
    for layer in range(tiny_gguf.NUM_LAYERS):
        ours = stored[f"model.layers.{layer}.mlp.down_proj.weight"]
        assert torch.equal(ours, tensors[f"blk.{layer}.ffn_down.weight"].bfloat16())
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert loaded.origin is not None and re.fullmatch(
        r"GGUF \(\d+ in Q8_0, \d+ in F32\), expanded to bfloat16", loaded.origin
    )
    monkeypatch.setattr("dspark.model.load.convert", None)
    assert resolve(str(path)) == loaded.path


def test_gguf_facts(tmp_path):
    loaded = load_model(tiny_gguf.write(tmp_path / "tiny.gguf"))
    names = tiny_gguf.tokens()
    assert loaded.vocab_size == len(names)
    assert loaded.num_valid_tokens == len(names) - tiny_gguf.NUM_PADDING
    assert loaded.eos_token_ids == (tiny_gguf.END_ID,)
    assert loaded.max_context == tiny_gguf.CONTEXT
    assert loaded.tokenizer is not None and loaded.tokenizer.has_chat_template
    assert set(range(len(tiny_gguf.SPECIAL))) <= loaded.tokenizer.special_ids


def test_smollm_digits_are_split_also_by_the_raw_file(tmp_path):
    """The vocabulary has a merge of "1" and "2": without the split it would be used."""
    loaded = load_model(tiny_gguf.write(tmp_path / "tiny.gguf", pre="smollm"))
    raw = tokenizers.Tokenizer.from_file(str(loaded.path / "tokenizer.json"))
    assert loaded.tokenizer is not None
    assert [loaded.tokenizer.decode([token]) for token in loaded.tokenizer.encode("12")] == ["1", "2"]
    assert raw.encode("hell 12 w").ids == loaded.tokenizer.encode("hell 12 w")
    other = load_model(tiny_gguf.write(tmp_path / "other.gguf", pre="gpt-2"))
    assert other.tokenizer is not None
    assert len(other.tokenizer.encode("12")) == 1


def test_qwen_text_is_composed_and_ends_at_both_tokens(tmp_path):
    loaded = load_model(tiny_gguf.write(tmp_path / "tiny.gguf", pre="qwen2"))
    raw = tokenizers.Tokenizer.from_file(str(loaded.path / "tokenizer.json"))
    assert raw.encode("cafe\u0301").ids == raw.encode("caf\u00e9").ids
    assert loaded.eos_token_ids == (tiny_gguf.END_ID, 0)


def test_a_changed_gguf_is_converted_anew(tmp_path):
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    first = resolve(str(path))
    tiny_gguf.write(path, pre="qwen2")
    assert resolve(str(path)) != first


def test_broken_gguf_files(tmp_path, cache):
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    for size in (10, 200, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        _fails(path, "broken or truncated")
    path.write_bytes(b"PK" + whole)
    _fails(path, "not a GGUF file")
    _fails(tiny_gguf.write(tmp_path / "odd.gguf", architecture="oddity"), "odd.gguf.*oddity")
    _fails(
        tiny_gguf.write(tmp_path / "less.gguf", omit="blk.1.ffn_up.weight"), r"lacks the weights .*layers\.1\.mlp\.up"
    )
    path.rename(tmp_path / "big-00001-of-00003.gguf")
    _fails(tmp_path / "big-00001-of-00003.gguf", "merge the parts")
    assert list((cache / "models").iterdir()) == []


def test_things_that_do_not_exist(tmp_path):
    _fails(tmp_path / "nothing", "does not exist.*smollm2-135m")
    _fails("missing.gguf", "does not exist")
    _fails("./a/b/c", "does not exist")
    (tmp_path / "model.bin").write_text("x")
    _fails(tmp_path / "model.bin", "not a .gguf file")


def test_incomplete_folders(copy):
    weights = copy / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    _fails(copy, "cannot load the model")
    weights.write_bytes(content)
    tensors = load_file(weights)
    removed = "model.layers.1.mlp.up_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != removed}, weights, metadata={"format": "pt"})
    _fails(copy, f"lack {removed}")
    weights.unlink()
    _fails(copy, "no complete safetensors weights")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00002.safetensors")}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    _fails(copy, "no complete safetensors weights")
    (copy / "model-00001-of-00002.safetensors").write_bytes(content)
    load_model(copy)
    (copy / "config.json").unlink()
    _fails(copy, "no config.json")


def test_unknown_architecture(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "oddity"}))
    _fails(copy, "cannot load the model.*oddity")


def test_wrong_arguments(plain):
    _fails(plain, "dtype='float16'", dtype="float16")
    _fails(plain, "not a device", device="gpu")
    _fails(plain, "is not there", device="cuda:97")


def test_registry_names_go_to_the_registry(plain, monkeypatch):
    monkeypatch.setattr(registry, "fetch", lambda name, progress=None: plain)
    loaded = load_model("smollm2-135m")
    assert loaded.path == plain and loaded.name == "smollm2-135m"


def test_registry_end_tokens_are_added(copy):
    (copy / "dspark_source.json").write_text(json.dumps({"name": "gemma-3-270m"}))
    assert load_model(copy).eos_token_ids == (7, 3, 5, 1)


def test_hub(plain, copy, monkeypatch):
    asked: list[bool] = []
    answers: dict[bool, Path | None] = {}

    def snapshot(repo_id, *, local_files_only=False, allow_patterns=None):
        assert repo_id == "someone/model"
        asked.append(local_files_only)
        if (answer := answers.get(local_files_only)) is None:
            raise LocalEntryNotFoundError("no connection\nsecond line")
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    _fails("someone/model", r"cannot be fetched from the hub \(no connection\).*folder.*gguf.*smollm2-135m")
    answers[True] = plain
    asked.clear()
    assert resolve("someone/model") == plain and asked == [True]
    (copy / "model.safetensors").unlink()  # a download that stopped half way
    answers.update({True: copy, False: plain})
    assert resolve("someone/model") == plain
