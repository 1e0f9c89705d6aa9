"""Reference: the sampler's meaning written a second time, slowly, in plain Python floats.
It must never import the sampler, or share a formula with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dspark.params import SamplingParams


def processed(
    logits: Sequence[float],
    params: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    num_valid: int,
) -> list[float]:
    """The logits of one position before temperature."""
    result = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * list(output).count(token)
        logit -= params.presence_penalty * (token in output)
        logit += params.logit_bias.get(token, 0.0)
        if token >= num_valid:
            logit = -math.inf
        if len(output) < params.min_tokens and token in end_ids:
            logit = -math.inf
        for word in bad_words:
            if [*output, token][-len(word) :] == list(word):
                logit = -math.inf
        result.append(logit)
    return result


def law(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The probabilities of processed logits."""
    if params.temperature == 0:
        best = max(range(len(logits)), key=lambda token: (logits[token], -token))
        return [float(token == best) for token in range(len(logits))]
    top = max(logits)
    weights = [math.exp((logit - top) / params.temperature) for logit in logits]
    least = params.min_p * max(weights)
    weights = [weight if weight >= least else 0.0 for weight in weights]
    if 0 < params.top_k < len(weights):
        least = sorted(weights, reverse=True)[params.top_k - 1]
        weights = [weight if weight >= least else 0.0 for weight in weights]
    if params.top_p < 1:
        goal, mass, kept = params.top_p * math.fsum(weights), 0.0, set()
        for token in sorted(range(len(weights)), key=lambda token: (-weights[token], token)):
            kept.add(token)
            mass += weights[token]
            if mass >= goal:
                break
        weights = [weight if token in kept else 0.0 for token, weight in enumerate(weights)]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
