"""DistilRecipe: everything that decides what a distillation makes.
It must never import torch, nor hold what a run may change its mind about (minutes, threads)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dspark.train.recipe import DataRecipe

LOSSES = ("tv", "kl", "ce")
HEAD = "head"


@dataclass(frozen=True, kw_only=True)
class LearningRecipe:
    """How a draft model learns. A step takes `sequences` answers; `epochs` goes over all of them.

    `loss`: "tv" or "kl" against the target's law at `temperature` at every place, or "ce", the answers' own tokens
    (sequence-level). Where draft and target are far apart the gradient of tv vanishes: for the share `tv_from` of the
    steps it is kl. `layers`: only the last so many layers and the final norm; 0: all of the draft.
    `on_policy_share` of the answers of a step are replaced by texts that the draft wrote itself, anew for each of
    `on_policy_rounds` equal parts of the training. `precision` of products; "auto": the quicker one by measurement,
    kept for the whole run.
    """

    loss: str = "tv"
    tv_from: float = 0.3
    temperature: float = 1.0
    epochs: float = 3.0
    sequences: int = 8
    lr: float = 2e-4
    warmup: float = 0.05
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    layers: int = 0
    on_policy_share: float = 0.0
    on_policy_rounds: int = 2
    precision: str = "auto"
    checkpoint_minutes: float = 3.0
    seed: int = 1

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss={self.loss!r} is not known: choose one of {', '.join(LOSSES)}")
        if self.precision not in ("auto", "bf16", "float32"):
            raise ValueError(f"precision={self.precision!r}: use auto, bf16 or float32")
        for name in ("sequences", "lr", "temperature", "max_grad_norm", "checkpoint_minutes", "on_policy_rounds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} is not usable: give a number above 0")
        for name in ("epochs", "layers", "weight_decay", "warmup"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} is not usable: give a number of at least 0")
        if not 0 <= self.tv_from <= 1:
            raise ValueError(f"tv_from={self.tv_from!r} is not usable: give a share, 0 to 1")
        if not 0 <= self.on_policy_share <= 1:
            raise ValueError(f"on-policy share {self.on_policy_share!r} is not usable: give 0 to 1")
        if self.on_policy_share and self.loss == "ce":
            raise ValueError(
                "an on-policy share needs the target's laws: use it with loss tv or kl (ce has only the target's own "
                "text to learn from)"
            )


@dataclass(frozen=True, kw_only=True)
class DistilRecipe:
    """One distillation. `draft`: "head", or a model's name or folder. `start`: the folder of a head to go on from.
    `digest`: of the prompts' texts."""

    target: str
    draft: str
    start: str = ""
    data: DataRecipe
    learning: LearningRecipe = field(default_factory=LearningRecipe)
    digest: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON, provenance and comparison."""
        return asdict(self)


def differences(kept: Mapping[str, Any], wanted: Mapping[str, Any], *, where: str = "") -> list[str]:
    """What differs between two recipes' dictionaries: "learning.lr is 0.1, not 0.2"."""
    found = []
    for name in sorted(set(kept) | set(wanted)):
        ours, theirs = kept.get(name), wanted.get(name)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            found += differences(ours, theirs, where=f"{where}{name}.")
        elif _plain(ours) != _plain(theirs):
            found.append(f"{where}{name} is {ours!r} there, not {theirs!r}")
    return found


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value
