"""GeneralRunner: any transformers causal LM, run by its own code with our attention put in its place.
It must never touch the model's weights, nor leave the model changed between passes.

Shapes: T new tokens, H query heads, G key-value heads, E head_dim, V vocabulary, D hidden.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from dspark.model.attention import PagedAttention
from dspark.model.batch import Packed, Span, pack
from dspark.model.cache import KVCache, LayerSpec
from dspark.model.kernels import AttentionMaker
from dspark.model.runner import Output

_NAME = "dspark_paged"
_SELF_TEST_TOKENS = 6


class _Recorder:
    """Stands for the attention of a trial pass: notes what each layer asks, attends within the pass."""

    def __init__(self) -> None:
        self.layers: dict[int, dict[str, Any]] = {}

    def note(self, module: Any, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> None:
        layer = module.layer_idx
        if layer in self.layers:
            raise ValueError(f"layer {layer} attends twice in one pass")
        if not getattr(module, "is_causal", True):
            raise ValueError(f"layer {layer} is not causal")
        self.layers[layer] = dict(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=k.shape[3],
            value_dim=v.shape[3],
            window=kwargs.get("sliding_window") or 0,
        )


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function transformers calls in each layer: query (1, H, T, E), key and value (1, G, T, E), rotated; returns
    (1, T, H, E). The pass comes as the keyword argument `dspark_pass`, which the model hands down to its layers."""
    paged = kwargs.get("dspark_pass")
    if paged is None:
        raise ValueError("the layers do not receive the model's keyword arguments")
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise ValueError("a layer adds a mask or bias of its own to the attention scores")
    if isinstance(paged, _Recorder):
        paged.note(module, query, key, value, kwargs)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    head_dim, value_dim = query.shape[3], value.shape[3]
    k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
    paged.write(module.layer_idx, k, F.pad(v, (0, head_dim - value_dim)) if value_dim < head_dim else v)
    scale = kwargs.get("scaling")
    out = paged.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        scale=head_dim**-0.5 if scale is None else float(scale),
        softcap=kwargs.get("softcap") or 0.0,
        sinks=kwargs.get("s_aux"),
    )
    return out[None, ..., :value_dim], None


# The library's own registry of attention functions. No mask function of that name is registered: transformers then
# builds no mask at all, and the paged attention masks by positions.
AttentionInterface.register(_NAME, _attention)


class GeneralRunner:
    """Runs packed passes with the model's own forward. Its rows feel their company (exact is False)."""

    name = "general"
    exact = False

    def __init__(self, model: Any, *, max_context: int | None = None) -> None:
        """Raises ValueError when the architecture cannot run over a paged cache; two short trial passes decide."""
        config = model.config.get_text_config()
        self.model = model
        self.num_layers = int(config.num_hidden_layers)
        self.hidden_size = int(config.hidden_size)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        limit = getattr(config, "max_position_embeddings", None)
        self.max_context = int(max_context or limit or 2048)
        self.device = model.get_input_embeddings().weight.device
        self.cache_dtype = model.dtype
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        try:
            layers = self._trial()
            self.layer_specs = [_layer_spec(config, layers[i], i) for i in range(self.num_layers)]
            self._attention = AttentionMaker(num_heads=layers[0]["num_heads"])
            self._self_test()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{type(model).__name__} cannot run over a paged cache: {error}") from error

    def hold_weakly(self) -> None:
        """From now on the model lives only as long as somebody else keeps it."""
        if not isinstance(self.model, weakref.ProxyTypes):
            self.model = weakref.proxy(self.model)

    @torch.no_grad()
    def forward(self, packed: Packed, cache: KVCache, *, taps: Sequence[int] = ()) -> Output:
        """See ModelRunner.forward. Taps are in the model's dtype."""
        tokens = torch.from_numpy(packed.tokens).long()
        positions = torch.from_numpy(packed.positions).long()
        rows = torch.from_numpy(packed.logit_rows).long().to(self.device)
        out = self._call(tokens, positions, rows, self._attention(packed, cache), hidden=bool(taps))
        logits = out.logits[0] if self._keeps_logits else out.logits[0, rows]
        if taps:
            assert len(out.hidden_states) == self.num_layers + 1
        return Output(logits=logits.float(), taps=[out.hidden_states[tap][0] for tap in taps])

    def _call(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        paged: PagedAttention | _Recorder,
        *,
        hidden: bool = False,
    ) -> Any:
        optional: dict[str, Any] = {"logits_to_keep": rows} if self._keeps_logits else {}
        if hidden:
            optional["output_hidden_states"] = True
        with _our_attention(self.model.config):
            return self.model(
                input_ids=tokens[None].to(self.device),
                position_ids=positions[None].to(self.device),
                use_cache=False,
                dspark_pass=paged,
                **optional,
            )

    @torch.no_grad()
    def _trial(self) -> dict[int, dict[str, Any]]:
        """What each layer asks of its attention."""
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise ValueError("it is an encoder-decoder model")
        recorder = _Recorder()
        ids = torch.arange(2)
        self._call(ids, ids, torch.tensor([1], device=self.device), recorder)
        missing = [layer for layer in range(self.num_layers) if layer not in recorder.layers]
        if missing or len(recorder.layers) != self.num_layers:
            raise ValueError(f"layers {missing} do not use transformers' attention interface")
        return recorder.layers

    @torch.no_grad()
    def _self_test(self) -> None:
        """A prompt in two chunks over a paged cache must give what the model itself gives. This catches what cannot
        be seen from outside: recurrent state, shared caches, positions that are not followed."""
        ids = [(7 * i + 3) % self.vocab_size for i in range(_SELF_TEST_TOKENS)]
        wanted = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0, -1].float()
        cache = KVCache(self.layer_specs, num_pages=4, page_size=4, dtype=self.cache_dtype, device=self.device)
        cache.open(0, ids)
        cache.reserve(0, len(ids))
        for start, end in ((0, 3), (3, len(ids))):
            packed = pack([Span(seq_id=0, start=start, tokens=ids[start:end], num_logits=1)], cache)
            got = self.forward(packed, cache).logits[0]
        bound = 1e-2 if self.cache_dtype == torch.float32 else 0.3
        if not (got - wanted).abs().mean() <= bound * wanted.std():
            raise ValueError("its logits over a paged cache differ from those of its own forward")


@contextlib.contextmanager
def _our_attention(config: Any) -> Iterator[None]:
    """The configuration names our attention within, and what it named before (also in its parts) afterwards."""
    parts = {key: part for key in config.sub_configs if (part := getattr(config, key, None)) is not None}
    before = config._attn_implementation
    before_parts = {key: part._attn_implementation for key, part in parts.items()}
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = {"": before, **before_parts} if parts else before


def _layer_spec(config: Any, asked: dict[str, Any], layer: int) -> LayerSpec:
    """The cache shape of a layer; its window from the configuration's layer types, else from what the layer asks."""
    if asked["value_dim"] > asked["head_dim"]:
        raise ValueError(f"layer {layer} has values wider than its keys")
    window = int(asked["window"])
    kinds = getattr(config, "layer_types", None)
    if kinds:
        if kinds[layer] not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer {layer} has {kinds[layer]}, which is not supported")
        stated = int(config.sliding_window) if kinds[layer] == "sliding_attention" else 0
        if window and window != stated:
            raise ValueError(f"layer {layer} attends over {window} tokens where the configuration says {stated}")
        window = stated
    return LayerSpec(num_kv_heads=asked["num_kv_heads"], head_dim=asked["head_dim"], window=window)
