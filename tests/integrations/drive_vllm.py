"""One vLLM, in a process of its own, on a few prompts: its tokens and counters as one JSON line on stdout.
It must never set anything but what its argument says, beside what makes a CPU run small and repeatable."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def main(job: dict[str, Any]) -> None:
    """`job`: model, prompts, max_tokens, and `settings` of vllm.LLM. Greedy, then drawn with a seed."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **job["settings"],
    )
    found: dict[str, Any] = {"plugin": "dspark.integrations.vllm.plugin" in sys.modules}
    for name, temperature in (("greedy", 0.0), ("drawn", 0.8)):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=job["max_tokens"], ignore_eos=True)
        outputs = llm.generate(job["prompts"], params, use_tqdm=False)
        found[name] = [list(output.outputs[0].token_ids) for output in outputs]
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_num_"):
            found[metric.name] = getattr(metric, "value", getattr(metric, "values", None))
    print(json.dumps(found), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
