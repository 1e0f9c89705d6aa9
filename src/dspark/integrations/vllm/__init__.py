"""dspark inside vLLM: `Proposer` for speculative_config, `Scheduler` for scheduler_cls (docs/vllm.md).
It must never import vLLM, or anything heavy, before one of them is asked for."""

from __future__ import annotations

from typing import Any

__all__ = ["Proposer", "Scheduler"]


def __getattr__(name: str) -> Any:
    if name == "Proposer":
        from dspark.integrations.vllm.proposer import Proposer

        return Proposer
    if name == "Scheduler":
        from dspark.integrations.vllm.scheduler import Scheduler

        return Scheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
