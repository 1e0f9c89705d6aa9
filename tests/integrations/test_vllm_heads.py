"""Exported heads in a real vLLM: its configuration code recognises them and every tensor goes where it reads it.

It runs where vLLM is installed, or with DSPARK_VLLM_PYTHON naming a python that has it. It must never need a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.heads.checkpoint import make_head, save_head
from dspark.heads.config import HeadConfig
from dspark.integrations.export import export
from tests.tiny_folder import tiny_folder

PYTHON = os.environ.get("DSPARK_VLLM_PYTHON") or (sys.executable if find_spec("vllm") else None)
pytestmark = pytest.mark.skipif(PYTHON is None, reason="vLLM is not installed, and DSPARK_VLLM_PYTHON is not set")
TARGET_VOCAB = 265
BLOCK = HeadConfig(
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=TARGET_VOCAB,
    draft_vocab_size=TARGET_VOCAB,
    block_size=4,
    target_layer_ids=(0, 1),
    num_target_layers=3,
    mask_token_id=TARGET_VOCAB - 1,
    markov_rank=6,
    qk_norm=True,
)
EAGLE = dataclasses.replace(
    BLOCK,
    kind="eagle3",
    num_layers=1,
    markov_rank=0,
    confidence=False,
    mask_token_id=None,
    qk_norm=False,
    draft_vocab_size=80,
)
HEADS = {
    "whole": (BLOCK, "dspark", "Qwen3DSparkForCausalLM"),
    "reduced": (dataclasses.replace(BLOCK, draft_vocab_size=80), "dspark", "Qwen3DSparkForCausalLM"),
    "no confidence": (dataclasses.replace(BLOCK, confidence=False), "dspark", "Qwen3DSparkForCausalLM"),
    "masks only": (dataclasses.replace(BLOCK, sample_from_anchor=False), "dspark", "Qwen3DSparkForCausalLM"),
    "dflash": (
        dataclasses.replace(BLOCK, markov_rank=0, confidence=False, sample_from_anchor=False),
        "dflash",
        "DFlashQwen3ForCausalLM",
    ),
    "eagle3": (EAGLE, "eagle3", "Eagle3LlamaForCausalLM"),
    "eagle3 of qwen3": (dataclasses.replace(EAGLE, qk_norm=True), "eagle3", "Eagle3Qwen3ForCausalLM"),
    "deepspec": (BLOCK, "dspark", "Qwen3DSparkForCausalLM"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By head, what vLLM made of it; all in one process, as importing vLLM takes most of the time."""
    folder = tmp_path_factory.mktemp("heads")
    target = tiny_folder(folder / "target", family="qwen3")
    cases = []
    for name, (config, method, _) in HEADS.items():
        torch.manual_seed(len(cases))
        head = make_head(config).eval()
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_()
        head.draft_ids = torch.randperm(TARGET_VOCAB)[: config.draft_vocab_size].sort().values
        save_head(head, folder / name, store_embeddings=True)
        to = "deepspec" if name == "deepspec" else "vllm"
        made = export(str(folder / name), to=to, out=folder / "out" / name, target=str(target), dtype="float32")
        asked = {"method": method, "model": str(made.path), "num_speculative_tokens": config.block_size}
        if made.command:
            words = shlex.split(made.command)
            assert words[:3] == ["vllm", "serve", str(target)]
            assert json.loads(words[-1]) == asked
        cases.append({"target": str(target), "asked": asked})
    (folder / "cases.json").write_text(json.dumps(cases))
    assert PYTHON is not None
    command = [PYTHON, str(Path(__file__).with_name("check_vllm_heads.py")), str(folder / "cases.json")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"head"')]
    assert len(lines) == len(cases), (done.stdout + done.stderr)[-4000:]
    return dict(zip(HEADS, lines))


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", HEADS)
def test_vllm_reads_it(found: dict[str, Any], name: str) -> None:
    config, method, network = HEADS[name]
    seen = found[name]
    assert seen["method"] == method and seen["network"] == network
    assert seen["num_speculative_tokens"] == config.block_size
    assert seen["layer_ids"] == [i + 1 for i in config.target_layer_ids]
    assert seen["misplaced"] == [] and seen["num_tensors"] > 10
    left = {"model.mask_embedding"} if method != "eagle3" else set()  # vLLM's placeholder of heads that have their own
    assert set(seen["empty"]) <= left, "vLLM has parameters that the file did not fill"
