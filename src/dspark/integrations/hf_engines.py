"""Engines over a model object that a user has loaded, made once and kept with it.
They must never keep that model alive, copy its weights unasked, nor answer from weights that have changed since.

What is kept hangs at the model object, so it goes when the model goes; the model is reached from it by weak references.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dspark.config import EngineConfig, SpeculationConfig, engine_config, speculation_config
from dspark.engine.build import Target
from dspark.engine.llm import LLM
from dspark.model.families import extract
from dspark.model.load import LoadedModel
from dspark.model.registry import read_source
from dspark.model.tokenizer import NoTokenizer, Tokenizer

SHARED = "shared"
"""The path that computes with the model's own weights: torch where its family is covered, else general."""
MAX_ENGINES = 4
"""Of one model; the one that was asked longest ago goes first. Each has a cache of its own."""
_PLACE = "_dspark_engines"
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_NUM_CHECKED = 6
Draft = str | Mapping[str, Any] | nn.Module | None


class Engines:
    """What is built over one model. A copy of the model begins anew."""

    def __init__(self, model: Any = None) -> None:
        self.owner: Callable[[], Any] = (lambda: None) if model is None else weakref.ref(model)
        self.lock = threading.RLock()
        self.target: Target | None = None
        self.llms: dict[tuple, LLM] = {}
        self.weights: tuple = ()

    def __deepcopy__(self, memo: dict) -> Engines:
        return Engines()

    def __reduce__(self) -> tuple:
        return Engines, ()

    def llm(self, *, draft: Draft, engine: Mapping[str, Any], tokenizer: Any, assistant_tokenizer: Any) -> LLM:
        """The engine with these settings. The caller holds the lock."""
        model = self.owner()
        if self.target is None or self.weights != _state_of(model):
            self.llms.clear()
            self.target = _target(model, tokenizer)
        if tokenizer is not None:
            self.target.tokenizer = Tokenizer.of(tokenizer)
        config, (speculation, lent) = _engine_config(model, engine), _speculation(draft)
        key = (config, speculation, lent)
        known = self.llms.pop(key, None)
        if known is None:
            known = self._build(model, config, speculation, lent, assistant_tokenizer)
        self.llms[key] = known
        while len(self.llms) > MAX_ENGINES:
            del self.llms[next(iter(self.llms))]
        return known

    def _build(
        self, model: Any, config: EngineConfig, speculation: SpeculationConfig, lent: Any, assistant_tokenizer: Any
    ) -> LLM:
        target = self.target
        assert target is not None
        if lent is not None:
            assert speculation.model is not None
            target.lend_draft(speculation.model, _draft_target(model, target, lent, assistant_tokenizer))
        elif speculation.method == "model" and not _is_head(speculation) and isinstance(target.tokenizer, NoTokenizer):
            raise ValueError(
                f"draft {speculation.model!r} cannot be compared with a model without a tokenizer: give tokenizer=, or "
                "a draft that needs none, such as 'suffix'"
            )
        runner = target.runner(path=config.path, exact=config.exact, quantization=config.quantization)
        _check(model, runner, quantized=config.quantization is not None)
        built = LLM.over(target, config, speculation)
        for one in (target, *target.drafts.values()):
            for made in one.runners.values():
                if made.name == "general" and one.given is not None:
                    made.hold_weakly()
        self.weights = _state_of(model)
        return built


def engines_of(model: Any) -> Engines:
    """Those of this very object."""
    found = model.__dict__.get(_PLACE)
    if found is None or found.owner() is not model:
        found = model.__dict__[_PLACE] = Engines(model)
    return found


def forget(model: Any) -> None:
    """Drop what is kept over `model`: caches, packed weights, what was learned of acceptance."""
    model.__dict__.pop(_PLACE, None)


def check_model(model: Any) -> None:
    """Raises ValueError for what no path can run, with the reason."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate") or not hasattr(model, "get_output_embeddings"):
        raise ValueError(f"{name} is not a causal language model of transformers: give what from_pretrained returns")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model: dspark drafts for decoders only")
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no output projection: load it with AutoModelForCausalLM")
    if model.training:
        raise ValueError(f"{name} is in training mode, where dropout changes the answer: call model.eval() first")
    if len(devices := {str(parameter.device) for parameter in model.parameters()}) > 1:
        raise ValueError(f"{name} is spread over {', '.join(sorted(devices))}: dspark runs a model on one device")


def _state_of(model: Any) -> tuple:
    """Differs when weights were moved, replaced or written to in place (not through `.data`, which leaves no trace)."""
    return tuple(
        (id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        for tensor in (*model.parameters(), *model.buffers())
    )


def _target(model: Any, tokenizer: Any) -> Target:
    reach = weakref.ref(model)
    facts = _facts(model, None if tokenizer is None else Tokenizer.of(tokenizer))

    def given() -> LoadedModel:
        found = reach()
        assert found is not None, "the model is gone and its engines are not"
        return replace(facts, model=found)

    return Target(name=facts.name, device=str(model.device), dtype=_DTYPES.get(model.dtype, "auto"), given=given)


def _facts(model: Any, tokenizer: Tokenizer | None) -> LoadedModel:
    """As of a model that was loaded by us, without the model. Every row of its output may be emitted, as transformers
    does it, and what ends an answer is told with each request."""
    config = model.config.get_text_config()
    rows = int(model.get_output_embeddings().weight.shape[0])
    context = getattr(config, "max_position_embeddings", None)
    if not isinstance(context, int) or context < 1:
        raise ValueError(f"{type(model).__name__} does not say how long a context may be: set max_position_embeddings")
    source = read_source(Path(str(getattr(model, "name_or_path", "")))) or {}
    shape = f"{type(model).__name__}-{config.num_hidden_layers}x{config.hidden_size}-{rows}"
    return LoadedModel(
        model=nn.Module(),
        config=model.config,
        path=Path(),
        name=str(source.get("name") or shape),
        eos_token_ids=(),
        vocab_size=rows,
        num_valid_tokens=rows,
        max_context=context,
        dtype=model.dtype,
        tokenizer=NoTokenizer() if tokenizer is None else tokenizer,
    )


def _draft_target(model: Any, target: Target, draft: Any, tokenizer: Any) -> Target:
    """A draft model object beside the target. Without a tokenizer of its own it is taken to have the target's."""
    check_model(draft)
    rows, own = (int(m.get_output_embeddings().weight.shape[0]) for m in (draft, model))
    if tokenizer is None and rows != own:
        raise ValueError(
            f"the draft model has {rows} tokens and the model {own}: give tokenizer= and assistant_tokenizer= of both"
        )
    if tokenizer is not None and isinstance(target.tokenizer, NoTokenizer):
        raise ValueError("assistant_tokenizer is given and tokenizer is not: give both, or neither")
    made = _target(draft, tokenizer)
    if tokenizer is None:
        made.tokenizer = target.tokenizer
    return made


def _engine_config(model: Any, given: Mapping[str, Any]) -> EngineConfig:
    values: dict[str, Any] = {"path": SHARED, **given, "device": str(model.device)}
    if "device" in given or "dtype" in given or "seed" in given:
        raise ValueError("device, dtype and seed are not settings of engine=: the first two are the model's, seed= is")
    if values["path"] == SHARED:
        covered = not _altered(model) and extract(model)[0] is not None
        values["path"] = "torch" if covered else "general"
    elif values["path"] in ("native", "torch") and (reason := _altered(model)):
        raise ValueError(f"path {values['path']!r} would not see {reason}: leave path out")
    return engine_config(values)


def _altered(model: Any) -> str:
    """What a path over the bare weights would pass over; "" where there is nothing."""
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"the forward hook of {name or 'the model'}"
    outer = {type(model.get_input_embeddings()), type(model.get_output_embeddings())}
    if any(issubclass(kind, nn.Module) and "lora" in kind.__module__ for kind in outer):
        return "the adapter of its embeddings"
    return ""


def _speculation(draft: Draft) -> tuple[SpeculationConfig, nn.Module | None]:
    """The settings, and the draft where it is a model object; its name in the settings tells it from others."""
    values = {"model": draft} if isinstance(draft, nn.Module) else draft
    if not isinstance(values, Mapping):
        return SpeculationConfig.from_draft(values), None
    lent = values.get("model")
    if not isinstance(lent, nn.Module):
        return speculation_config(values), None
    return speculation_config({**values, "model": f"object {id(lent):x}"}), lent


def _is_head(speculation: SpeculationConfig) -> bool:
    from dspark.engine.heads import is_head

    folder = Path(str(speculation.model)).expanduser()
    return folder.is_dir() and is_head(folder)


@torch.no_grad()
def _check(model: Any, runner: Any, *, quantized: bool) -> None:
    """A few tokens must have the logits that the model itself gives them. This catches what cannot be seen from
    outside: adapters, weights wrapped in other types. The general path has checked itself."""
    from dspark.model.batch import Span, pack
    from dspark.model.cache import KVCache

    if runner.name == "general" or quantized:
        return
    ids = [(7 * i + 3) % runner.vocab_size for i in range(_NUM_CHECKED)]
    wanted = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1].float()
    cache = KVCache(runner.layer_specs, num_pages=2, page_size=4, dtype=runner.cache_dtype, device=runner.device)
    cache.open(0, ids)
    cache.reserve(0, len(ids))
    packed = pack([Span(seq_id=0, start=0, tokens=ids, num_logits=1)], cache)
    got = runner.forward(packed, cache).logits[0]
    bound = 1e-2 if runner.cache_dtype == torch.float32 else 0.3
    if not (got.to(wanted.device) - wanted).abs().mean() <= bound * wanted.std():
        raise ValueError(
            f"path {runner.name!r} gives other logits than the model itself: use engine={{'path': 'general'}}"
        )
