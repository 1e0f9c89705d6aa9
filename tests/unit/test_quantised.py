"""Quantised folders: the logits of quantising on the fly, bit by bit, from smaller files; or a line that helps.
It must never compare with a tolerance what the law says is equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.cli import main
from dspark.model.build import library, reason
from dspark.model.families import extract
from dspark.model.load import load_model
from dspark.model.native import NativeRunner
from dspark.model.precision import read_config
from dspark.model.quantised import Quantised, code_shapes, join, quantise, quantise_rows
from dspark.model.runner import build_runner
from tests.driver import Driver
from tests.tiny_folder import tiny_folder
from tests.tiny_models import FAMILIES

pytestmark = pytest.mark.skipif(library() is None, reason=f"no native library: {reason()}")

PRECISIONS = [("int8", 32), ("int4", 32), ("int4", 64), ("int4", 128)]
IDS = [f"{kind}-{group}" for kind, group in PRECISIONS]
TEXT = [3, 50, 7, 91, 22, 22, 60, 1, 5, 80, 9, 33, 4, 18, 77, 2, 64]


def quantised(folder: Path, out: Path, kind: str, group: int = 32) -> Path:
    words = ["--group-size", str(group)] if kind == "int4" else []
    assert main(["quantize", str(folder), "--to", kind, *words, "--out", str(out)]) == 0
    return out


def logits(runner: Any) -> Tensor:
    driver = Driver(runner)
    driver.open(0)
    return torch.cat([driver.step({0: TEXT[:9]})[0], driver.step({0: TEXT[9:]})[0]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("dense")
    return {family: tiny_folder(root / family, family=family) for family in FAMILIES}


@pytest.mark.parametrize(("kind", "group"), PRECISIONS, ids=IDS)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, "float32") for family in FAMILIES), ("gemma3", "bfloat16"), ("mistral", "bfloat16")],
)
def test_a_folder_gives_the_bits_of_quantising_on_the_fly(folders, tmp_path, family, kind, group, dtype):
    folder = folders[family]
    out = tmp_path / "out"
    words = ["--group-size", str(group)] if kind == "int4" else []
    assert main(["quantize", str(folder), "--to", kind, *words, "--dtype", dtype, "--out", str(out)]) == 0
    dense, _ = extract(load_model(folder, dtype=dtype).model)
    assert dense is not None
    wanted = logits(NativeRunner(dense, quantization=kind, group_size=group))
    loaded = load_model(out, dtype=dtype)
    assert loaded.quantization == kind
    got = logits(build_runner(loaded.model, path="native"))
    assert torch.equal(got, wanted)
    other = logits(NativeRunner(dense, quantization="int4" if kind == "int8" else "int8"))
    assert not torch.equal(other, wanted)


def test_larger_groups_are_rougher(folders):
    dense, _ = extract(load_model(folders["llama"]).model)
    assert dense is not None
    plain = logits(NativeRunner(dense))
    errors = [float((logits(NativeRunner(dense, quantization="int4", group_size=g)) - plain).norm()) for g in (32, 64)]
    assert 0 < errors[0] < errors[1]


def test_the_file_is_small_and_holds_no_dense_linear(folders, tmp_path):
    out = quantised(folders["qwen2"], tmp_path / "out", "int4")
    tensors = load_file(out / "model.safetensors")
    dense = load_file(folders["qwen2"] / "model.safetensors")
    linears = [name for name in dense if name.endswith("proj.weight")]
    assert linears and not any(name in tensors for name in linears)
    assert all(name.removesuffix("weight") + part in tensors for name in linears for part in ("codes", "scales"))
    assert "lm_head.codes" in tensors and "model.embed_tokens.weight" in tensors  # tied before
    assert torch.equal(tensors["model.layers.0.self_attn.q_proj.bias"], dense["model.layers.0.self_attn.q_proj.bias"])
    config = read_config(out)["quantization_config"]
    assert config == {"quant_method": "dspark", "version": 1, "bits": 4, "group_size": 32, "dtype": "float32"}
    source = json.loads((out / "dspark_source.json").read_text())
    assert source["precision"] == "int4" and source["versions"]["torch"]


def test_nothing_dense_is_held(folders, tmp_path):
    loaded = load_model(quantised(folders["llama"], tmp_path / "out", "int8"))
    matrices = [name for name, p in loaded.model.named_parameters() if p.dim() == 2]
    assert matrices == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.05), ("int4", 0.35)])
@pytest.mark.parametrize("path", ["torch", "general"])
def test_other_paths_run_it_too(folders, tmp_path, kind, bound, path):
    loaded = load_model(quantised(folders["gemma3"], tmp_path / "out", kind))
    wanted = logits(build_runner(load_model(folders["gemma3"]).model, path="general"))
    got = logits(build_runner(loaded.model, path=path))
    assert (got - wanted).norm() < bound * wanted.norm()


def test_int8_on_the_torch_path_is_that_of_the_fly(folders, tmp_path):
    loaded = load_model(quantised(folders["qwen3"], tmp_path / "out", "int8"))
    wanted = build_runner(load_model(folders["qwen3"]).model, path="torch", quantization="int8")
    assert torch.equal(logits(build_runner(loaded.model, path="torch")), logits(wanted))


def test_the_engine_takes_it_as_target_and_draft(folders, tmp_path):
    from dspark import LLM, SamplingParams

    out = quantised(folders["llama"], tmp_path / "out", "int8")
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    fly = LLM(str(folders["llama"]), quantization="int8", exact=True, path="native", max_num_seqs=2)
    llm = LLM(str(out), draft=str(out), exact=True, path="native", max_num_seqs=2)
    assert llm.info()["draft_quantization"] == "int8"
    assert llm.info()["quantization"] == "int8" and llm.info()["weights"] == "int8 as on disk"
    assert "int8" in llm.info()["lossless_against"]
    wanted = fly.generate("hello", params)[0].outputs[0].token_ids
    assert llm.generate("hello", params)[0].outputs[0].token_ids == wanted


def test_the_same_precision_asked_for_is_no_error_another_is(folders, tmp_path):
    loaded = load_model(quantised(folders["llama"], tmp_path / "out", "int8"))
    build_runner(loaded.model, path="native", quantization="int8")
    with pytest.raises(ValueError, match="int8 already and cannot become int4"):
        build_runner(loaded.model, path="native", quantization="int4")


def _refused(words: str, *arguments: object, capsys: Any) -> None:
    assert main([str(a) for a in arguments]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in line, line


def test_bad_requests_are_one_line(folders, tmp_path, capsys):
    dense, out = folders["llama"], quantised(folders["llama"], tmp_path / "out", "int8")
    _refused("not empty", "quantize", dense, "--to", "int8", "--out", out, capsys=capsys)
    _refused("quantised already", "quantize", out, "--to", "int4", "--out", tmp_path / "b", capsys=capsys)
    asked = ("quantize", dense, "--to", "int8", "--group-size", 64, "--out", tmp_path / "b")
    _refused("--group-size is for int4", *asked, capsys=capsys)
    _refused("does not exist", "quantize", tmp_path / "no", "--to", "int8", "--out", tmp_path / "b", capsys=capsys)
    assert not (tmp_path / "b").exists()


def _damage(out: Path, edit: Any) -> None:
    tensors = load_file(out / "model.safetensors")
    edit(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def test_damaged_folders_are_one_line(folders, tmp_path):
    def fails(words: str) -> None:
        with pytest.raises(ValueError, match=words) as caught:
            load_model(out)
        assert "\n" not in str(caught.value)

    out = quantised(folders["llama"], tmp_path / "out", "int4")
    whole = (out / "model.safetensors").read_bytes()
    name = "model.layers.1.mlp.up_proj"
    _damage(out, lambda tensors: tensors.pop(f"{name}.scales"))
    fails(f"lack {name}.scales")
    (out / "model.safetensors").write_bytes(whole)
    _damage(out, lambda tensors: tensors.update({f"{name}.scales": tensors[f"{name}.scales"][:, :1].clone()}))
    fails(f"{name}.scales has shape")
    (out / "model.safetensors").write_bytes(whole)
    _damage(out, lambda tensors: tensors.update({f"{name}.scales": tensors[f"{name}.scales"].float()}))
    fails(f"{name}.scales is torch.float32")
    (out / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    fails("damaged or cut short")
    (out / "model.safetensors").write_bytes(whole)
    config = read_config(out)
    for key, value, words in (("version", 2, "version 2"), ("bits", 3, "bits=3"), ("group_size", 48, "group_size=48")):
        changed = config | {"quantization_config": config["quantization_config"] | {key: value}}
        (out / "config.json").write_text(json.dumps(changed))
        fails(words)


@pytest.mark.parametrize("shape", [(1, 32), (33, 100), (40, 129), (7, 31)], ids=str)
def test_codes_are_what_they_say(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for kind, group in PRECISIONS:
        made = quantise(weight, kind, group_size=group)
        assert (tuple(made.codes.shape), tuple(made.scales.shape)) == code_shapes(kind, shape, made.group_size)
        assert made.shape == shape and made.integers().shape == shape
        bound = 0.01 if kind == "int8" else 0.16
        assert (made.dense(torch.float32) - weight).norm() < bound * weight.norm()
        parts = join([made, made])
        assert torch.equal(parts.dense(torch.float32)[shape[0] :], made.dense(torch.float32))


def test_rows_in_torch_are_the_kernel_s_bits():
    weight = torch.randn(64, 1000, generator=torch.Generator().manual_seed(2))
    weight[3], weight[4] = 0, weight[4] * 1e-30
    weight[5, 7] = torch.inf
    made = quantise(weight, "int8")
    codes, scales = quantise_rows(weight, exact=True)
    whole = torch.arange(64) != 5
    assert torch.equal(made.codes[whole], codes[whole])
    assert torch.equal(made.scales[whole], scales[whole, 0]) and made.scales[5].isnan() and scales[5].isnan()


def test_a_group_s_scale_is_the_best_of_those_tried():
    """An independent search over a fine grid finds nothing much better."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    made: Quantised = quantise(weight, "int4", group_size=64)
    error = (made.dense(torch.float32) - weight).square().sum(1)
    scales = weight.abs().amax(1)[:, None, None] / torch.linspace(-10, 10, 401)[None, :, None]
    grid = torch.round(weight[:, None] / scales).clamp(-8, 7) * scales
    best = (grid - weight[:, None]).square().sum(-1).nan_to_num(torch.inf).amin(1)
    assert (error < 1.15 * best).all()


def test_peers_of_a_benchmark_cannot_read_it(folders, tmp_path, capsys):
    """transformers would fill what it does not know with noise."""
    out = quantised(folders["llama"], tmp_path / "out", "int8")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"task": "t", "id": "1", "prompt": "hello"}) + "\n")
    capsys.readouterr()
    words = ["bench", "--model", str(out), "--data", str(rows), "--peer", "hf-plain", "--drafts", "none"]
    _refused("cannot read a folder of dspark quantize", *words, capsys=capsys)
