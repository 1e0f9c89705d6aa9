"""The plugin in a real vLLM: it loads by entry point, answers are vLLM's own, each request has lengths of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark.bench.profile import read_profile

TEXT = "The Amazon rainforest covers most of the Amazon basin. The basin covers seven million square kilometres. "
PROMPTS = [
    "1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4,",
    TEXT * 3 + "The Amazon",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n",
    "Once upon a time there was a lighthouse keeper who",
]
PROPOSER = {
    "method": "custom_class",
    "model": "dspark.integrations.vllm.Proposer",
    "num_speculative_tokens": 8,
}
MAX_TOKENS = 48


def drive(model: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(what the run found, its log)."""
    job = {"model": str(model), "prompts": PROMPTS, "max_tokens": MAX_TOKENS, "settings": settings}
    command = [sys.executable, str(Path(__file__).with_name("drive_vllm.py")), json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"plugin"'))), log


@pytest.fixture(scope="module")
def plain(smollm2):
    return drive(smollm2, {})[0]


@pytest.fixture(scope="module", params=["proposer", "scheduler"])
def drafted(request, smollm2, tmp_path_factory):
    path = tmp_path_factory.mktemp("vllm") / "profile.jsonl"
    settings: dict[str, Any] = {"speculative_config": PROPOSER, "additional_config": {"dspark": {"profile": str(path)}}}
    if request.param == "scheduler":
        settings["scheduler_cls"] = "dspark.integrations.vllm.Scheduler"
    return *drive(smollm2, settings), path


@pytest.mark.timeout(1800)
def test_greedy_text_is_that_of_stock_vllm(plain, drafted):
    found, log, _ = drafted
    assert found["plugin"], "the entry point was not called"
    assert "dspark drafts by suffix" in log and "dspark failed" not in log and "proposes nothing" not in log
    assert found["greedy"] == plain["greedy"]
    assert found["vllm:spec_decode_num_accepted_tokens"] > 0
    assert [len(answer) for answer in found["drawn"]] == [MAX_TOKENS] * len(PROMPTS)


@pytest.mark.timeout(1800)
def test_each_request_has_lengths_of_its_own(drafted):
    _, _, path = drafted
    assert read_profile(path).max_tokens > 1
    answers = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    by_request = {answer["id"]: tuple(step["verified"] for step in answer["steps"]) for answer in answers}
    assert len(set(by_request.values())) > 1
    in_one_step = {}
    for answer in answers:
        for step in answer["steps"]:
            in_one_step.setdefault(step["packed"], set()).add(step["verified"])
    assert any(len(lengths) > 1 for lengths in in_one_step.values())


@pytest.mark.timeout(1800)
def test_another_version_is_told_and_left_alone(smollm2, plain, tmp_path):
    """As vLLM would see it: a package that says it is vllm 0.99."""
    info = tmp_path / "vllm-0.99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0+cpu\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
        found, log = drive(smollm2, {"speculative_config": PROPOSER})
    assert "vllm>=0.32,<0.33" in log
    assert found["greedy"] == plain["greedy"]
    assert not found.get("vllm:spec_decode_num_draft_tokens")
