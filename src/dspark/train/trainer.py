"""Trainer: steps, checkpoints and validation of one head.
It must never depend on the wall clock or on how often it was interrupted: step n is the same step.

Shapes: N blocks, B positions, D hidden, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.heads.blocks import compile_parts
from dspark.heads.rope import rope_tables
from dspark.train.answers import Example
from dspark.train.blocks import Blocks, Head, anchor_rows, choose_anchors, make_blocks, output_logits, teacher_forced
from dspark.train.losses import block_losses, position_weights
from dspark.train.recipe import TrainingRecipe
from dspark.train.state_file import STATE, read_state, write_state
from dspark.train.states import States, TargetStates
from dspark.train.validate import Validation, validate

Row = dict[str, Any]
FROZEN = ("embed_tokens.weight", "lm_head.weight")
CHUNK = 64


@dataclass(kw_only=True)
class Progress:
    """Where a run is: `step` steps done, `blocks` blocks seen, `tokens` distinct answer tokens seen so far,
    `seconds` of training."""

    step: int = 0
    blocks: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[Row] = field(default_factory=list)


class Trainer:
    """Trains `head` on `examples` with states from `target`; `sink` gets a row every step and validation."""

    def __init__(
        self,
        head: Head,
        target: TargetStates,
        examples: Sequence[Example],
        recipe: TrainingRecipe,
        *,
        folder: Path,
        final_head: Tensor,
        weights: Mapping[str, float] | None = None,
        sink: Callable[[Row], None] | None = None,
    ) -> None:
        """`final_head` (V, D): the target's output rows, used where the recipe's temperature is above 0. `weights`:
        how often an epoch takes a task's answers; 1 by default."""
        self.recipe = recipe
        self.target = target
        self.folder = folder
        self.sink = sink or (lambda row: None)
        self.train = [example for example in examples if not example.held_out and example.num_answer > 2]
        held_out = [e for e in examples if e.held_out and e.num_answer > 2 and e.temperature == 0.0]
        self.held_out = held_out or [e for e in examples if e.held_out and e.num_answer > 2]
        self.epoch = epoch_indices([example.task for example in self.train], weights or {})
        if not len(self.epoch) or not self.held_out:
            raise ValueError("no answers to train on, or none held out: more prompts, weights or data.held_out needed")
        self.device = torch.device(target.runner.device)
        self.head = head.to(self.device)
        self.final_head = final_head
        self.autocast = recipe.precision == "bf16"
        _freeze(self.head, half=self.autocast)
        self.rope = rope_tables(head.config, head.config.max_positions, device=self.device)
        self.draft_index = _draft_index(head.draft_ids, head.config.vocab_size).to(self.device)
        self.parameters = [p for p in self.head.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=True
        )
        self.progress = Progress()
        self._seen: set[int] = set()
        self._seen_until = 0
        self.num_steps = math.ceil(recipe.blocks / (recipe.sequences * recipe.anchors))
        self.losses = block_losses
        if recipe.compile:
            compile_parts(self.head)
            self.losses = torch.compile(block_losses, dynamic=True)

    def run(self, *, max_seconds: float | None = None, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train until done, `stop()` is true, or `max_seconds` of this call have passed; True when done. Checkpoints
        on the way and at the end."""
        start = last_save = time.perf_counter()
        next_validation = self._next_validation()
        while self.progress.step < self.num_steps:
            before = time.perf_counter()
            row = self._step(self.progress.step)
            now = time.perf_counter()
            self.progress.seconds += now - before
            self.progress.step += 1
            self.progress.blocks += row["blocks"]
            self.progress.tokens += row["tokens"]
            self.sink(row | {"step": self.progress.step, "num_steps": self.num_steps})
            if self.progress.blocks >= next_validation:
                self.validate()
                next_validation = self._next_validation()
            if now - last_save > 60 * self.recipe.checkpoint_minutes:
                self.save()
                last_save = now
            if stop() or (max_seconds is not None and now - start > max_seconds):
                break
        self.save()
        return self.progress.step >= self.num_steps

    def validate(self) -> Validation:
        """Accepted length as the engine serves it, on the first of the held-out answers; a point of the curve."""
        found = self._validate(self.held_out[: self.recipe.validation_rows])
        row = {"validation": found.as_dict(), "blocks": self.progress.blocks, "tokens": self.progress.tokens}
        row["seconds"] = round(self.progress.seconds, 1)
        self.progress.history.append(row)
        self.sink(row | {"step": self.progress.step, "num_steps": self.num_steps})
        return found

    def validate_all(self) -> Validation:
        """The same on all held-out answers."""
        return self._validate(self.held_out)

    def _validate(self, examples: Sequence[Example]) -> Validation:
        return validate(self.head, self.target, examples, rope=self.rope, autocast=self.autocast)

    # -- one step

    def trial(self) -> float:
        """Seconds of a step's passes; nothing is learned from it."""
        start = time.perf_counter()
        self._gradients(0)
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    def _step(self, step: int) -> Row:
        lr = self._learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        totals = self._gradients(step)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.max_grad_norm)
        if not torch.isfinite(norm):
            raise ValueError(f"the gradient of step {step} is not finite: lower training.lr (now {self.recipe.lr:g})")
        self.optimizer.step()
        return {
            "blocks": totals.pop("blocks"),
            "tokens": self._new_tokens(step, self._examples_of(step)),
            "grad_norm": float(norm),
            "lr": lr,
        } | totals

    def _gradients(self, step: int) -> Row:
        """Of the step's blocks, and the mean losses."""
        rng = np.random.default_rng([self.recipe.seed, step])
        examples = [self.train[i] for i in self._examples_of(step)]
        anchors = [choose_anchors(example, self.recipe.anchors, rng) for example in examples]
        pairs = [(example, chosen) for example, chosen in zip(examples, anchors) if chosen]
        examples, anchors = [e for e, _ in pairs], [a for _, a in pairs]
        states = self.target([example.tokens for example in examples])
        blocks = make_blocks(examples, anchors, self.head.config.block_size).to(self.device)
        tv = self.recipe.tv if step >= self.recipe.tv_from * self.num_steps else 0.0
        self.optimizer.zero_grad(set_to_none=True)
        return self._backward(blocks, states, tv=tv) | {"blocks": len(blocks.anchors)}

    def _backward(self, blocks: Blocks, states: States, *, tv: float) -> Row:
        """Gradients of equation 12; returns the mean losses.

        Logits are made, used and dropped for CHUNK blocks at a time: (N, B, W) of a step would be hundreds of MB.
        """
        recipe = self.recipe
        weights = position_weights(blocks.valid, recipe.gamma)
        labels = self.draft_index[blocks.tokens].masked_fill(~blocks.valid, -1)
        scale = weights.sum().clamp(min=1e-6)
        law = self._target_law(blocks, states) if recipe.temperature else None
        totals = dict.fromkeys(("loss", "ce", "l1", "confidence", "accept_first"), 0.0)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            outputs = teacher_forced(self.head, blocks, states, self.rope)
            leaves: list[Tensor | None] = [None if t is None else t.detach().requires_grad_() for t in outputs]
            for start in range(0, len(labels), CHUNK):
                part = slice(start, start + CHUNK)
                hidden, latents, confidence = (None if leaf is None else leaf[part] for leaf in leaves)
                assert hidden is not None
                sums = self.losses(
                    output_logits(self.head, hidden, latents),
                    labels[part],
                    weights[part],
                    target=None if law is None else law[part],
                    confidence=confidence,
                    need_tv=tv > 0,
                )
                loss = (recipe.ce * sums.ce + tv * sums.l1 + recipe.confidence * sums.confidence) / scale
                loss.backward()
                totals["loss"] += float(loss.detach())
                for name in ("ce", "l1", "confidence"):
                    totals[name] += float(getattr(sums, name).detach() / scale)
                totals["accept_first"] += float((sums.accept[:, 0] * blocks.valid[part, 0]).sum())
        pairs = [(t, leaf.grad) for t, leaf in zip(outputs, leaves) if t is not None and leaf is not None]
        torch.autograd.backward([t for t, _ in pairs], [grad for _, grad in pairs])
        totals["accept_first"] /= max(1, int(blocks.valid[:, 0].sum()))
        return totals

    @torch.no_grad()
    def _target_law(self, blocks: Blocks, states: States) -> Tensor:
        """(N, B, W): the target's probabilities of the draft's tokens at each position, at the recipe's temperature."""
        final = states.taps[-1]
        last = torch.repeat_interleave(
            torch.tensor(states.starts[1:], device=self.device) - 1, torch.tensor(blocks.counts, device=self.device)
        )
        size = self.head.config.block_size
        rows = anchor_rows(blocks, states).unsqueeze(1) + torch.arange(size, device=self.device)
        rows, inverse = torch.minimum(rows, last.unsqueeze(1)).unique(return_inverse=True)
        logits = (final[rows].to(self.final_head.dtype) @ self.final_head.T).float() / self.recipe.temperature
        law = torch.softmax(logits, dim=-1)[:, self.head.draft_ids.to(self.device)]
        return law[inverse]

    # -- what depends on the step alone

    def _steps_an_epoch(self) -> int:
        return max(1, len(self.epoch) // self.recipe.sequences)

    def _examples_of(self, step: int) -> list[int]:
        """Indices into `train`."""
        epoch, index = divmod(step, self._steps_an_epoch())
        order = np.random.default_rng([self.recipe.seed, 7, epoch]).permutation(len(self.epoch))
        size = self.recipe.sequences
        return self.epoch[order[index * size : (index + 1) * size]].tolist()

    def _new_tokens(self, step: int, indices: Sequence[int]) -> int:
        """Answer tokens that no step before has seen."""
        if step >= self._steps_an_epoch():
            return 0
        if self._seen_until != step:
            self._seen = {i for earlier in range(step) for i in self._examples_of(earlier)}
        new = set(indices) - self._seen
        self._seen |= new
        self._seen_until = step + 1
        return sum(self.train[i].num_answer for i in new)

    def _learning_rate(self, step: int) -> float:
        recipe = self.recipe
        warm = max(1, round(recipe.warmup * self.num_steps))
        if step < warm:
            return recipe.lr * (step + 1) / warm
        falling = recipe.decay * (self.num_steps - warm)
        share = max(0.0, 1 - (self.num_steps - step) / max(1.0, falling))
        return recipe.lr * (recipe.final_lr + (1 - recipe.final_lr) * 0.5 * (1 + math.cos(math.pi * share)))

    def _next_validation(self) -> int:
        return (self.progress.blocks // self.recipe.validate_blocks + 1) * self.recipe.validate_blocks

    # -- checkpoints

    def save(self) -> None:
        """All that a later run needs to go on with the same steps; replaced as a whole."""
        kept = {name: p for name, p in self.head.state_dict().items() if name not in FROZEN}
        value = {
            "head": kept,
            "optimizer": self.optimizer.state_dict(),
            "progress": vars(self.progress),
            "draft_ids": self.head.draft_ids,
            "config": self._config(),
        }
        write_state(self.folder, value)
        (self.folder / "history.json").write_text(json.dumps(self.progress.history, indent=1))

    def _config(self) -> Row:
        """What makes a head another one; calibration comes after training."""
        return self.head.config.as_dict() | {"confidence_temperatures": ()}

    def resume(self) -> bool:
        """Continue from the folder's checkpoint, if there is one."""
        value = read_state(self.folder, device=self.device)
        if value is None:
            return False
        path = self.folder / STATE
        if not torch.equal(value["draft_ids"].cpu(), self.head.draft_ids.cpu()):
            raise ValueError(f"{path} is of another draft vocabulary: choose another output folder, or delete it")
        if value["config"] != self._config():
            raise ValueError(f"{path} is of another head: choose another output folder, or delete it")
        self.head.load_state_dict(value["head"], strict=False)
        self.optimizer.load_state_dict(value["optimizer"])
        self.progress = Progress(**value["progress"])
        return True


def epoch_indices(tasks: Sequence[str], weights: Mapping[str, float]) -> np.ndarray:
    """Indices of what one epoch takes: of a task of weight w, every answer w times on average, none at random."""
    counts: list[int] = []
    place: Counter[str] = Counter()
    for task in tasks:
        weight = weights.get(task, 1.0)
        counts.append(math.floor(weight * (place[task] + 1)) - math.floor(weight * place[task]))
        place[task] += 1
    return np.repeat(np.arange(len(tasks)), counts)


def _freeze(head: Head, *, half: bool) -> None:
    """The target's own rows learn nothing, and are kept in 16 bits where they are multiplied so anyway."""
    for module in (head.embed_tokens, head.lm_head):
        module.weight.requires_grad_(False)
        if half:
            module.weight.data = module.weight.data.to(torch.bfloat16)


def _draft_index(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """(V,): draft id of each target id, -1 where there is none."""
    index = torch.full((vocab_size,), -1, dtype=torch.long)
    index[draft_ids.cpu()] = torch.arange(len(draft_ids))
    return index
