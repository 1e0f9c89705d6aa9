"""Verdicts: keep a prefix of a draft so that the emitted text has exactly the target's law.
It must never see a plan or a drafter, keep a state, or look at a random number twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dspark.types import Draft, Verdict


class Chance(Protocol):
    """Where decisions come from: `dspark.noise.Noise` when serving; in the law tests an object that follows every
    branch with its exact probability, so that the function proved is the function served."""

    @property
    def coupled(self) -> bool: ...

    def flip(self, numerator: float, denominator: float, *, position: int) -> bool:
        """True with probability min(1, numerator / denominator)."""
        ...

    def draw(self, weights_V: Tensor, position: int) -> int:
        """A token with probability proportional to its weight."""
        ...


def accept_greedy(argmax: Sequence[int], draft: Draft) -> Verdict:
    """Temperature 0: drafts are kept while they equal the target's argmax.

    `argmax`: K+1 ids, row i from the logits after i drafts (processed logits when the request has processors).
    """
    tokens = draft.tokens
    assert len(argmax) == len(tokens) + 1, (len(argmax), len(tokens))
    num_accepted = 0
    while num_accepted < len(tokens) and tokens[num_accepted] == argmax[num_accepted]:
        num_accepted += 1
    kept = [*tokens[:num_accepted], int(argmax[num_accepted])]
    return Verdict(num_verified=len(tokens), num_accepted=num_accepted, tokens=kept)


def accept(p: Tensor, draft: Draft, noise: Chance, *, position: int) -> Verdict:
    """The verdict on one draft; a pure function of its arguments.

    `p`: (K+1, V) float, row i the target's law after i drafts, every processor applied; rows need sum to 1 only up to
    rounding. `draft.q`: (K, V') float, the laws the tokens were drawn from; V' may differ from V by padding.
    `position`: index in the sequence of the first drafted token. Greedy rows are laws with one token.

    With `draft.q` and uncoupled noise this is speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al.
    2023, algorithm 2). Otherwise (deterministic drafts, seeded requests) the target's token is drawn first and the
    draft is kept when it is equal: the emitted token then does not depend on the draft at all.
    """
    assert p.shape[0] == len(draft.tokens) + 1, (tuple(p.shape), len(draft.tokens))
    if draft.q is None or noise.coupled or not draft.tokens:
        return _accept_equal(p, draft.tokens, noise, position=position)
    return _accept_sampled(p, draft, noise, position=position)


def _accept_equal(p: Tensor, tokens: Sequence[int], noise: Chance, *, position: int) -> Verdict:
    """Draw from the target at each position; go on while the draw is what was drafted."""
    emitted: list[int] = []
    for i in range(len(tokens) + 1):
        emitted.append(noise.draw(p[i], position + i))
        if i == len(tokens) or emitted[i] != tokens[i]:
            break
    return Verdict(num_verified=len(tokens), num_accepted=len(emitted) - 1, tokens=emitted)


def _accept_sampled(p: Tensor, draft: Draft, noise: Chance, *, position: int) -> Verdict:
    """Keep token x with probability min(1, p(x) / q(x)); at the first refusal draw from the residual."""
    tokens = draft.tokens
    num_drafts = len(tokens)
    q = draft.q
    assert q.shape[0] == num_drafts, (tuple(q.shape), num_drafts)
    # Float32 laws sum to 1 only up to rounding; ratios of the normalised laws keep that from becoming a bias.
    p_mass = p[:num_drafts].sum(-1, dtype=torch.float64).tolist()
    q_mass = q.sum(-1, dtype=torch.float64).tolist()
    rows, ids = torch.arange(num_drafts, device=p.device), torch.tensor(tokens, device=p.device)
    p_token = p[rows, ids].double().tolist()
    q_token = q[rows.to(q.device), ids.to(q.device)].double().tolist()
    for i in range(num_drafts):
        assert q_token[i] > 0, f"draft {i} ({draft.source}): token {tokens[i]} has no mass in the law given for it"
        if not noise.flip(p_token[i] * q_mass[i], q_token[i] * p_mass[i], position=position + i):
            weights = residual(p[i], q[i], p_mass=p_mass[i], q_mass=q_mass[i])
            kept = [*tokens[:i], noise.draw(weights, position + i)]
            return Verdict(num_verified=num_drafts, num_accepted=i, tokens=kept)
    last = noise.draw(p[num_drafts], position + num_drafts)
    return Verdict(num_verified=num_drafts, num_accepted=num_drafts, tokens=[*tokens, last])


def residual(p_V: Tensor, q_V: Tensor, *, p_mass: float, q_mass: float) -> Tensor:
    """max(p - q, 0) of the normalised laws, (V,) float64, itself not normalised.

    A refusal needs q(x) > p(x) somewhere, so the residual has mass; when rounding leaves none the laws agree to the
    last bit and p is the answer.
    """
    weights = p_V.double() / p_mass
    width = min(q_V.shape[0], weights.shape[0])
    weights[:width] -= q_V[:width].to(weights.device).double() / q_mass
    weights.clamp_(min=0)
    return weights if bool(weights.any()) else p_V.double()
