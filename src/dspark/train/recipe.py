"""Recipe: everything that decides what a training run makes, as frozen dataclasses, from TOML.
It must never import torch, or let an unknown key pass."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def _positive(where: str, settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"{where}.{name}={value!r} is not usable: give a number above 0")


def _not_negative(where: str, settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise ValueError(f"{where}.{name}={value!r} is not usable: give a number of at least 0")


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Prompts, and how the target answers them.

    prompts: JSON-lines files (relative to the recipe), each row with "prompt", "question", "text" or "turns".
    tasks: only rows of these (a row's "task", else its file's name); () all.
    temperatures: one answer a prompt for each of them; more_temperatures: further ones for some tasks, of the first
    more_prompts of their prompts together (0: all).
    weights: how often an epoch of training takes each answer of a task, on average; 1 where none is given.
    held_out: share of the prompts (by hash of the text) kept for validation and calibration. Prompts above
    max_prompt_tokens are left out and counted. max_prompts 0: all of them.
    """

    prompts: tuple[str, ...]
    tasks: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0,)
    more_temperatures: dict[str, tuple[float, ...]] = field(default_factory=dict)
    more_prompts: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    max_prompts: int = 0
    max_prompt_tokens: int = 512
    max_answer_tokens: int = 160
    held_out: float = 0.03
    batch: int = 128
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("data.prompts is empty: name at least one file of JSON lines")
        listed = {"temperatures": self.temperatures} | {
            f"more_temperatures.{task}": found for task, found in self.more_temperatures.items()
        }
        for name, found in listed.items():
            if not found or any(not 0 <= t <= 5 for t in found):
                raise ValueError(f"data.{name}={list(found)} are not usable: give numbers from 0 to 5")
        for task, weight in self.weights.items():
            if not 0 <= weight <= 100:
                raise ValueError(f"data.weights.{task}={weight!r} is not usable: give a number from 0 to 100")
        _positive("data", self, "max_prompt_tokens", "max_answer_tokens", "batch")
        _not_negative("data", self, "max_prompts", "more_prompts")
        if not 0 < self.held_out < 0.5:
            raise ValueError(f"data.held_out={self.held_out!r} is not usable: give a share between 0 and 0.5")


@dataclass(frozen=True, kw_only=True)
class HeadRecipe:
    """The head to make; see heads.config.HeadConfig.

    context "target" starts from the target's own layers `layers`, reads their keys and values, and with
    `anchor_feature` the target's last state; "fused" has `num_layers` layers with random weights over the fused states
    of `layers`, in the form that DeepSpec, vLLM and SGLang load. intermediate_size 0: the target's. draft_vocab_size 0:
    the whole vocabulary. kind "dspark" (markov_rank 0: DFlash) or "eagle3". `start`: the folder (relative to the
    recipe) of a finished head of the same shape to go on from, with its draft vocabulary.
    """

    kind: str = "dspark"
    context: str = "target"
    layers: tuple[int, ...]
    num_layers: int = 2
    intermediate_size: int = 0
    draft_vocab_size: int = 0
    block_size: int = 7
    anchor_feature: bool = True
    markov_rank: int = 64
    markov_type: str = "vanilla"
    confidence: bool = True
    start: str = ""

    def __post_init__(self) -> None:
        _positive("head", self, "block_size", "num_layers")
        _not_negative("head", self, "markov_rank", "draft_vocab_size", "intermediate_size")
        if self.context == "target" and self.intermediate_size:
            raise ValueError("head.intermediate_size goes with context 'fused': layers of the target keep their size")


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """How the head learns (DSpark, section 3.3).

    A step takes `sequences` answers and `anchors` blocks of each. Losses (equations 9 to 12): `ce`, `tv` and
    `confidence` weights; `tv` counts from the share `tv_from` of the run on. Position j weighs exp(-j / gamma).
    `temperature` is that of the laws compared: 0 compares with the answer's own tokens (greedy serving), above it
    with the target's law. `blocks` in all. The learning rate rises (share `warmup`), stays, and falls along a cosine
    to `final_lr` times itself in the last share `decay` of what follows the warm-up: a run stopped before that can be
    made longer. The target's states of up to `cache_gb` GB of answers are kept from one epoch to the next.
    """

    blocks: int = 200_000
    sequences: int = 8
    anchors: int = 48
    lr: float = 6e-4
    final_lr: float = 0.05
    warmup: float = 0.03
    decay: float = 1.0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    ce: float = 1.0
    tv: float = 0.0
    tv_from: float = 0.6
    confidence: float = 0.1
    gamma: float = 5.0
    temperature: float = 0.0
    precision: str = "bf16"
    compile: bool = False
    cache_gb: float = 0.0
    checkpoint_minutes: float = 5.0
    validate_blocks: int = 50_000
    validation_rows: int = 60
    seed: int = 1

    def __post_init__(self) -> None:
        _positive("training", self, "blocks", "sequences", "anchors", "lr", "gamma", "max_grad_norm")
        _positive("training", self, "checkpoint_minutes", "validate_blocks", "validation_rows")
        _not_negative("training", self, "ce", "tv", "confidence", "weight_decay", "temperature", "warmup", "final_lr")
        _not_negative("training", self, "cache_gb")
        if not 0 < self.decay <= 1:
            raise ValueError(f"training.decay={self.decay!r} is not usable: give a share above 0, at most 1")
        if self.precision not in ("bf16", "float32"):
            raise ValueError(f"training.precision={self.precision!r}: use bf16 or float32")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run. `target`: what `dspark generate --model` takes."""

    target: str
    data: DataRecipe
    head: HeadRecipe
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    name: str = "head"

    def as_dict(self) -> dict[str, Any]:
        """For JSON and provenance."""
        return asdict(self)


def load_recipe(path: str | Path, *, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A TOML file; prompt files become absolute. `overrides`: {"training.blocks": 1000}. Raises ValueError."""
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a recipe in TOML (see recipes/)") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    for key, value in (overrides or {}).items():
        table, _, name = key.rpartition(".")
        place = values.setdefault(table, {}) if table else values
        if not isinstance(place, dict):
            raise ValueError(f"{key}: {table} is {place!r}, not a table of settings; drop the part before the dot")
        place[name] = value
    recipe = build(Recipe, values, where=path.name)
    files = tuple(str((path.parent / file).resolve()) for file in recipe.data.prompts)
    start = str((path.parent / recipe.head.start).resolve()) if recipe.head.start else ""
    return replace(recipe, data=replace(recipe.data, prompts=files), head=replace(recipe.head, start=start))


def build(cls: type, values: Any, *, where: str) -> Any:
    """A dataclass from parsed TOML or JSON, nested ones too; unknown, missing and misplaced keys are errors."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: {values!r} is not a table: write its keys under [{where.rsplit(': ')[-1]}]")
    hints = get_type_hints(cls)
    if unknown := sorted(set(values) - {f.name for f in fields(cls)}):
        raise ValueError(f"{where}: unknown keys {', '.join(unknown)}; known are {', '.join(sorted(hints))}")
    made = {name: _convert(hints[name], value, f"{where}: {name}") for name, value in values.items()}
    try:
        return cls(**made)
    except TypeError as error:
        missing = str(error).rsplit(": ")[-1]
        raise ValueError(f"{where}: missing keys {missing}") from None


def _convert(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value, where=where)
    if getattr(hint, "__origin__", None) is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where}={value!r}: give a list")
        return tuple(_convert(hint.__args__[0], item, where) for item in value)
    if getattr(hint, "__origin__", None) is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}={value!r}: give a table")
        return {name: _convert(hint.__args__[1], item, f"{where}.{name}") for name, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"{where}={value!r}: give a value of type {hint.__name__}")
    return value
