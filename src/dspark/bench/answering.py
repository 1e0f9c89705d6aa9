"""The engine as training needs it: prompts answered one by one as they end, by a target or by a draft as it learns.
It must never answer in another way than `LLM` does, nor hold weights after it is closed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any


class _EnoughError(Exception):
    """Whoever asked wants no more answers."""


class EngineAnswerer:
    """train.answer_log.Answerer over an engine that is loaded when first asked."""

    def __init__(self, model: str, *, max_model_len: int, batch: int, draft: str = "suffix", **engine: Any) -> None:
        """`engine`: further settings of LLM, those that are None left out."""
        self.model = model
        self.settings: dict[str, Any] = {name: value for name, value in engine.items() if value is not None}
        self.settings |= {"draft": draft, "max_num_seqs": batch, "max_model_len": max_model_len}
        self.settings["max_num_batched_tokens"] = max(512, 2 * batch)
        self.llm: Any = None

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float,
        seeds: Sequence[int],
        done: Callable[[int, list[int]], bool],
    ) -> None:
        """As train.answer_log.Answerer. Raises ValueError where the model cannot be loaded or refuses a prompt."""
        from dspark import LLM, SamplingParams

        if self.llm is None:
            self.llm = LLM(self.model, **self.settings)
        params = [
            SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed if temperature > 0 else None)
            for seed in seeds
        ]
        places: dict[tuple[int, ...], list[int]] = {}
        for index, prompt in enumerate(prompts):
            places.setdefault(tuple(prompt), []).append(index)
        told: set[str] = set()

        def on_output(output: Any) -> None:
            if output.finished and output.error is None and output.request_id not in told:
                told.add(output.request_id)
                index = places[tuple(output.prompt_token_ids)].pop()
                if not done(index, list(output.outputs[0].token_ids)):
                    raise _EnoughError

        try:
            outputs = self.llm.generate([list(prompt) for prompt in prompts], params, on_output=on_output)
        except _EnoughError:
            return
        if refused := [output.error for output in outputs if output.error]:
            raise ValueError(f"{len(refused)} prompts were refused by {self.model}: {refused[0]}")

    def close(self) -> None:
        """Give the memory back."""
        self.llm = None
        gc.collect()
