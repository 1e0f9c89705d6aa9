"""validate: what a head is worth when it is served, measured on answers it has not seen.
It must never report a loss in place of an accepted length.

Shapes: N blocks, B positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.heads.blocks import Rope
from dspark.train.answers import Example
from dspark.train.blocks import Head, greedy_chains, make_blocks
from dspark.train.states import TargetStates


@dataclass(kw_only=True)
class Validation:
    """Greedy serving of answers already known, with whole blocks: the walk that the engine would take.

    accepted_length: tokens a target pass, bonus included, over all passes; by_task the same by task.
    conditional[j]: share of walks' blocks whose draft j was right, of those whose drafts before j were.
    confidence, right: one row a drafted block and position (M, B) of the walks, confidence logits and whether tokens
    0..j were all right; -1 past an answer's end. owner (M,): which answer.
    """

    accepted_length: float
    by_task: dict[str, float]
    conditional: list[float]
    num_blocks: int
    confidence: Tensor = field(repr=False)
    right: Tensor = field(repr=False)
    owner: Tensor = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; without the rows."""
        return {
            "accepted_length": round(self.accepted_length, 4),
            "by_task": {task: round(length, 4) for task, length in self.by_task.items()},
            "conditional": [round(share, 4) for share in self.conditional],
            "num_blocks": self.num_blocks,
        }


@torch.no_grad()
def validate(
    head: Head,
    target: TargetStates,
    examples: Sequence[Example],
    *,
    rope: Rope,
    autocast: bool = False,
) -> Validation:
    """Every answer token is drafted from once, in batches; then each answer is walked: from the first token, by as
    many as were right and one more."""
    counts: dict[str, list[int]] = {}
    sure, right, owner = [], [], []
    for index, example in enumerate(examples):
        chain, confidence = _all_chains(head, target, example, rope=rope, autocast=autocast)
        emitted = counts.setdefault(example.task, [0, 0])
        for row, prefix in _walk(chain, example):
            # What was right to the answer's end leaves no place for a token of the target's own.
            emitted[0] += min(int((prefix == 1).sum()) + 1, int((prefix >= 0).sum()))
            emitted[1] += 1
            sure.append(confidence[row])
            right.append(prefix)
            owner.append(index)
    table = np.stack(right)
    totals = [sum(c[i] for c in counts.values()) for i in (0, 1)]
    return Validation(
        accepted_length=totals[0] / totals[1],
        by_task={task: a / b for task, (a, b) in sorted(counts.items())},
        conditional=_conditional(table),
        num_blocks=totals[1],
        confidence=torch.stack(sure),
        right=torch.from_numpy(table),
        owner=torch.tensor(owner),
    )


def _all_chains(
    head: Head, target: TargetStates, example: Example, *, rope: Rope, autocast: bool
) -> tuple[np.ndarray, Tensor]:
    """The chain from every anchor of the answer (N, B), and its confidence."""
    anchors = list(range(example.num_prompt, len(example.tokens) - 1))
    device = torch.device(target.runner.device)
    states = target([example.tokens])
    blocks = make_blocks([example], [anchors], head.config.block_size).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        chain, confidence = greedy_chains(head, blocks, states, rope)
    return chain.cpu().numpy(), confidence.float().cpu()


def _walk(chain: np.ndarray, example: Example) -> list[tuple[int, np.ndarray]]:
    """(row of the chain table, whether drafts 0..j were right (1, 0, or -1 past the end)) of each pass."""
    answer = np.array(example.tokens[example.num_prompt :])
    size, at, found = chain.shape[1], 0, []
    while at < len(answer) - 1:
        truth = answer[at + 1 : at + 1 + size]
        prefix = np.full(size, -1, np.int8)
        prefix[: len(truth)] = np.cumprod(chain[at][: len(truth)] == truth)
        found.append((at, prefix))
        at += int((prefix == 1).sum()) + 1
    return [(row, prefix) for row, prefix in found]


def _conditional(table: np.ndarray) -> list[float]:
    """Of (M, B) prefixes: acceptance at j given those before."""
    shares = []
    alive = np.ones(len(table), bool)
    for j in range(table.shape[1]):
        looked = alive & (table[:, j] >= 0)
        shares.append(float((table[looked, j] == 1).mean()) if looked.any() else 0.0)
        alive = looked & (table[:, j] == 1)
    return shares
