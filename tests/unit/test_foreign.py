"""Checkpoints quantised by others, packed here word by word from the formats' definitions, against the dense weights.
It must never share a line with the reader: the packers below are loops over single integers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.model.load import load_model
from dspark.model.memory import weights
from tests.driver import Driver, own_logits, runner_of
from tests.tiny_folder import tiny_folder

GROUP = 16
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ: nibble i of a word holds this one of its eight columns
Packed = tuple[dict[str, Tensor], Tensor]


def grid(weight: Tensor, group: int, top: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers 0..top (O, I), zeros (O, G) and float16 scales (O, G) with weight about (q - zero) * scale."""
    rows, width = weight.shape
    parts = weight.float().numpy().reshape(rows, width // group, group)
    scales = ((parts.max(-1) - parts.min(-1)) / top + 1e-4).astype(np.float16)
    zeros = np.random.default_rng(seed).integers(top // 3, top // 2 + 2, scales.shape)
    codes = np.clip(np.rint(parts / scales[..., None].astype(np.float32)) + zeros[..., None], 0, top).astype(np.int64)
    return codes.reshape(rows, width), zeros, scales


def expand(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_of: list[int]) -> Tensor:
    out = np.zeros(codes.shape, np.float32)
    for i, group in enumerate(group_of):
        out[:, i] = (codes[:, i] - zeros[:, group]).astype(np.float32) * scales[:, group].astype(np.float32)
    return torch.from_numpy(out)


def words(values: list[int], bits: int) -> int:
    """One signed 32-bit word, the first value lowest."""
    word = 0
    for i, value in enumerate(values):
        assert 0 <= value < 2**bits
        word |= int(value) << (bits * i)
    return word - 2**32 if word >= 2**31 else word


def pack_rows(matrix: np.ndarray, bits: int, order: list[int] | None = None) -> Tensor:
    """Along the last axis."""
    per = 32 // bits
    table = []
    for row in matrix:
        blocks = [list(row[i : i + per]) for i in range(0, len(row), per)]
        table.append([words([block[j] for j in order] if order else block, bits) for block in blocks])
    return torch.tensor(table, dtype=torch.int32)


def awq(name: str, weight: Tensor) -> Packed:
    codes, zeros, scales = grid(weight, GROUP, 15, 1)
    tensors = {
        f"{name}.qweight": pack_rows(codes.T, 4, AWQ_COLUMNS),
        f"{name}.qzeros": pack_rows(zeros.T, 4, AWQ_COLUMNS),
        f"{name}.scales": torch.from_numpy(scales.T.copy()),
    }
    return tensors, expand(codes, zeros, scales, [i // GROUP for i in range(weight.shape[1])])


def gptq(name: str, weight: Tensor, *, bits: int = 4, shift: int = 1, shuffled: bool = False) -> Packed:
    codes, zeros, scales = grid(weight, GROUP, 2**bits - 1, 2)
    zeros[0, 0] = 0 if shift else zeros[0, 0]
    group_of = [i // GROUP for i in range(weight.shape[1])]
    if shuffled:
        group_of = list(np.random.default_rng(4).permutation(group_of))
    stored = (zeros - shift) % 2**bits
    tensors = {
        f"{name}.qweight": pack_rows(codes, bits).T.contiguous(),
        f"{name}.qzeros": pack_rows(stored.T, bits),
        f"{name}.scales": torch.from_numpy(scales.T.copy()),
    }
    if shuffled:
        tensors[f"{name}.g_idx"] = torch.tensor(group_of, dtype=torch.int32)
    return tensors, expand(codes, zeros, scales, group_of)


def packed(name: str, weight: Tensor) -> Packed:
    codes, _, scales = grid(weight, GROUP, 15, 3)
    zeros = np.full(scales.shape, 8)
    tensors = {
        f"{name}.weight_packed": pack_rows(codes, 4),
        f"{name}.weight_scale": torch.from_numpy(scales),
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }
    return tensors, expand(codes, zeros, scales, [i // GROUP for i in range(weight.shape[1])])


def plain(name: str, weight: Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True).bfloat16() / 127
    codes = torch.round(weight / scale.float()).clamp(-128, 127).to(torch.int8)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale}, codes.float() * scale.float()


def scheme(bits: int, layout: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group" if bits == 4 else "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | more}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
CASES: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], Packed]]] = {
    "awq": (AWQ, awq),
    "gptq": (GPTQ, gptq),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda name, w: gptq(name, w, shift=0)),
    "gptq-act-order": (GPTQ | {"desc_act": True}, lambda name, w: gptq(name, w, shuffled=True)),
    "gptq-8": (GPTQ | {"bits": 8}, lambda name, w: gptq(name, w, bits=8)),
    "packed": (scheme(4, "pack-quantized", group_size=GROUP), packed),
    "plain": (scheme(8, "int-quantized"), plain),
}


def checkpoint(root: Path, settings: dict[str, Any], pack: Callable[[str, Tensor], Packed]) -> tuple[Path, Path]:
    """A folder whose linears are packed, and one with the same weights dense."""
    packed_folder, dense = root / "packed", tiny_folder(root / "dense", family="qwen2")
    packed_folder.mkdir()
    for path in dense.iterdir():
        (packed_folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(dense / "model.safetensors")
    theirs = dict(tensors)
    for key in [key for key in tensors if key.endswith("proj.weight")]:
        parts, tensors[key] = pack(key.removesuffix(".weight"), theirs.pop(key))
        theirs |= parts
    save_file({k: v.contiguous() for k, v in tensors.items()}, dense / "model.safetensors", metadata={"format": "pt"})
    save_file(theirs, packed_folder / "model.safetensors", metadata={"format": "pt"})
    change(packed_folder, settings)
    return packed_folder, dense


def change(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_were_packed(case, tmp_path):
    folder, dense = checkpoint(tmp_path, *CASES[case])
    loaded, wanted = load_model(folder), load_model(dense)
    theirs = dict(wanted.model.named_parameters())
    ours = dict(loaded.model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    ids = torch.arange(20)[None]
    assert torch.equal(loaded.model(ids).logits, wanted.model(ids).logits)
    assert loaded.quantization is None and loaded.origin is not None and "expanded to float32" in loaded.origin
    assert loaded.eos_token_ids == wanted.eos_token_ids


W8A8 = scheme(8, "int-quantized")
W8A8["config_groups"]["group_0"]["input_activations"] = dict(
    num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True
)


@pytest.mark.parametrize("path", ["native", "torch"])
def test_int8_by_row_is_kept_as_it_is(path, tmp_path):
    folder, dense = checkpoint(tmp_path, W8A8, plain)
    loaded, wanted = load_model(folder), load_model(dense)
    assert loaded.quantization == "int8" and loaded.origin == "compressed-tensors, 8 bits"
    assert [name for name, p in loaded.model.named_parameters() if p.dim() == 2] == ["model.embed_tokens.weight"]
    theirs, codes = load_file(folder / "model.safetensors"), dict(loaded.model.named_buffers())
    for name in (name for name in theirs if name.endswith("proj.weight")):
        assert torch.equal(codes[name.replace(".weight", ".codes")], theirs[name])
    ids = torch.arange(20)[None]
    assert torch.equal(loaded.model(ids).logits, wanted.model(ids).logits)  # transformers' own code: expanded
    runner: Any = runner_of(loaded.model, path, max_context=loaded.max_context)
    exact = own_logits(wanted.model, range(20))
    errors = []
    for made in (runner, runner_of(wanted.model, path, quantization="int8")):
        driver = Driver(made)
        driver.open(0)
        errors.append(float((driver.step({0: list(range(20))})[0] - exact).norm()))
    assert 0 < errors[0] < 1.3 * errors[1]  # no rougher than int8 made on the fly, which takes the head too
    if path == "native":
        found = weights(folder, path=path)
        assert found is not None and found.num_bytes == pytest.approx(runner.num_weight_bytes, rel=0.02)


def test_another_layout_gives_other_weights(tmp_path):
    """The negative control: GPTQ's two versions differ by one in their zeros."""
    folder, dense = checkpoint(tmp_path, *CASES["gptq"])
    change(folder, GPTQ | {"checkpoint_format": "gptq_v2"})
    name = "model.layers.0.mlp.down_proj.weight"
    ours = dict(load_model(folder).model.named_parameters())[name]
    assert not torch.equal(ours, load_file(dense / "model.safetensors")[name])


def _fails(folder: Path, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr("dspark.model.foreign._is_there", lambda module: False)
    folder, _ = checkpoint(tmp_path, *CASES["awq"])
    for settings, words in (
        ({"quant_method": "torchao", "quant_type": {}}, "pip install torchao"),
        (AWQ | {"version": "gemv"}, "version='gemv'.*pip install gptqmodel"),
        (GPTQ | {"bits": 3}, "bits=3.*pip install gptqmodel"),
        (scheme(4, "pack-quantized", symmetric=False), "pip install compressed-tensors"),
        (scheme(8, "float-quantized", type="float"), "pip install compressed-tensors"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "pip install bitsandbytes"),
    ):
        change(folder, settings)
        _fails(folder, words)
    change(folder, {"quant_method": "oddity"})
    _fails(folder, "'oddity' is known neither")


def test_damaged_checkpoints_are_one_line(tmp_path):
    folder, _ = checkpoint(tmp_path, *CASES["awq"])
    file = folder / "model.safetensors"
    tensors, whole = load_file(file), file.read_bytes()
    name = "model.layers.1.mlp.up_proj"
    save_file({k: v for k, v in tensors.items() if k != f"{name}.scales"}, file, metadata={"format": "pt"})
    _fails(folder, f"lack {name}.scales")
    save_file({k: v for k, v in tensors.items() if not k.startswith(name)}, file, metadata={"format": "pt"})
    _fails(folder, f"lack {name}.weight")
    cut = tensors | {f"{name}.scales": tensors[f"{name}.scales"][:-1].clone()}
    save_file(cut, file, metadata={"format": "pt"})
    _fails(folder, "not in AWQ's layout")
    file.write_bytes(whole[: len(whole) // 2])
    _fails(folder, "damaged or cut short")
