"""TrainingRun: from a recipe to a checkpoint folder, through answers, training, calibration and export.
It must never make an answer or a step twice that an earlier call has made.

The folder: answers/ (shards), training-state.pt and history.json (to resume), head/ (what the engine loads).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dspark.heads.checkpoint import save_head
from dspark.model.families import extract
from dspark.model.load import LoadedModel, load_model
from dspark.model.runner import build_runner
from dspark.model.weights import dense
from dspark.provenance import provenance, scrub
from dspark.train.answers import Example, Generate, make_answers
from dspark.train.calibrate import by_position, fit_temperatures, overall_ece
from dspark.train.figures import can_draw, draw_curve, draw_reliability
from dspark.train.prompts import read_prompts
from dspark.train.recipe import Recipe
from dspark.train.start import config_for, draft_vocabulary, finished_head, new_head, rope_of
from dspark.train.states import TargetStates
from dspark.train.trainer import Row, Trainer
from dspark.train.validate import Validation

Progress = Callable[[str, int, int], None]


class TrainingRun:
    """One recipe in one folder."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        *,
        generate: Generate,
        answers: Path | None = None,
        device: str = "auto",
        threads: int | None = None,
        progress: Progress | None = None,
        sink: Callable[[Row], None] | None = None,
    ) -> None:
        """`generate` answers prompts with the target (see answers.Generate). `answers`: the folder of its answers, so
        that several runs can share them; by default the run's own. device "auto": cuda where there is one.
        Raises ValueError for a recipe that does not fit its target."""
        if threads is not None:
            if threads < 1:
                raise ValueError(f"threads={threads} is not usable: give a whole number of at least 1")
            torch.set_num_threads(threads)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = device
        self.recipe = recipe
        self.folder = folder
        self.generate: Generate | None = generate
        self.answers_folder = answers or folder / "answers"
        self.progress = progress
        self.sink = sink
        self.loaded: LoadedModel = load_model(recipe.target, device=device, progress=progress)
        if self.loaded.quantization is not None:
            raise ValueError(
                f"{recipe.target} is quantised ({self.loaded.quantization}): train a head for the dense model "
                "that it was made from"
            )
        # The rope parameters and the weights are read before the runner packs them.
        weights, reason = extract(self.loaded.model, max_context=self.loaded.max_context)
        if weights is None:
            raise ValueError(f"a head cannot be trained for this target: {reason}")
        self.weights = weights
        self.runner = build_runner(self.loaded.model, device=device, threads=threads)

    def answers(self) -> list[Example]:
        """The target's answers to the recipe's prompts, made where they are missing."""
        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            raise ValueError(f"{self.recipe.target} has no tokenizer: training needs its chat template")

        def encode(text: str) -> Sequence[int]:
            return tokenizer.apply_chat_template([{"role": "user", "content": text}])

        prompts, left_out = read_prompts(self.recipe.data, encode)
        self._tell({"prompts": len(prompts), "left_out": left_out})
        assert self.generate is not None, "answers() is called once"
        generate, self.generate = self.generate, None  # an engine and its cache, which training does not need
        return make_answers(
            prompts,
            self.recipe.data,
            target=self.recipe.target,
            folder=self.answers_folder,
            generate=generate,
            progress=self.progress,
        )

    def trainer(self, examples: Sequence[Example]) -> Trainer:
        """A trainer at the folder's checkpoint, or at the start."""
        recipe = self.recipe
        # By the answers to all prompts: more samples of some tasks must not change what the head can say.
        counted = [e for e in examples if not e.held_out and e.temperature == recipe.data.temperatures[0]]
        draft_ids = draft_vocabulary(counted, self.weights.vocab_size, recipe.head.draft_vocab_size)
        rope = rope_of(self.loaded.config)
        config = config_for(recipe.head, self.weights, rope=rope, draft_vocab_size=len(draft_ids))
        if recipe.head.start:
            head = finished_head(recipe.head.start, config, self.weights)
        else:
            head = new_head(config, self.weights, draft_ids, seed=recipe.training.seed)
        longest = max(len(e.tokens) for e in examples)
        extra = (config.num_target_layers,) if recipe.training.temperature else ()
        states = TargetStates(
            self.runner,
            config,
            max_tokens=max(2048, longest),
            extra_taps=extra,
            keep_bytes=int(recipe.training.cache_gb * 1e9),
        )
        covered = _coverage(examples, head.draft_ids)
        self._tell(
            {"answer_tokens": sum(e.num_answer for e in examples), "answers": len(examples), "coverage": covered}
        )
        trainer = Trainer(
            head,
            states,
            examples,
            recipe.training,
            folder=self.folder,
            final_head=dense(self.weights.head),
            weights=recipe.data.weights,
            sink=self.sink,
        )
        if trainer.resume():
            self._tell({"resumed_at": trainer.progress.step})
        return trainer

    def export(self, trainer: Trainer, origin: Mapping[str, Any], *, dtype: str = "bfloat16") -> Validation:
        """Validate and calibrate on all held-out answers, and write head/ with its report and figures.

        Temperatures are fitted on every second held-out answer and reported on the others, then fitted on all.
        """
        trainer.validate()
        found = trainer.validate_all()
        head, folder = trainer.head, self.folder / "head"
        folder.mkdir(parents=True, exist_ok=True)
        report: dict[str, Any] = {"validation": found.as_dict(), "history": trainer.progress.history}
        if head.config.has_confidence:
            temperatures, report["calibration"] = self._calibrate(found, folder)
            head.config = replace(head.config, confidence_temperatures=tuple(temperatures))
        progress = {name: getattr(trainer.progress, name) for name in ("step", "blocks", "tokens", "seconds")}
        save_head(
            head,
            folder,
            provenance=dict(origin) | {"recipe": scrub(self.recipe.as_dict()), "training": progress},
            target_name=self.recipe.target,
            dtype=dtype,
        )
        if can_draw():
            draw_curve(trainer.progress.history, folder / "curve.png")
        else:
            self._tell({"figures": "none, as matplotlib is missing; pip install dspark[bench]"})
        (folder / "report.json").write_text(json.dumps(report, indent=1, sort_keys=True))
        return found

    def _calibrate(self, found: Validation, folder: Path) -> tuple[list[float], dict[str, Any]]:
        """Temperatures of all held-out rows, and how well temperatures of one half do on the other."""
        logits, right = found.confidence.double().numpy(), found.right.numpy()
        half = found.owner.numpy() % 2 == 0
        fitted = fit_temperatures(logits[half], right[half])
        before, after = by_position(logits[~half], right[~half]), by_position(logits[~half], right[~half], fitted)
        temperatures = fit_temperatures(logits, right)
        if can_draw():
            draw_reliability(before, after, folder / "reliability.png")
        return temperatures, {
            "temperatures": temperatures,
            "ece": [overall_ece(before), overall_ece(after)],
            "before": [r.as_dict() for r in before],
            "after": [r.as_dict() for r in after],
        }

    def origin(self, argv: Sequence[str]) -> dict[str, Any]:
        """Provenance of what the command `argv` makes here."""
        return provenance(argv, config={}, threads=torch.get_num_threads(), device=self.device)

    def _tell(self, row: Row) -> None:
        if self.sink is not None:
            self.sink(row)


def _coverage(examples: Sequence[Example], draft_ids: torch.Tensor) -> float:
    """Share of the held-out answers' tokens that the draft vocabulary has."""
    known = set(draft_ids.tolist())
    tokens = [t for e in examples if e.held_out for t in e.tokens[e.num_prompt :]]
    return round(sum(t in known for t in tokens) / max(1, len(tokens)), 4)
