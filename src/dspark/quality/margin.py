"""Margins under a request's own processors: how far two tokens are apart where penalties, grammars or seeds decide.
It must never judge by a token's rank what it can judge by its log-probability.

The near-tie oracle (quality/oracle) asks for margin(prefix, a, b), the larger distance of the two from the best token
that was possible there. With processors that is a distance of processed logits: the raw log-probabilities of the
likeliest tokens and of a and b, from fresh plain passes, go through the request's processors as row 0 of a block does,
without a draft. Seeded requests decide by argmax of log p / T + Gumbel noise, so there the distance is one of these
scores, times T: in logits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dspark.noise import Noise
from dspark.params import MAX_LOGPROBS, SamplingParams
from dspark.sampling import Processors, RowSampler

NEG_INF = float("-inf")


class ProcessedMargin:
    """`margin` for one request, `num_prompt` tokens of prompt."""

    def __init__(self, llm: Any, params: SamplingParams, *, num_prompt: int) -> None:
        assert params.repetition_penalty == 1, "it scales logits, and log-probabilities are known only up to a shift"
        self.llm = llm
        self.params = params
        self.num_prompt = num_prompt
        facts = llm.target.facts
        self.processors = Processors.build(
            params,
            vocab_size=facts.vocab_size,
            num_valid_tokens=facts.num_valid_tokens,
            eos_token_ids=facts.eos_token_ids,
        )

    def __call__(self, prefix: Sequence[int], a: int, b: int) -> float:
        logits = torch.full((1, self.processors.vocab_size), NEG_INF)
        for token, logprob in self._raw(list(prefix), (a, b)).items():
            logits[0, token] = logprob
        sampler = RowSampler(self.params, self.processors, tokens=prefix, num_prompt=self.num_prompt)
        scores = sampler.process(logits, prefix, allowed=self._allowed(prefix))[0].double()
        scale = 1.0
        if not self.params.greedy:
            scale = self.params.temperature
            noise = Noise.for_answer(self.params.seed)
            scores = scores / scale + noise.gumbel(len(prefix), torch.arange(len(scores)))
        worse = min(float(scores[a]), float(scores[b]))
        return float("inf") if worse == NEG_INF else scale * (float(scores.max()) - worse)

    def _raw(self, prefix: list[int], tokens: Sequence[int]) -> dict[int, float]:
        """Log-probabilities of the likeliest tokens and of these."""
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=MAX_LOGPROBS, speculation=False)
        (output,) = self.llm.generate([prefix], params)
        if output.error is not None:
            raise ValueError(f"the oracle could not look at a prefix of {len(prefix)} tokens: {output.error}")
        found = {entry.token_id: entry.logprob for entry in output.outputs[0].logprobs[0]}
        for token in tokens:
            if token not in found:
                params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, speculation=False)
                (output,) = self.llm.generate([[*prefix, token]], params)
                if output.error is None:
                    found[token] = output.prompt_logprobs[-1][0].logprob
        return found

    def _allowed(self, prefix: Sequence[int]) -> torch.Tensor | None:
        """What the request's grammar admits behind the answer so far, (1, V)."""
        if self.params.structure is None:
            return None
        matcher = self.llm.requests.grammars.matcher(self.params.structure)
        for token in prefix[self.num_prompt :]:
            matcher.advance(token)
        return matcher.allowed([], rows=1)
