"""The training of a distillation whose draft is a head: by the trainer of `dspark train`, on the same answers.
It must never begin from a head of another shape than it says, nor leave one without calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dspark.bench.distil_learn import Console, device_of, keep, tell_estimate
from dspark.train.answers import Example
from dspark.train.estimate import quicker_precision

if TYPE_CHECKING:
    from dspark.bench.distil_run import DistilRun

ANCHORS = 48
"""Blocks of an answer that it learns from in a step."""


def learn_head(run: DistilRun, examples: Sequence[Example], *, stop: Callable[[], bool]) -> dict[str, Any] | None:
    """A head, by the trainer of `dspark train`, calibrated; as learn_draft."""
    from dspark.train.run import TrainingRun

    result = run.folder / "head"
    if result.exists() and "learned" in run.state:
        return dict(run.state["learned"]) | {"draft": str(result)}
    run.check_target(beside=run.target.num_parameters)  # a few of its layers, with what learning needs
    training = TrainingRun(
        head_recipe(run, examples),
        run.folder,
        generate=_nobody,
        device=run.args.device,
        threads=run.args.threads,
        progress=run.progress,
        sink=Console(run.say),
    )
    trainer = training.trainer(examples)
    if not trainer.progress.step and trainer.num_steps:
        learning = sum(p.numel() for p in trainer.parameters)
        tell_estimate(run, trainer, moments=8 * learning)
        run.state["head_steps"] = trainer.num_steps
        keep(run)
    trainer.num_steps = run.state.get("head_steps", trainer.num_steps)
    if not trainer.run(stop=stop):
        return None
    found = training.export(trainer, training.origin(run.argv))
    learned = {
        "kind": "head",
        "steps": trainer.num_steps,
        "blocks": trainer.progress.blocks,
        "seconds": round(trainer.progress.seconds, 1),
        "validation": found.as_dict(),
    }
    run.state["learned"] = learned
    keep(run)
    return learned | {"draft": str(result)}


def head_recipe(run: DistilRun, examples: Sequence[Example]) -> Any:
    """For `dspark train`: the shape of the head that it begins with, or of a new one."""
    from dspark.train.recipe import Recipe, TrainingRecipe

    learning = run.recipe.learning
    answers = sum(not example.held_out and example.num_answer > 2 for example in examples)
    tv = learning.loss == "tv"
    training = TrainingRecipe(
        blocks=max(1, round(learning.epochs * answers * ANCHORS)),
        sequences=learning.sequences,
        precision=_precision(run),
        anchors=ANCHORS,
        lr=learning.lr,
        temperature=learning.temperature if tv else 0.0,
        ce=0.1 if tv else 1.0,
        tv=0.9 if tv else 0.0,
        tv_from=0.3,
        validate_blocks=max(1, round(learning.epochs * answers * ANCHORS / 4)),
        checkpoint_minutes=learning.checkpoint_minutes,
        seed=learning.seed,
    )
    return Recipe(target=run.recipe.target, data=run.recipe.data, head=_head_shape(run), training=training)


def _head_shape(run: DistilRun) -> Any:
    import json

    from dspark.train.recipe import HeadRecipe

    start = run.recipe.start
    if start:
        from dspark.heads.checkpoint import read_head_config

        config = read_head_config(start)
        return HeadRecipe(
            kind=config.kind,
            context=config.context,
            layers=config.target_layer_ids,
            num_layers=config.num_layers,
            intermediate_size=0 if config.context == "target" else config.intermediate_size,
            draft_vocab_size=config.draft_vocab_size,
            block_size=config.block_size,
            anchor_feature=config.anchor_feature,
            markov_rank=config.markov_rank,
            markov_type=config.markov_type,
            confidence=config.has_confidence,
            start=start,
        )
    config = json.loads((run.target.folder / "config.json").read_text(encoding="utf-8"))
    last = int(config.get("text_config", config)["num_hidden_layers"]) - 1
    return HeadRecipe(layers=tuple(sorted({0, 1, last - 1, last} & set(range(last + 1)))), draft_vocab_size=16384)


def _precision(run: DistilRun) -> str:
    """Measured once, then kept: an interrupted run must end as one that was not."""
    if "precision" not in run.state:
        run.state["precision"] = quicker_precision(device_of(run))
        keep(run)
    return run.state["precision"]


def _nobody(*_: Any) -> list[list[int]]:
    raise AssertionError("the answers are there already")
