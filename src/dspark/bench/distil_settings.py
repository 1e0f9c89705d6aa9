"""What a distillation is asked for: its recipe from the command's options, and whether an output folder is its own.
It must never load a model, nor go on in the folder of another run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dspark.train.distil_recipe import HEAD, DistilRecipe, LearningRecipe, differences
from dspark.train.recipe import DataRecipe

RUN = "run.json"
LEAST_TRAINED, LEAST_HELD_OUT = 8, 2
"""Prompts below which nothing can be learned or measured."""
FREE = ("threads", "device")


def recipe_of(args: argparse.Namespace, *, same_tokenizer: bool) -> DistilRecipe:
    """Raises ValueError for options that do not go together."""
    head = args.draft == HEAD
    loss = args.loss or ("tv" if same_tokenizer and not head else "ce")
    if head and (args.on_policy_share or loss == "kl" or args.train_layers):
        raise ValueError("--on-policy-share, --train-layers and --loss kl go with a draft model, not with a head")
    if not head and args.start:
        raise ValueError(
            f"--start is for heads: a draft model begins as it is, name it with --draft ({args.draft!r} now)"
        )
    if args.on_policy_share and not same_tokenizer:
        raise ValueError(
            "--on-policy-share needs a draft with the target's tokenizer, for the target to judge what it writes: "
            "leave it out, or name a draft of the target's family"
        )
    hottest = max(args.temperatures)
    learning = LearningRecipe(
        loss=loss,
        temperature=hottest if hottest > 0 else 1.0,
        epochs=args.epochs,
        sequences=args.sequences,
        lr=args.lr if args.lr is not None else 6e-4 if head else 2e-4,
        layers=args.train_layers,
        on_policy_share=args.on_policy_share,
        on_policy_rounds=args.on_policy_rounds,
        seed=args.seed,
    )
    data = DataRecipe(
        prompts=tuple(str(path) for path in files_of(args.data)),
        temperatures=tuple(args.temperatures),
        max_prompts=args.max_prompts,
        max_prompt_tokens=args.max_prompt_tokens,
        max_answer_tokens=args.max_tokens,
        held_out=args.held_out,
        batch=args.batch,
        seed=args.seed,
    )
    return DistilRecipe(target=args.model, draft=args.draft, start=args.start or "", data=data, learning=learning)


def files_of(paths: list[str]) -> list[Path]:
    """Of files and folders. Raises ValueError where there is none."""
    found = [file for path in map(Path, paths) for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    if not found:
        raise ValueError(
            f"{', '.join(paths)}: no *.jsonl there; give a file of JSON lines with prompts, or a folder of them"
        )
    return found


def digest_of(texts: list[str]) -> str:
    """Of the prompts, in order."""
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=12).hexdigest()


def claim_folder(folder: Path, recipe: DistilRecipe) -> dict[str, Any]:
    """What run.json holds of an earlier call, or a new one. Raises ValueError where it is of another run, and says what
    differs."""
    path = folder / RUN
    wanted = json.loads(json.dumps(recipe.as_dict()))
    # Where the files lie does not matter, what is in them does (digest).
    wanted["data"].pop("prompts")
    if not path.exists():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"--out {folder} holds other files and no {RUN}: give a new or an empty folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out {folder}: {error.strerror}; give a folder that can be written") from None
        state: dict[str, Any] = {"recipe": wanted, "answers_closed": False}
        keep(folder, state)
        return state
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        kept = state["recipe"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path} cannot be read: delete it and what is beside it, or give another --out") from None
    if different := differences(kept, wanted):
        raise ValueError(
            f"--out {folder} is of another run ({'; '.join(different[:4])}): give another folder, or the same settings"
        )
    return state


def keep(folder: Path, state: dict[str, Any]) -> None:
    """Write run.json as a whole."""
    temporary = folder / (RUN + ".part")
    temporary.write_text(json.dumps(state, indent=1), encoding="utf-8")
    temporary.replace(folder / RUN)


@dataclass(frozen=True, kw_only=True)
class Described:
    """A model as far as its files tell without its weights; `facts` and `name` as engine.build.Target has them."""

    name: str
    folder: Path
    tokenizer: Any
    facts: Any
    num_parameters: int
    max_context: int


def describe(name: str, *, progress: Any = None) -> Described:
    """Raises ValueError for a model that is not there or has no tokenizer."""
    from dspark.model.load import resolve
    from dspark.model.memory import read_headers
    from dspark.model.tokenizer import Tokenizer

    folder = resolve(name, progress=progress)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        vocab_size, max_context = int(text["vocab_size"]), int(text["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{folder} has no usable config.json: give a model's folder, a .gguf file or a name") from None
    tokenizer = Tokenizer(folder)
    facts = SimpleNamespace(num_valid_tokens=min(tokenizer.num_tokens, vocab_size), vocab_size=vocab_size)
    return Described(
        name=name,
        folder=folder,
        tokenizer=tokenizer,
        facts=facts,
        num_parameters=sum(math.prod(shape) for shape in read_headers(folder).values()),
        max_context=max_context,
    )
