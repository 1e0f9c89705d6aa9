"""Joint laws: with what probability the target itself says the next few tokens, as a tree of cells.
It must never take a probability from the code that samples: it starts from the raw logits of plain passes.

A cell is a tuple of token ids, the first tokens of an answer; OTHER stands for every token that has no branch of its
own. The tree grows at its likeliest leaf, so that cells are of like size and few passes are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dspark.params import SamplingParams

OTHER = -1
WIDTH = 4
Cell = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Joint:
    """`law`: cell -> probability. `allowance`: sum((p' - p)^2 / p), p' the same law from passes in other company.

    `branches`: of each inner node the tokens that it tells apart.
    """

    law: Mapping[Cell, float]
    branches: Mapping[Cell, tuple[int, ...]]
    allowance: float

    def cell(self, tokens: Sequence[int]) -> Cell:
        """Where an answer belongs."""
        node: Cell = ()
        while node in self.branches:
            token = tokens[len(node)] if len(node) < len(tokens) else OTHER
            node = (*node, token if token in self.branches[node] else OTHER)
        return node


class LogitTap:
    """Raw logits of plain passes. `llm`: a plain variant made for this."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.num_valid = llm.target.facts.num_valid_tokens
        self._verify = llm.engine._verify
        self._rows: dict[tuple[int, ...], Tensor] = {}
        llm.engine._verify = self._listen

    def rows(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """(V,) float64 log-probabilities behind each prompt, all of them in one another's company; V are the tokens
        that the tokenizer knows."""
        self._rows.clear()
        outputs = self.llm.generate([list(prompt) for prompt in prompts], SamplingParams(temperature=0.0, max_tokens=1))
        for output in outputs:
            if output.error is not None:
                raise ValueError(f"a prefix of {len(output.prompt_token_ids)} tokens was refused: {output.error}")
        return [self._rows[tuple(prompt)].double()[: self.num_valid].log_softmax(-1) for prompt in prompts]

    def _listen(self, works: Any, kept: Any, logits: Tensor) -> Any:
        for work, (_, stop) in zip(works, self.llm.engine._logit_ranges(works, kept), strict=True):
            if work.samples:
                self._rows[tuple(work.seq.tokens)] = logits[stop - 1].detach().float().cpu()
        return self._verify(works, kept, logits)


def next_law(logprobs: Tensor, params: SamplingParams, output: Sequence[int]) -> Tensor:
    """(V,) probabilities of the next token, from raw log-probabilities (V,) and the answer so far.

    Written out again, from what the fields mean: presence and frequency penalties, temperature, top_k. A set that is
    cut by rounding's order at its edge keeps its mass, so these are tested in low precision too; top_p and min_p, whose
    edge has mass of its own, are left to the tests in float32 (tests/laws/test_chi_square.py).
    """
    assert params.top_p == 1 and params.min_p == 0 and params.repetition_penalty == 1 and not params.logit_bias
    scores = logprobs.clone()
    for token in set(output):
        scores[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if params.top_k > 0:
        least = scores.topk(min(params.top_k, len(scores))).values[-1]
        scores[scores < least] = float("-inf")
    return (scores / params.temperature).softmax(-1)


def joint_law(
    tap: LogitTap,
    prefix: Sequence[int],
    params: SamplingParams,
    *,
    depth: int,
    max_nodes: int,
    ends: Sequence[int] = (),
) -> Joint:
    """The law of the first `depth` tokens behind `prefix`, by at most `max_nodes` plain passes.

    `ends`: tokens behind which nothing comes.
    """
    law: dict[Cell, float] = {(): 1.0}
    branches: dict[Cell, tuple[int, ...]] = {}
    while len(branches) < max_nodes:
        open_cells = [c for c in law if len(c) < depth and OTHER not in c and not set(c) & set(ends)]
        if not open_cells:
            break
        node = max(open_cells, key=lambda c: (law[c], c))
        (row,) = tap.rows([[*prefix, *node]])
        following = next_law(row, params, node)
        branches[node] = tuple(following.topk(min(WIDTH, len(following))).indices.tolist())
        _split(law, node, following, branches[node])
    again: dict[Cell, float] = {(): 1.0}
    rows = tap.rows([[*prefix, *node] for node in branches])
    for node, row in zip(branches, rows, strict=True):
        _split(again, node, next_law(row, params, node), branches[node])
    allowance = sum((again[cell] - p) ** 2 / p for cell, p in law.items() if p > 0)
    return Joint(law=law, branches=branches, allowance=allowance)


def _split(law: dict[Cell, float], node: Cell, following: Tensor, tokens: Sequence[int]) -> None:
    """Put a node's branches in its place."""
    mass = law.pop(node)
    chances = following[list(tokens)].tolist()
    for token, chance in zip(tokens, chances, strict=True):
        law[(*node, token)] = mass * chance
    law[(*node, OTHER)] = mass * max(0.0, 1 - sum(chances))
