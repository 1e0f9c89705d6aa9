"""The skeleton: a network of transformers without memory for its matrices, to be filled with weights from elsewhere.
It must never hold a dense copy of what will be put in its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _Hollow(TorchFunctionMode):
    """Whatever is made by torch.empty with two dimensions or more has a shape and no memory: matrices of parameters.
    Vectors and computed buffers (rotary frequencies) are real."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty:
            size = args[0] if args and isinstance(args[0], (tuple, list)) else given.get("size", args)
            if len(size) > 1:
                given["device"] = "meta"
        return func(*args, **given)


def build_skeleton(config: Any, *, dtype: torch.dtype) -> Any:
    """The causal language model that `config` (of transformers) describes; its matrices are on the device "meta".

    Raises ValueError where transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM

    dense = copy.deepcopy(config)
    if hasattr(dense, "quantization_config"):
        del dense.quantization_config
    try:
        with _Hollow():
            return AutoModelForCausalLM.from_config(dense, dtype=dtype)
    except (ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        raise ValueError(f"transformers cannot build this model: {error}") from error


def place(network: Any, name: str, tensor: Tensor) -> None:
    """Make `tensor` the parameter `name`."""
    owner, _, last = name.rpartition(".")
    setattr(network.get_submodule(owner), last, nn.Parameter(tensor, requires_grad=False))
