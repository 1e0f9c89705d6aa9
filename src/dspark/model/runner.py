"""ModelRunner: what the engine asks of a model, and the choice of the path that answers.
It must never know who asks, nor keep anything of a pass beyond its output."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark.model.batch import Packed
from dspark.model.cache import KVCache, LayerSpec
from dspark.model.quantised import kind_held

_log = logging.getLogger(__name__)

PATHS = ("auto", "native", "torch", "general")


@dataclass(frozen=True, kw_only=True)
class Output:
    """R rows that wanted logits, V vocabulary, T tokens of the pass, D hidden.

    logits (R, V) float32. taps: for each layer asked for, (T, D).
    """

    logits: Tensor
    taps: list[Tensor]


class ModelRunner(Protocol):
    """A model that runs packed passes over a paged cache.

    `exact`: a row's bits do not depend on which rows, chunks and sequences share its pass.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int
    cache_dtype: torch.dtype
    device: torch.device
    exact: bool

    @property
    def layer_specs(self) -> Sequence[LayerSpec]:
        """The cache shape of each layer."""
        ...

    def forward(self, packed: Packed, cache: KVCache, *, taps: Sequence[int] = ()) -> Output:
        """Write the new tokens' keys and values, and return logits of packed.logit_rows.

        Tap i is the residual stream after i layers (0: the embeddings, scaled as the model does); tap num_layers is
        the stream after the final norm, which is the head's input.
        """
        ...


def build_runner(
    model: Any,
    *,
    path: str = "auto",
    exact: bool = False,
    quantization: str | None = None,
    device: str | torch.device = "cpu",
    threads: int | None = None,
    max_context: int | None = None,
    prepack: bool = True,
) -> ModelRunner:
    """A runner for a transformers causal LM, by the fastest path that can do what is asked.

    path: "native" (one C++ call a pass; CPU), "torch" (fused linears; CPU or GPU), both for the families in
    model/families; "general" (the model's own code; any architecture that uses transformers' attention interface);
    "auto" takes the first of these that works. exact: see ModelRunner. quantization: None, "int8", "int4".
    Weights that are quantised already (model/quantised_folder) stay so where the path has a kernel for them.
    threads: of torch, for the whole process, and of the native path. max_context: default the model's own limit.
    prepack: the torch path may lay weights out anew for its CPU, which takes a copy of them.
    The first two paths join some of the model's weights and leave views of them in their place: the model stays usable.
    Raises ValueError when the path cannot do it, saying why and what would.
    """
    if path not in PATHS:
        raise ValueError(f"unknown model path {path!r}: use one of {', '.join(PATHS)}")
    if quantization not in (None, "int8", "int4"):
        raise ValueError(f"unknown quantization {quantization!r}: use int8, int4 or none")
    quantization = _left_to_do(model, quantization)
    device = torch.device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    model.to(device)
    reasons: list[str] = []
    for candidate in PATHS[1:] if path == "auto" else (path,):
        refusal = _refusal(candidate, exact=exact, quantization=quantization, device=device)
        if refusal is None:
            settings: dict[str, Any] = {"quantization": quantization, "threads": threads, "prepack": prepack}
            built = _build(candidate, model, exact=exact, limit=max_context, **settings)
            if not isinstance(built, str):
                return built
            refusal = built
        reasons.append(f"{candidate} path: {refusal}")
        if path == "auto":
            _log.info("%s", reasons[-1])
    raise ValueError("; ".join(reasons))


def _left_to_do(model: Any, quantization: str | None) -> str | None:
    """`quantization`, unless the weights are that already. Raises ValueError where they are something else."""
    held = kind_held(model)
    if held is None:
        return quantization
    if quantization not in (None, held):
        raise ValueError(
            f"the weights are {held} already and cannot become {quantization}: leave quantization out, or give "
            "the dense model that they were made from"
        )
    return None


def _refusal(path: str, *, exact: bool, quantization: str | None, device: torch.device) -> str | None:
    """Why the path cannot do what is asked, whatever the model; None when it can."""
    if path == "native":
        return _native_refusal(device)
    if path == "torch":
        if exact and device.type != "cpu":
            return f"exact mode is not available on {device.type}; use device cpu, or leave exact mode off"
        if quantization == "int4":
            return "int4 needs the native path; use int8, or path native on a CPU with a C++ compiler"
        return None
    if exact:
        return "exact mode is not available; leave it off, or use a covered family on a CPU"
    if quantization is not None:
        return f"{quantization} is not available; leave quantization off, or use a covered family"
    return None


def _native_refusal(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"it runs on CPUs only, not on {device.type}; use path torch"
    from dspark.model.build import library, reason

    if library() is None:
        return f"{reason()}; install a C++ compiler, or use path torch"
    return None


def _build(
    path: str,
    model: Any,
    *,
    exact: bool,
    quantization: str | None,
    threads: int | None,
    limit: int | None,
    prepack: bool,
) -> ModelRunner | str:
    """The runner, or why this model cannot take this path."""
    if path == "general":
        from dspark.model.general import GeneralRunner

        try:
            return GeneralRunner(model, max_context=limit)
        except ValueError as error:
            return str(error)
    from dspark.model.families import extract

    weights, reason = extract(model, max_context=limit)
    if weights is None:
        return f"{reason}; use path general"
    if path == "native":
        from dspark.model.native import NativeRunner

        try:
            return NativeRunner(weights, quantization=quantization, threads=threads)
        except ValueError as error:
            return str(error)
    from dspark.model.decoder import TorchRunner

    return TorchRunner(weights, exact=exact, quantization=quantization, prepack=prepack)
