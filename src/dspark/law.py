"""Laws: from processed logits to the probabilities a token is drawn with, and log-probabilities to report.
It must never sort a whole row where a part decides, or let a row's bits depend on its neighbours.

Shapes: R rows, V vocabulary; C, `width` in the code, are a row's largest logits looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.types import TokenLogprob

NUM_CANDIDATES = (256, 4096)
"""How many of the largest logits are looked at before a row with top_k, top_p or min_p is sorted whole."""
MIN_TEMPERATURE = 1e-30
"""Below it float32 cannot divide; the law has long been that of the most likely tokens."""


def probabilities(
    processed: Tensor,
    *,
    temperature: Sequence[float] | Tensor,
    top_k: Sequence[int] | Tensor,
    top_p: Sequence[float] | Tensor,
    min_p: Sequence[float] | Tensor,
) -> Tensor:
    """The laws of rows with different parameters, (R, V) float32; a row's bits do not depend on its neighbours.

    `processed`: (R, V) float32, at least one finite logit a row. Temperature 0 gives a one-hot row at the first
    maximum. min_p keeps tokens with at least min_p of the largest probability; top_k keeps the k largest and all ties
    of the k-th; top_p keeps, of what is left and rescaled, the smallest set of the likeliest tokens that reaches
    top_p, lower ids first among equals; at least one token. 0, -1 or >= V switches top_k off.
    """
    device, vocab = processed.device, processed.shape[1]
    heat = torch.as_tensor(temperature, dtype=torch.float32, device=device)
    limits = _Limits(
        top_k=torch.as_tensor(top_k, dtype=torch.long, device=device),
        top_p=torch.as_tensor(top_p, dtype=torch.float64, device=device),
        min_p=torch.as_tensor(min_p, dtype=torch.float64, device=device),
    )
    limits.top_k = torch.where((limits.top_k <= 0) | (limits.top_k >= vocab), vocab, limits.top_k)
    greedy = heat == 0
    if bool(greedy.all()):
        return _one_hot(processed)
    # The maximum goes first: a small temperature then sends the others to -inf, not the largest to inf.
    largest = processed.amax(-1, keepdim=True)
    assert bool(largest.isfinite().all()), "a row of logits holds NaN or infinity, or its masks leave no token"
    scaled = processed - largest
    scaled /= heat.clamp_min(MIN_TEMPERATURE)[:, None]
    law = scaled.softmax(-1)
    cut = ~greedy & ((limits.top_k < vocab) | (limits.top_p < 1) | (limits.min_p > 0))
    open_rows = cut.nonzero().squeeze(1)
    for width in (*NUM_CANDIDATES, vocab):
        if open_rows.numel() and (width <= vocab // 2 or width == vocab):
            open_rows = _truncate(law, scaled, open_rows, limits, width=width)
    assert open_rows.numel() == 0
    if bool(greedy.any()):
        law[greedy] = _one_hot(processed[greedy])
    return law


@dataclass
class _Limits:
    """(R,) each: long, V for no limit; float64; float64."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def _one_hot(logits_RV: Tensor) -> Tensor:
    return torch.zeros_like(logits_RV).scatter_(1, logits_RV.argmax(-1, keepdim=True), 1.0)


def _truncate(law_RV: Tensor, scaled_RV: Tensor, rows: Tensor, limits: _Limits, *, width: int) -> Tensor:
    """Cut `rows` of `law_RV` in place, looking at their `width` largest logits; returns the rows that need more."""
    whole = rows.numel() == law_RV.shape[0]
    law, scaled = (law_RV, scaled_RV) if whole else (law_RV[rows], scaled_RV[rows])
    vocab = law.shape[1]
    values, ids = scaled.topk(width, dim=-1)
    weights = law.gather(1, ids).double()
    top_k, top_p, min_p = limits.top_k[rows], limits.top_p[rows], limits.min_p[rows]

    kth = values.gather(1, (top_k.clamp(max=width) - 1)[:, None])
    kept = (weights > 0) & (weights >= min_p[:, None] * weights[:, :1])
    kept &= (values >= kth) | (top_k >= width)[:, None]
    size = kept.sum(-1)
    ended = (size < width) | (width == vocab)
    # Where the set may go on beyond the candidates, its mass is known only if nothing but top_p cuts: it is then 1.
    bounded = ended | ((top_k == vocab) & (min_p == 0))
    cumulative = (weights * kept).cumsum(-1)
    mass = torch.where(ended, cumulative[:, -1], 1.0)
    reached = (cumulative < (top_p * mass)[:, None]).sum(-1) + 1
    crossed = (top_p < 1) & (reached < width)
    settled = bounded & (ended | crossed)
    size = torch.where(top_p < 1, torch.minimum(size, reached), size)

    inside = torch.arange(width, device=law.device) < size[:, None]
    # The running sum, not weights.sum(): torch splits a sum between threads when there is one row only.
    weights = torch.where(inside, weights, 0.0) / cumulative.gather(1, (size - 1)[:, None])
    _order_ties(ids, values, scaled, size)
    law_RV.index_fill_(0, rows[settled], 0.0)
    law_RV[rows[settled][:, None], ids[settled]] = weights[settled].float()
    return rows[~settled]


def _order_ties(ids: Tensor, values: Tensor, scaled: Tensor, size: Tensor) -> None:
    """Where the cut falls among equal logits, put those with the lowest ids before it (in place)."""
    width = ids.shape[1]
    last = values.gather(1, (size - 1)[:, None])
    following = values.gather(1, size.clamp(max=width - 1)[:, None])
    for row in ((last == following).squeeze(1) & (size < width)).nonzero().squeeze(1).tolist():
        num_above = int((values[row] > last[row]).sum())
        tied = (scaled[row] == last[row]).nonzero().squeeze(1)
        count = min(width - num_above, tied.numel())
        ids[row, num_above : num_above + count] = tied[:count]


def largest(logits_RV: Tensor, num_valid: int) -> list[int]:
    """Index of the largest of the first `num_valid` logits of each row; of equal ones the first."""
    valid = logits_RV[:, :num_valid]
    if valid.device.type == "cpu" and valid.dtype == torch.float32:
        return valid.numpy().argmax(axis=1).tolist()  # a fifth of the time of torch's
    return torch.argmax(valid, dim=-1).tolist()


def raw_logprobs(logits: Tensor, chosen: Sequence[int] | Tensor, num: int) -> list[list[TokenLogprob]]:
    """Log-softmax of raw logits (R, V): for each row the chosen token first, then those of the `num` likeliest that are
    not the chosen one, in falling order. Ranks start at 1; among equals the lower id is first."""
    rows, result = logits.float(), []
    picks: list[Any] = chosen.tolist() if isinstance(chosen, Tensor) else list(chosen)
    norms_R = torch.logsumexp(rows, -1)
    for row, norm, pick in zip(rows, norms_R, picks, strict=True):
        top = _top_ids(row, min(num, row.shape[0]))
        values = (row[top] - norm).tolist()
        places = {token: place for place, token in enumerate(top.tolist(), start=1)}
        rank = places.get(pick) or int((row > row[pick]).sum()) + int((row[:pick] == row[pick]).sum()) + 1
        entries = [TokenLogprob(token_id=int(pick), logprob=float(row[pick] - norm), rank=rank)]
        entries += [
            TokenLogprob(token_id=token, logprob=values[place - 1], rank=place)
            for token, place in places.items()
            if token != pick
        ]
        result.append(entries)
    return result


def _top_ids(row_V: Tensor, num: int) -> Tensor:
    """The `num` largest, in descending order, lower ids first among equals."""
    if num == 0:
        return torch.empty(0, dtype=torch.long, device=row_V.device)
    values, ids = row_V.topk(min(num + 1, row_V.shape[0]))
    if bool((values[1:] < values[:-1]).all()):
        return ids[:num]
    candidates = (row_V >= values[num - 1]).nonzero().squeeze(1)
    order = torch.sort(row_V[candidates], descending=True, stable=True).indices
    return candidates[order[:num]]
