"""The losses of a DSpark head (equations 9 to 12) and of a distilled draft model, as pure functions that return sums.
They must never average inside: what weighs how much is decided in one place, the trainer.

Shapes: N blocks, B positions, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Weighted sums over positions, and the sum of the weights. `l1`: of |q - p|, twice the total variation (equation
    10). `accept` (N, B): acceptance probability of each
    position given that those before it were accepted, 1 - TV (Leviathan et al. 2023, theorem 3.5), no gradient."""

    ce: Tensor
    l1: Tensor
    confidence: Tensor
    weight: Tensor
    accept: Tensor


def position_weights(valid: Tensor, gamma: float) -> Tensor:
    """valid (N, B) bool -> weights exp(-j / gamma) where valid (equation 9), float32."""
    positions = torch.arange(valid.shape[1], device=valid.device, dtype=torch.float32)
    return valid * torch.exp(-positions / gamma)


def total_variation(logits: Tensor, target: Tensor) -> Tensor:
    """logits (..., W) of the draft, target (..., W): the target's probabilities of those tokens (they may sum to less
    than 1: the rest lies on tokens that the draft does not have) -> total variation (...) between the full laws."""
    draft = torch.softmax(logits, dim=-1)
    return 1 - torch.minimum(draft, target).sum(dim=-1)


def kl_divergence(logits: Tensor, target: Tensor) -> Tensor:
    """logits (..., W) of the draft, target (..., W) as in `total_variation` -> the sum over these tokens of
    p log(p / q) (...). Where they hold all of p it is the Kullback-Leibler divergence from p to q; what lies on other
    tokens no draft can reach, and has no part in it."""
    log_draft = torch.log_softmax(logits, dim=-1)
    return (torch.xlogy(target, target) - target * log_draft).sum(dim=-1)


def draft_losses(logits: Tensor, labels: Tensor, *, target: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    """Sum over rows of the loss `kind` of a draft model's logits (R, W), and of the acceptance, without gradient.

    "ce": cross-entropy against labels (R,), columns, -1 where the answer's token has none (such rows count for
    nothing). "tv", "kl": `total_variation` and `kl_divergence` against the target's law (R, W). Acceptance: with a law
    1 - TV (Leviathan et al. 2023, theorem 3.5), else whether the label is the likeliest.
    """
    logits = logits.float()
    if kind == "ce":
        known = labels >= 0
        ce = F.cross_entropy(logits[known], labels[known], reduction="sum")
        return ce, (logits.detach()[known].argmax(dim=-1) == labels[known]).sum()
    assert target is not None, "tv and kl compare with the target's law"
    if kind == "tv":
        distance = total_variation(logits, target)
        return distance.sum(), (1 - distance.detach()).sum()
    return kl_divergence(logits, target).sum(), (1 - total_variation(logits.detach(), target)).sum()


def block_losses(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    target: Tensor | None = None,
    confidence: Tensor | None = None,
    need_tv: bool = True,
) -> Sums:
    """Sums of the three losses over blocks.

    logits (N, B, W), computed with in float32; labels (N, B): draft ids of the answer's tokens, -1 where the draft has
    none; weights (N, B). target (N, B, W): the target's law over the draft's tokens; None is temperature 0, the law
    that has only the label. Cross-entropy is against the label (a position without one has none). confidence (N, B):
    logits, trained by binary cross-entropy against the acceptance (equations 8 and 11). `need_tv` False leaves the
    second sum 0.
    """
    known = labels >= 0
    logits = logits.float()  # here, where a compiler can fuse it with what follows
    log_normaliser = torch.logsumexp(logits, dim=-1)
    chosen = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    at_label = chosen - log_normaliser
    ce = -at_label * known
    if target is None:
        # At temperature 0 both laws are one-hot when served: the draft is its likeliest token.
        # One of equals counts as its share of them; a maximum is much quicker to find than its place.
        best = logits.detach().amax(dim=-1)
        num_best = (logits.detach() >= best.unsqueeze(-1)).sum(dim=-1)
        accept = ((chosen.detach() >= best) & known) / num_best
        tv = (1 - at_label.exp() * known) if need_tv else torch.zeros_like(ce)
    else:
        tv = total_variation(logits, target) if need_tv or confidence is not None else torch.zeros_like(ce)
        accept = (1 - tv).detach().clamp(0, 1) if need_tv or confidence is not None else torch.zeros_like(ce)
    sure = torch.zeros_like(ce)
    if confidence is not None:
        sure = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
    return Sums(
        ce=(ce * weights).sum(),
        l1=2 * (tv * weights).sum(),
        confidence=(sure * weights).sum(),
        weight=weights.sum(),
        accept=accept,
    )
