"""Exports: what comes back through our own readers is what went out, tensor by tensor, and what an engine cannot load
is refused with the reason. They must never need the network, nor the engine."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dspark.cli import main
from dspark.cli.export import ENGINES as OFFERED
from dspark.heads.checkpoint import load_head, make_head, save_head
from dspark.heads.config import HeadConfig
from dspark.integrations.export import ENGINES, export
from dspark.model.load import load_model
from tests.tiny_folder import tiny_folder

VOCAB, LAYERS, HIDDEN = 270, 3, 64
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "hell")]
BLOCK = HeadConfig(
    hidden_size=HIDDEN,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    block_size=4,
    target_layer_ids=(-1, 0, 1),
    num_target_layers=LAYERS,
    mask_token_id=VOCAB - 1,
    markov_rank=6,
    qk_norm=True,
    rope={"rope_type": "default", "rope_theta": 5000.0},
)
REDUCED = dataclasses.replace(BLOCK, draft_vocab_size=50)
FLASH = dataclasses.replace(BLOCK, markov_rank=0, confidence=False, sample_from_anchor=False)
EAGLE = dataclasses.replace(
    REDUCED,
    kind="eagle3",
    num_layers=1,
    markov_rank=0,
    confidence=False,
    mask_token_id=None,
    qk_norm=False,
    target_layer_ids=(0, 1),
)
OWN = dataclasses.replace(
    BLOCK, context="target", target_layer_ids=(0, 2), anchor_feature=True, mask_token_id=None, qk_norm=False
)


def write_head(folder: Path, config: HeadConfig, **how: Any) -> Any:
    """A head with random weights, in our own format."""
    torch.manual_seed(3)
    head = make_head(config).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    head.draft_ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[: config.draft_vocab_size]
    save_head(head, folder, store_embeddings=True, target_name="org/target", provenance={"by": "a test"}, **how)
    return head


def same(ours: Any, theirs: Any) -> None:
    """Two heads with the same tensors, rows of the output in any order."""
    one, other = ours.draft_ids.sort().indices, theirs.draft_ids.sort().indices
    assert torch.equal(ours.draft_ids[one], theirs.draft_ids[other])
    wanted, found = ours.state_dict(), theirs.state_dict()
    assert set(wanted) == set(found)
    for name, tensor in wanted.items():
        if name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            assert torch.equal(tensor[one], found[name][other]), name
        else:
            assert torch.equal(tensor, found[name]), name


def in_order(head: Any) -> Any:
    """As DeepSpec's readers see it, whose output has a row for each token in its order."""
    head.draft_ids = torch.arange(VOCAB)
    return head


@pytest.mark.parametrize("to", ("vllm", "sglang", "speculators", "deepspec"))
@pytest.mark.parametrize("kind", ("block", "reduced", "flash", "eagle"))
def test_heads_come_back(tmp_path: Path, to: str, kind: str) -> None:
    config = {"block": BLOCK, "reduced": REDUCED, "flash": FLASH, "eagle": EAGLE}[kind]
    head = write_head(tmp_path / "head", config)
    if kind == "block":
        save_head(in_order(head), tmp_path / "head", store_embeddings=True, target_name="org/target")
    if to in ("sglang", "deepspec") and kind in ("reduced", "flash") or (to, kind) == ("deepspec", "eagle"):
        with pytest.raises(ValueError, match="reduced vocabulary|anchor|Markov head|DSpark heads only"):
            export(str(tmp_path / "head"), to=to, out=tmp_path / "out")
        assert not (tmp_path / "out" / "config.json").exists()
        return
    made = export(str(tmp_path / "head"), to=to, out=tmp_path / "out", dtype="float32")
    assert made.path == tmp_path / "out"
    if (to, kind) == ("sglang", "eagle"):
        return  # a configuration that only SGLang reads: below
    again = load_head(tmp_path / "out")
    same(head, again)
    assert dataclasses.replace(again.config, num_target_layers=LAYERS) == config


def test_an_eagle_head_for_sglang(tmp_path: Path) -> None:
    """The names and the map of ids as its reader takes them."""
    head = write_head(tmp_path / "head", EAGLE)
    export(str(tmp_path / "head"), to="sglang", out=tmp_path / "out", dtype="float32")
    values, tensors = (
        json.loads((tmp_path / "out/config.json").read_text()),
        load_file(tmp_path / "out/model.safetensors"),
    )
    assert values["architectures"] == ["LlamaForCausalLMEagle3"] and values["model_type"] == "llama"
    assert values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    ids = tensors["d2t"] + torch.arange(EAGLE.draft_vocab_size)
    order = head.draft_ids.sort().indices
    assert torch.equal(ids, head.draft_ids[order])
    assert torch.equal(tensors["lm_head.weight"], head.lm_head.weight[order])
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (64, 2 * HIDDEN)
    assert tensors["fc.weight"].shape == (HIDDEN, 2 * HIDDEN)


CANNOT: dict[str, tuple[HeadConfig, str, str]] = {
    "keys of the target": (OWN, "vllm", "context 'target'"),
    "gated": (dataclasses.replace(BLOCK, markov_type="gated"), "vllm", "gated"),
    "no Markov head": (
        dataclasses.replace(BLOCK, markov_rank=0, confidence_with_markov=False),
        "vllm",
        "Markov head",
    ),
    "anchored DFlash": (dataclasses.replace(FLASH, sample_from_anchor=True), "vllm", "anchor"),
    "layers of llama": (dataclasses.replace(BLOCK, qk_norm=False), "vllm", "norm queries and keys"),
    "normed eagle": (dataclasses.replace(EAGLE, qk_norm=True), "sglang", "llama"),
    "residual": (dataclasses.replace(EAGLE, norm_before_residual=True), "sglang", "norm_before_residual"),
    "heads for llama.cpp": (BLOCK, "llama.cpp", "no heads"),
    "last layer": (dataclasses.replace(BLOCK, target_layer_ids=(0, 2)), "vllm", "last layer"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    config, to, reason = CANNOT[case]
    write_head(tmp_path / "head", config)
    with pytest.raises(ValueError, match=reason):
        export(str(tmp_path / "head"), to=to, out=tmp_path / "out")
    assert not list((tmp_path / "out").glob("*")), "a refusal left something"


def model_in(folder: Path, family: str, *, hidden: int = HIDDEN) -> Path:
    """A tiny model whose shape every GGUF reader can tell, with weights that bfloat16 holds, and a byte tokenizer."""
    tiny_folder(folder, merges=MERGES, eos="<|endoftext|>")
    settings: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=256,
    )
    if family == "llama":
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    if family == "qwen3":
        settings["head_dim"] = 128
    if family == "qwen2":
        settings["tie_word_embeddings"] = True
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1)).bfloat16())
    model.generation_config.eos_token_id = 256
    model.bfloat16().save_pretrained(folder)
    return folder


def test_a_head_is_given_its_targets_rows(tmp_path: Path) -> None:
    """Our own format leaves them out; no other reader knows where to find them."""
    target = model_in(tmp_path / "target", "llama")
    head = write_head(tmp_path / "head", BLOCK)
    loaded: Any = load_model(target, dtype="float32").model
    with torch.no_grad():
        head.embed_tokens.weight.copy_(loaded.get_input_embeddings().weight)
        head.lm_head.weight.copy_(loaded.get_output_embeddings().weight)
    head.draft_ids = torch.arange(VOCAB)
    save_head(head, tmp_path / "head", store_embeddings=False)
    with pytest.raises(ValueError, match="--model"):
        export(str(tmp_path / "head"), to="deepspec", out=tmp_path / "out")
    export(str(tmp_path / "head"), to="deepspec", out=tmp_path / "out", target=str(target), dtype="float32")
    same(head, load_head(tmp_path / "out"))
    other = model_in(tmp_path / "other", "llama", hidden=32)
    with pytest.raises(ValueError, match="hidden size"):
        export(str(tmp_path / "head"), to="deepspec", out=tmp_path / "more", target=str(other))


@pytest.mark.parametrize("type_name", ("bf16", "f16", "q8_0"))
@pytest.mark.parametrize("family", ("llama", "qwen2", "qwen3"))
def test_gguf_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, type_name: str) -> None:
    """Through our own reader of GGUF files: the same logits, texts and ends."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    source = model_in(tmp_path / "model", family)
    made = export(str(source), to="llama.cpp", out=tmp_path / "out", gguf_type=type_name)
    before, after = load_model(source, dtype="float32"), load_model(str(made.path), dtype="float32")
    one, other = before.model.state_dict(), after.model.state_dict()
    assert set(one) == set(other)
    for name, tensor in one.items():
        if type_name == "q8_0" and tensor.dim() == 2:
            assert (tensor - other[name]).abs().max() <= 0.02 * tensor.abs().max(), name
        elif type_name == "f16":
            torch.testing.assert_close(other[name], tensor, atol=1e-6, rtol=0)
        else:
            assert torch.equal(tensor, other[name]), name
    ids = torch.tensor([[72, 101, 11, 12, 256, 30, 31]])
    with torch.no_grad():
        logits: list[Any] = [loaded.model(ids).logits for loaded in (before, after)]  # type: ignore[operator]
    spread = 1e-4 if type_name != "q8_0" else 0.2
    torch.testing.assert_close(logits[1], logits[0], atol=spread * float(logits[0].std()), rtol=0)
    assert before.tokenizer is not None and after.tokenizer is not None
    text = "hello hell, well 12 héé<|endoftext|>"
    assert before.tokenizer.encode(text) == after.tokenizer.encode(text)
    assert before.eos_token_ids == after.eos_token_ids and after.num_valid_tokens == before.num_valid_tokens
    assert after.max_context == 128


def test_gguf_of_what_is_not_covered(tmp_path: Path) -> None:
    for family, words in (("gemma3", "gemma3"), ("mistral", "mistral"), ("llama", "llama3")):
        source = tiny_folder(tmp_path / family, family=family)
        with pytest.raises(ValueError, match=words):
            export(str(source), to="llama.cpp", out=tmp_path / "out")
    source = model_in(tmp_path / "split", "llama")
    file = source / "tokenizer.json"
    values = json.loads(file.read_text())
    values["pre_tokenizer"] = {"type": "Whitespace"}
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="Whitespace"):
        export(str(source), to="llama.cpp", out=tmp_path / "out")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("to", ("vllm", "sglang"))
def test_a_draft_model(tmp_path: Path, to: str) -> None:
    source, target = model_in(tmp_path / "draft", "qwen3"), model_in(tmp_path / "my target", "llama")
    made = export(str(source), to=to, out=tmp_path / "out", target=str(target))
    before, after = load_model(source), load_model(tmp_path / "out")
    assert after.dtype == torch.bfloat16
    assert all(
        torch.equal(one, other)
        for one, other in zip(before.model.state_dict().values(), after.model.state_dict().values(), strict=True)
    )
    assert before.tokenizer is not None and after.tokenizer is not None
    assert before.tokenizer.vocabulary() == after.tokenizer.vocabulary()
    words = shlex.split(made.command)
    assert str(target) in words
    if to == "vllm":
        assert json.loads(words[words.index("--speculative-config") + 1])["model"] == str(tmp_path / "out")
    else:
        assert words[words.index("--speculative-draft-model-path") + 1] == str(tmp_path / "out")
    foreign = tiny_folder(tmp_path / "foreign", shift=7)
    with pytest.raises(ValueError, match="vocabulary"):
        export(str(foreign), to=to, out=tmp_path / "more", target=str(target))
    with pytest.raises(ValueError, match="language model"):
        export(str(source), to="deepspec", out=tmp_path / "more")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert OFFERED == ENGINES
    write_head(tmp_path / "head", REDUCED)
    args = ["export", str(tmp_path / "head"), "--to", "vllm", "--out", str(tmp_path / "out")]
    assert main(args) == 0
    path, command = capsys.readouterr().out.splitlines()
    assert path == str(tmp_path / "out") and command.startswith("vllm serve org/target --speculative-config ")
    asked = json.loads(shlex.split(command)[-1])
    assert asked == {"method": "dspark", "model": path, "num_speculative_tokens": 4}
    assert json.loads((tmp_path / "out/provenance.json").read_text()) == {"by": "a test"}
    assert main(args) == 2 and "not empty" in capsys.readouterr().err
    assert main([*args[:-1], str(tmp_path / "more"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "speculators"
