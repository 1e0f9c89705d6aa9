"""DraftTrainer: steps and checkpoints of a draft language model that learns its target's answers.
It must never depend on the clock or on how often it was interrupted: step n is the same step.

Shapes: N lessons of a step, T places of the longest, R rows that guess, D hidden, W columns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dspark.train.distil_recipe import LearningRecipe
from dspark.train.estimate import quicker_precision
from dspark.train.laws import TargetLaws
from dspark.train.lessons import Columns, Lesson, LessonBatch, batch_of
from dspark.train.losses import draft_losses
from dspark.train.state_file import STATE, read_state, write_state

Row = dict[str, Any]
CHUNK_ELEMENTS = 1 << 24
"""Logits that are held at a time."""
WINDOW = 16
"""Steps among which lessons are ordered by length, so that little is padded."""
OwnLessons = Callable[[int], Sequence[Lesson]]
"""round -> lessons on texts of the draft's own, written by its weights as the checkpoint holds them."""


class DraftTrainer:
    """Trains a transformers causal model in place: weights in float32, products in the recipe's precision."""

    def __init__(
        self,
        network: Any,
        lessons: Sequence[Lesson],
        recipe: LearningRecipe,
        *,
        folder: Path,
        columns: Columns,
        laws: TargetLaws | None = None,
        own: OwnLessons | None = None,
        sink: Callable[[Row], None] | None = None,
    ) -> None:
        """`laws`: needed for losses tv and kl. `own`: needed where the recipe has an on-policy share."""
        assert lessons and (laws is not None or recipe.loss == "ce")
        self.network = network.train()
        self.lessons = lessons
        self.recipe = recipe
        self.folder = folder
        self.columns = columns
        self.laws = laws
        self.own = own
        self.sink = sink or (lambda row: None)
        self.body: nn.Module = network.base_model
        self.head: nn.Module = network.get_output_embeddings()
        self.softcap = getattr(network.config.get_text_config(), "final_logit_softcapping", None) or 0.0
        self.device = next(network.parameters()).device
        self.parameters = trained_parameters(network, recipe.layers)
        self.optimizer = torch.optim.AdamW(
            [p for _, p in self.parameters], lr=recipe.lr, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        self.num_steps = max(0, round(recipe.epochs * len(lessons) / recipe.sequences))
        self.precision = recipe.precision
        if self.precision == "auto":
            self.precision = quicker_precision(self.device.type)
        self.step = 0
        self.seconds = 0.0
        self._round: tuple[int, Sequence[Lesson]] | None = None
        self._order: tuple[int, list[list[int]]] | None = None

    def trial(self) -> float:
        """Seconds of a step of the longest lessons; nothing is learned from it."""
        longest = sorted(self.lessons, key=lambda lesson: -len(lesson.tokens))[: self.recipe.sequences]
        start = time.perf_counter()
        self._gradients(longest, kind=self.recipe.loss)
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    def run(self, *, max_seconds: float | None = None, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train until done, `stop()` is true, or `max_seconds` of this call have passed; True when done. Checkpoints
        on the way and at the end."""
        start = last_save = time.perf_counter()
        while self.step < self.num_steps:
            before = time.perf_counter()
            row = self._step(self.step)
            now = time.perf_counter()
            self.seconds += now - before
            self.step += 1
            self.sink(row | {"step": self.step, "num_steps": self.num_steps})
            if now - last_save > 60 * self.recipe.checkpoint_minutes:
                self.save()
                last_save = now
            if stop() or (max_seconds is not None and now - start > max_seconds):
                break
        self.save()
        return self.step >= self.num_steps

    # -- one step

    def _step(self, step: int) -> Row:
        lessons = self._lessons_of(step)
        lr = self._learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        row = self._gradients(lessons, kind=self._loss_of(step))
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in self.parameters], self.recipe.max_grad_norm)
        if not torch.isfinite(norm):
            raise ValueError(f"the gradient of step {step} is not finite: lower --lr (now {self.recipe.lr:g})")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return row | {"lr": lr, "grad_norm": float(norm)}

    def _loss_of(self, step: int) -> str:
        loss = self.recipe.loss
        return "kl" if loss == "tv" and step < self.recipe.tv_from * self.num_steps else loss

    def _gradients(self, lessons: Sequence[Lesson], *, kind: str) -> Row:
        """Gradients of the mean loss a row. Logits are made, used and dropped a chunk at a time."""
        batch = batch_of(lessons, self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            # Padding lies behind what counts, and attention is causal: no mask is needed.
            hidden = self.body(input_ids=batch.tokens, use_cache=False).last_hidden_state
            rows = hidden.flatten(0, 1)[batch.places]
            leaf = rows.detach().requires_grad_()
            loss, accepted = self._losses(batch, leaf, kind=kind)
        assert leaf.grad is not None
        rows.backward(leaf.grad)
        count = max(1, len(rows))
        return {"loss": loss / count, "accept": accepted / count, "tokens": sum(len(x.tokens) for x in lessons)}

    def _losses(self, batch: LessonBatch, leaf: Tensor, *, kind: str) -> tuple[float, float]:
        """Sums; gradients go to `leaf` and to the output rows."""
        loss = accepted = 0.0
        size = max(16, CHUNK_ELEMENTS // self.columns.num_columns)
        start = 0
        for lesson, count in zip(batch.lessons, batch.counts):
            law = None if kind == "ce" or self.laws is None else self.laws(lesson).to(self.device)
            for begin in range(0, count, size):
                part = slice(start + begin, start + min(begin + size, count))
                target = None if law is None else law[begin : begin + size]
                lost, held = draft_losses(self._logits(leaf[part]), batch.labels[part], target=target, kind=kind)
                (lost / max(1, len(leaf))).backward()
                loss += float(lost.detach())
                accepted += float(held)
            start += count
        return loss, accepted

    def _logits(self, hidden: Tensor) -> Tensor:
        """(R, D) -> (R, W) float32, as the engine draws from them."""
        logits = self.head(hidden)[:, self.columns.draft].float()
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    # -- what depends on the step alone

    def _lessons_of(self, step: int) -> list[Lesson]:
        epoch, index = divmod(step, self._steps_an_epoch())
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._epoch_order(epoch))
        chosen = [self.lessons[i] for i in self._order[1][index]]
        share = self.recipe.on_policy_share
        if not share:
            return chosen
        rng = np.random.default_rng([self.recipe.seed, 11, step])
        own = self._own_lessons(step)
        return [own[int(rng.integers(len(own)))] if own and rng.random() < share else lesson for lesson in chosen]

    def _steps_an_epoch(self) -> int:
        return -(-len(self.lessons) // self.recipe.sequences)

    def _epoch_order(self, epoch: int) -> list[list[int]]:
        """Indices of each step: a permutation, in windows of which steps get lessons of like length."""
        rng = np.random.default_rng([self.recipe.seed, 7, epoch])
        order = rng.permutation(len(self.lessons))
        size, steps = self.recipe.sequences, []
        for start in range(0, len(order), WINDOW * size):
            window = sorted(order[start : start + WINDOW * size], key=lambda i: len(self.lessons[i].tokens))
            steps += [[int(i) for i in window[at : at + size]] for at in range(0, len(window), size)]
        return [steps[i] for i in rng.permutation(len(steps))]

    def _own_lessons(self, step: int) -> Sequence[Lesson]:
        """Of the step's round. A round begins with a checkpoint, so that a later call finds the weights that wrote its
        texts, or the texts."""
        length = max(1, self.num_steps // self.recipe.on_policy_rounds)
        index = min(step // length, self.recipe.on_policy_rounds - 1)
        if self._round is None or self._round[0] != index:
            assert self.own is not None, "an on-policy share needs texts of the draft's own"
            if step == index * length:
                self.save()
            self._round = (index, self.own(index))
        return self._round[1]

    def _learning_rate(self, step: int) -> float:
        """Rises for a share `warmup` of the steps, then falls along a cosine to a tenth."""
        warm = max(1, round(self.recipe.warmup * self.num_steps))
        if step < warm:
            return self.recipe.lr * (step + 1) / warm
        share = (step - warm) / max(1, self.num_steps - warm)
        return self.recipe.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))

    # -- checkpoints

    def save(self) -> None:
        """All that a later run needs to go on with the same steps; replaced as a whole. Raises ValueError where the
        disk is full."""
        value = {
            "trained": {name: p.detach() for name, p in self.parameters},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "num_steps": self.num_steps,
            "precision": self.precision,
            "seconds": self.seconds,
        }
        write_state(self.folder, value)

    def resume(self) -> bool:
        """Continue from the folder's checkpoint, if there is one; number of steps and precision are its."""
        value = read_state(self.folder, device=self.device)
        if value is None:
            return False
        if set(value["trained"]) != {name for name, _ in self.parameters}:
            raise ValueError(
                f"{self.folder / STATE} trained other layers or another draft: choose another --out, or delete it"
            )
        with torch.no_grad():
            for name, parameter in self.parameters:
                parameter.copy_(value["trained"][name])
        self.optimizer.load_state_dict(value["optimizer"])
        self.step, self.num_steps, self.seconds = value["step"], value["num_steps"], value["seconds"]
        self.precision = value["precision"]
        return True


def trained_parameters(network: Any, layers: int) -> list[tuple[str, nn.Parameter]]:
    """Those that learn, by name; the others are frozen. `layers`: only so many of the last layers and the final norm;
    0: everything. Raises ValueError where there are fewer layers."""
    every = list(network.named_parameters())
    count = network.config.get_text_config().num_hidden_layers
    if layers > count:
        raise ValueError(
            f"--train-layers {layers}: the draft has {count} layers; give at most that, or 0 for all of it"
        )

    def learns(name: str) -> bool:
        words = name.split(".")
        if "layers" in words:
            return int(words[words.index("layers") + 1]) >= count - layers
        return words[-2] == "norm"

    chosen = every if layers == 0 else [(name, p) for name, p in every if learns(name)]
    kept = {name for name, _ in chosen}
    for name, parameter in every:
        parameter.requires_grad_(name in kept)
    return chosen
