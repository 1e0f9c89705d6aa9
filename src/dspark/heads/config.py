"""HeadConfig: the shape of a draft head, and what of its target it was made for.
It must never hold a tensor, nor a setting of the training that made the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

KINDS = ("dspark", "eagle3")
CONTEXTS = ("fused", "target")
MARKOV_TYPES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """A draft head for one target.

    kind: "dspark" (a parallel block with Markov and confidence heads; `markov_rank` 0 is DFlash) or "eagle3" (one
    token at a time, features of its own fed back).
    context: where the keys and values of the context come from. "fused" is the paper's: hidden states after the
    target's layers `target_layer_ids` (0-based; -1 the embeddings), fused by one projection and norm, are projected to
    keys and values in each layer. "target": head layer i reads the keys and values that the target's own layer
    `target_layer_ids[i]` keeps in the cache; nothing is projected.
    vocab_size: of the target. draft_vocab_size: rows of the head's output, which `draft_ids` of the checkpoint maps to
    target ids. block_size: drafted tokens, and rows of a block (the anchor and block_size - 1 masks).
    sample_from_anchor False: row 0 predicts nothing and row j the token at anchor + j (DFlash), so a block has
    block_size + 1 rows.
    mask_token_id None: the mask is a vector of the head's own. anchor_feature: the target's final hidden state of the
    token before the anchor is projected and added to the anchor's embedding.
    `rope` holds transformers' rope parameters. confidence_temperatures: one a position, from calibration (DSpark,
    section 3.2.1); () when not calibrated.
    """

    kind: str = "dspark"
    context: str = "fused"
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    block_size: int = 7
    sample_from_anchor: bool = True
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int | None = None
    anchor_feature: bool = False
    markov_rank: int = 0
    markov_type: str = "vanilla"
    confidence: bool = True
    confidence_with_markov: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    norm_before_residual: bool = False
    rms_norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_positions: int = 8192
    confidence_temperatures: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in (("kind", KINDS), ("context", CONTEXTS), ("markov_type", MARKOV_TYPES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} of a draft head: use one of {', '.join(choices)}")
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            self._positive(name)
        for name in ("vocab_size", "draft_vocab_size", "block_size", "num_target_layers"):
            self._positive(name)
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError("a draft head needs num_heads divisible by num_kv_heads, and an even head_dim")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} is above the target's {self.vocab_size}: lower it"
            )
        self._check_layers()
        heats = self.confidence_temperatures
        if heats and (len(heats) != self.block_size or any(not heat > 0 for heat in heats)):
            raise ValueError(
                f"confidence_temperatures={list(heats)}: give {self.block_size} numbers above 0, one a draft, or none"
            )
        if self.confidence and self.confidence_with_markov and not self.markov_rank and self.kind == "dspark":
            raise ValueError("confidence_with_markov needs markov_rank above 0: set it, or turn the former off")

    def _positive(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} of a draft head: give a whole number of at least 1")

    def _check_layers(self) -> None:
        least = 0 if self.context == "target" else -1
        if not self.target_layer_ids or any(not least <= i < self.num_target_layers for i in self.target_layer_ids):
            raise ValueError(
                f"target_layer_ids={list(self.target_layer_ids)} do not fit a target of {self.num_target_layers} "
                f"layers: give ids from {least} to {self.num_target_layers - 1}"
            )
        if self.context == "target" and len(self.target_layer_ids) != self.num_layers:
            raise ValueError(
                f"context 'target' needs one target layer for each of the {self.num_layers} layers, "
                f"not {len(self.target_layer_ids)}"
            )

    @property
    def taps(self) -> tuple[int, ...]:
        """What the head wants of the target's passes, in ModelRunner's numbering (tap i: after i layers)."""
        taps = tuple(i + 1 for i in self.target_layer_ids) if self.context == "fused" else ()
        return (*taps, self.num_target_layers) if self.anchor_feature else taps

    @property
    def num_rows(self) -> int:
        """Rows of a block: block_size, and the anchor where it predicts nothing."""
        return self.block_size if self.sample_from_anchor else self.block_size + 1

    @property
    def has_confidence(self) -> bool:
        return self.confidence and self.kind == "dspark"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = asdict(self)
        values["rope"] = dict(self.rope)
        return values


def head_config(values: Mapping[str, Any]) -> HeadConfig:
    """From a parsed config; unknown keys are an error that names them."""
    known = {f.name for f in fields(HeadConfig)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"unknown keys {unknown} in a draft head's config: known are {sorted(known)}")
    values = dict(values)
    for name in ("target_layer_ids", "confidence_temperatures"):
        if name in values:
            values[name] = tuple(values[name])
    try:
        return HeadConfig(**values)
    except TypeError as error:
        raise ValueError(f"a draft head's config is not complete: {error}") from None
