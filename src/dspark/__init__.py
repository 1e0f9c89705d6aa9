"""dspark: lossless speculative decoding for causal language models.
Importing it must never import torch: names are looked up in their modules at first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.config import EngineConfig, SpeculationConfig
    from dspark.engine.aio import AsyncLLM
    from dspark.engine.llm import LLM
    from dspark.params import RequestSpeculation, SamplingParams, StructuredOutputs
    from dspark.types import CompletionOutput, RequestOutput, SpeculationRecord

__version__ = "0.1.0.dev0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "RequestSpeculation",
    "SamplingParams",
    "SpeculationConfig",
    "SpeculationRecord",
    "StructuredOutputs",
    "__version__",
]


def _home(name: str) -> str | None:
    """The module that defines a public name."""
    return {
        "LLM": "dspark.engine.llm",
        "AsyncLLM": "dspark.engine.aio",
        "CompletionOutput": "dspark.types",
        "EngineConfig": "dspark.config",
        "RequestOutput": "dspark.types",
        "RequestSpeculation": "dspark.params",
        "SamplingParams": "dspark.params",
        "SpeculationConfig": "dspark.config",
        "SpeculationRecord": "dspark.types",
        "StructuredOutputs": "dspark.params",
    }.get(name)


def __getattr__(name: str) -> Any:
    home = _home(name)
    if home is None:
        raise AttributeError(f"module 'dspark' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
