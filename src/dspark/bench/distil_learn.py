"""The training of a distillation: a draft model, from answers to a folder that the engine loads.
It must never show a held-out answer to the trainer of a model, nor begin before memory and time are told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.bench.answering import EngineAnswerer
from dspark.bench.distil_run import LEARN_SHARE, REPORT_SECONDS, free_disk
from dspark.model.free_memory import cpu_free
from dspark.train.answers import Example
from dspark.train.estimate import WEIGHT, check_disk, check_memory, draft_bytes, measure

if TYPE_CHECKING:
    from dspark.bench.distil_run import DistilRun


def learn_draft(run: DistilRun, examples: Sequence[Example], *, stop: Callable[[], bool]) -> dict[str, Any] | None:
    """A draft model; what was learned, with the folder "draft". None where it was stopped."""
    import torch

    from dspark.model.load import load_model
    from dspark.model.save import save_model
    from dspark.provenance import provenance, scrub

    result = run.folder / "draft"
    if result.exists() and "learned" in run.state:
        return dict(run.state["learned"]) | {"draft": str(result)}
    assert run.draft is not None
    _check(run, run.draft.num_parameters, with_target=run.recipe.learning.loss != "ce")
    loaded = load_model(run.args.draft, dtype="float32", device=device_of(run), progress=run.progress)
    trainer = _trainer(run, examples, loaded)
    if trainer.resume():
        run.say(f"goes on at step {trainer.step} of {trainer.num_steps}")
    elif trainer.num_steps:
        tell_estimate(run, trainer, moments=8 * sum(p.numel() for _, p in trainer.parameters))
        trainer.save()  # from here on the number of steps stands
    if not trainer.run(stop=stop):
        return None
    learned = {
        "kind": "model",
        "steps": trainer.num_steps,
        "lessons": len(trainer.lessons),
        "seconds": round(trainer.seconds, 1),
        "loss": run.recipe.learning.loss,
        "precision": trainer.precision,
        "columns": trainer.columns.num_columns,
    }
    origin = provenance(run.argv, config={}, threads=torch.get_num_threads(), device=str(trainer.device))
    made = {"distilled_for": run.recipe.target, "recipe": scrub(run.recipe.as_dict()), "training": learned}
    save_model(loaded.model, loaded.path, result, provenance=origin | made)
    run.state["learned"] = learned
    keep(run)
    return learned | {"draft": str(result)}


def _trainer(run: DistilRun, examples: Sequence[Example], loaded: Any) -> Any:
    """Over the lessons of what is not held out, with laws and texts of its own where the loss wants them."""
    import torch

    from dspark.train.draft_trainer import DraftTrainer, trained_parameters

    if run.args.threads:
        torch.set_num_threads(run.args.threads)
    recipe = run.recipe.learning
    trained_parameters(loaded.model, recipe.layers)
    columns, laws = _laws(run, loaded)
    return DraftTrainer(
        loaded.model,
        lessons_of(run, examples, num_columns=columns.num_columns, max_context=loaded.max_context),
        recipe,
        folder=run.folder,
        columns=columns,
        laws=laws,
        own=_own_texts(run, examples, loaded, num_columns=columns.num_columns) if recipe.on_policy_share else None,
        sink=Console(run.say),
    )


def lessons_of(run: DistilRun, examples: Sequence[Example], *, num_columns: int, max_context: int) -> list[Any]:
    """Of the answers to prompts that are not held out."""
    from dspark.train.lessons import make_lesson

    made = [make_lesson(example, run.words, num_columns=num_columns) for example in examples if not example.held_out]
    kept = [lesson for lesson in made if lesson.rows and len(lesson.tokens) <= max_context]
    if not kept:
        raise ValueError(f"no answer fits the {max_context} tokens of the draft: lower --max-prompt-tokens")
    return kept


def _check(run: DistilRun, num_parameters: int, *, with_target: bool) -> None:
    """Memory and disk, before anything is loaded."""
    learning = num_parameters if not run.recipe.learning.layers else num_parameters // 2
    need = draft_bytes(num_parameters, learning)
    if with_target:
        run.check_target(beside=need)
    check_memory(
        need,
        cpu_free().num_bytes,
        what=f"training {run.recipe.draft}",
        cure="give --train-layers N, or name a smaller draft",
    )
    check_disk(2 * 3 * WEIGHT * learning + 2 * num_parameters, free_disk(run.folder), folder=run.folder)


def _laws(run: DistilRun, loaded: Any) -> tuple[Any, Any]:
    """The columns that are compared, and the target's laws where the loss needs them."""
    from dspark.train.laws import TargetLaws
    from dspark.train.lessons import columns_of

    words = None if run.words is None else run.words.to(device_of(run))
    columns = columns_of(
        words,
        num_target=run.target.facts.num_valid_tokens,
        num_draft=min(loaded.num_valid_tokens, loaded.vocab_size),
    )
    recipe = run.recipe
    if recipe.learning.loss == "ce":
        return columns, None
    from dspark.model.load import load_model
    from dspark.model.runner import build_runner

    target = load_model(run.args.model, device=device_of(run), progress=run.progress)
    runner = build_runner(target.model, device=device_of(run), threads=run.args.threads)
    laws = TargetLaws(
        runner,
        columns,
        num_valid=target.num_valid_tokens,
        temperature=recipe.learning.temperature,
        max_tokens=recipe.data.max_prompt_tokens + recipe.data.max_answer_tokens,
    )
    return columns, laws


def _own_texts(run: DistilRun, examples: Sequence[Example], loaded: Any, *, num_columns: int) -> Any:
    from dspark.model.save import save_model
    from dspark.train.own_texts import OwnTexts

    data, learning = run.recipe.data, run.recipe.learning

    def answerer(folder: Path) -> EngineAnswerer:
        return EngineAnswerer(
            str(folder),
            draft="none",
            max_model_len=data.max_prompt_tokens + data.max_answer_tokens,
            batch=data.batch,
            device=run.args.device,
            threads=run.args.threads,
        )

    return OwnTexts(
        [example for example in examples if not example.held_out],
        run.folder,
        snapshot=lambda folder: save_model(loaded.model, loaded.path, folder, provenance={}),
        answerer=answerer,
        num_columns=num_columns,
        max_tokens=data.max_answer_tokens,
        temperature=learning.temperature,
        seed=learning.seed,
    )


def tell_estimate(run: DistilRun, trainer: Any, *, moments: int) -> None:
    """Tell what it will take, by trial; fit the number of steps to the budget; refuse what does not fit in memory."""
    found = measure(trainer.trial, steps=trainer.num_steps)
    check_memory(
        moments + (found.peak_bytes or 0),
        cpu_free().num_bytes,
        what="a step of training with the optimizer's moments (the step measured)",
        cure="give --train-layers N or fewer --sequences, or name a smaller draft",
    )
    if run.args.minutes is not None:
        fitting = int(60 * run.args.minutes * LEARN_SHARE / max(found.seconds / max(1, found.steps), 1e-9))
        if fitting < 1:
            raise ValueError(f"--minutes {run.args.minutes:g} is less than one step of training takes: raise it")
        trainer.num_steps = min(trainer.num_steps, fitting)
    steps = trainer.num_steps
    run.say(replace(found, steps=steps, seconds=found.seconds * steps / max(1, found.steps)).text())


def device_of(run: DistilRun) -> str:
    import torch

    if run.args.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return run.args.device


def keep(run: DistilRun) -> None:
    from dspark.bench import distil_settings as settings

    settings.keep(run.folder, run.state)


class Console:
    """Rows of training for a person, every REPORT_SECONDS."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.last = 0.0
        self.began: tuple[float, int] | None = None

    def __call__(self, row: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if "validation" in row:
            self.say(
                f"step {row['step']}: accepted length {row['validation']['accepted_length']:.3f} on held-out answers"
            )
        if "loss" not in row or now - self.last < REPORT_SECONDS:
            return
        self.began = self.began or (now, row["step"])
        self.last = now
        steps = row["step"] - self.began[1]
        left = (row["num_steps"] - row["step"]) * (now - self.began[0]) / steps if steps else 0.0
        accept = row.get("accept", row.get("accept_first", 0.0))
        self.say(
            f"step {row['step']}/{row['num_steps']}: loss {row['loss']:.3f}, accepted {accept:.3f}, "
            f"{left / 60:.1f} min left"
        )
