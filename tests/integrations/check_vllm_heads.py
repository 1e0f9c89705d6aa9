"""Run by a python that has vLLM: does its own code recognise exported heads, and take every tensor?

    VLLM_PYTHON tests/integrations/check_vllm_heads.py CASES.json

CASES.json is a list of {"target": FOLDER, "asked": speculative_config}. For each head vLLM builds its configuration and
its draft network on this machine, and loads the file's tensors with its load_weights. Prints one JSON line a head. It
must never decide itself what vLLM would do: names, shapes and values are read from the network that vLLM has made.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

FUSED = {
    "self_attn.q_proj": ("self_attn.qkv_proj", 0),
    "self_attn.k_proj": ("self_attn.qkv_proj", 1),
    "self_attn.v_proj": ("self_attn.qkv_proj", 2),
    "mlp.gate_proj": ("mlp.gate_up_proj", 0),
    "mlp.up_proj": ("mlp.gate_up_proj", 1),
}


def main() -> None:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    cases = json.loads(Path(sys.argv[1]).read_text())
    first = True
    for case in cases:
        config = configure(case)
        with set_current_vllm_config(config):
            if first:
                init_distributed_environment(
                    1, 0, f"file://{Path(sys.argv[1]).resolve()}.store", local_rank=0, backend="gloo"
                )
                initialize_model_parallel()
                first = False
            with torch.no_grad():
                print(json.dumps(check(case, config)), flush=True)


def configure(case: dict[str, Any]) -> Any:
    """vLLM's configuration of a server with this head: what the printed command would make it read. The head's part is
    made by itself, since the whole refuses heads whose runner needs a GPU."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=case["target"], dtype="float32", max_model_len=64, enforce_eager=True)
    config = args.create_engine_config()
    args.speculative_config = case["asked"]
    config.speculative_config = args.create_speculative_config(config.model_config, config.parallel_config)
    return config


def check(case: dict[str, Any], config: Any) -> dict[str, Any]:
    """What vLLM has made of the head, and where its tensors went."""
    from safetensors.torch import load_file
    from vllm.model_executor.model_loader.utils import initialize_model

    draft = config.speculative_config.draft_model_config
    network = initialize_model(config, model_config=draft)
    for parameter in network.parameters():
        parameter.fill_(float("nan") if parameter.is_floating_point() else -7)
    tensors = load_file(Path(case["asked"]["model"]) / "model.safetensors")
    network.load_weights(iter(tensors.items()))
    found = dict(network.named_parameters())
    misplaced, pieces = [], {}
    for name, tensor in tensors.items():
        place = where(name, found)
        if name == "t2d":
            continue  # for training only
        if place is None:
            misplaced.append(f"{name} has no place")
            continue
        own, part = place
        pieces.setdefault(own, {})[part] = (name, tensor)
    for own, parts in pieces.items():
        start = 0
        for _, (name, tensor) in sorted(parts.items()):
            here = found[own][start : start + len(tensor)]
            start += len(tensor)
            if here.shape != tensor.shape or not bool((here == tensor.to(here.dtype)).all()):
                misplaced.append(f"{name} is not in {own}")
    empty = [
        name
        for name, parameter in found.items()
        if bool((parameter.isnan() if parameter.is_floating_point() else parameter == -7).any())
    ]
    return {
        "head": case["asked"]["model"],
        "method": config.speculative_config.method,
        "architectures": list(draft.hf_config.architectures),
        "network": type(network).__name__,
        "num_speculative_tokens": config.speculative_config.num_speculative_tokens,
        "num_tensors": len(tensors),
        "layer_ids": layer_ids(config),
        "misplaced": misplaced,
        "empty": empty,
    }


def where(name: str, found: dict[str, Any]) -> tuple[str, int] | None:
    """The network's parameter for a tensor of the file, and which of those that are one there."""
    part = 0
    for ours, (theirs, place) in FUSED.items():
        if ours in name:
            name, part = name.replace(ours, theirs), place
    name = name.replace("d2t", "draft_id_to_target_id")
    return next(((own, part) for own in (name, f"model.{name}") if own in found), None)


def layer_ids(config: Any) -> list[int]:
    """After how many of the target's layers the states are taken that the head fuses."""
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    return list(get_eagle3_aux_layers_from_config(config.speculative_config) or ())


if __name__ == "__main__":
    main()
