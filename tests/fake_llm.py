"""A scripted LLM with the interface of dspark.LLM, for tests of the doors around it.
It must never need torch: texts, tokens and times are what the script says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from dspark.config import EngineConfig, SpeculationConfig, engine_config
from dspark.params import SamplingParams
from dspark.types import CompletionOutput, RequestOutput, SpeculationRecord


class FakeTokenizer:
    """A token is a character."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class FakeLLM:
    """Answers every prompt with `answer`; with a drafter, `drafted_answer`, three tokens a pass and twice the speed.

    `made` collects every instance (variants too), `asked` what each was asked.
    """

    answer = "Hello, world!\n"
    drafted_answer = answer
    made: list[FakeLLM] = []

    def __init__(
        self, model: str, *, speculative_config: SpeculationConfig, progress: Any = None, **engine: Any
    ) -> None:
        if model.startswith("/absent"):
            raise ValueError(f"{model}: no such folder; give a packaged name, a folder or a .gguf file")
        if speculative_config.model == "misfit":
            raise ValueError("the draft model misfit has 7 tokens, the target 9: choose one with the same vocabulary")
        if progress is not None:
            progress("convert", 1, 2)
        self._set_up(model, engine_config(engine), speculative_config)

    def _set_up(self, model: str, engine: EngineConfig, speculation: SpeculationConfig) -> None:
        self.model, self.engine_config, self.speculation = model, engine, speculation
        self.asked: list[Any] = []
        self.tokenizer = FakeTokenizer()
        self.stats = SimpleNamespace(seconds={"draft": 0.25, "run": 0.5})
        FakeLLM.made.append(self)

    def variant(self, *, speculation: SpeculationConfig, **engine: Any) -> FakeLLM:
        other = object.__new__(type(self))
        other._set_up(self.model, dataclasses.replace(self.engine_config, **engine), speculation)
        return other

    def info(self) -> dict[str, Any]:
        return {"model": self.model, "path": "fake", "draft": self.speculation.method}

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | None = None,
        *,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        assert params is not None
        self.asked.append((prompts, params))
        if "refuse" in str(prompts):
            raise ValueError("the prompt has 9 tokens and the context holds 8: shorten the prompt")
        is_drafted = self.speculation.method != "none"
        text = (self.drafted_answer if is_drafted else self.answer)[: params.max_tokens]
        if on_output is not None:
            for end in range(1, len(text) + 1, 3):
                on_output(self._output(text[:end], params, is_drafted))
        return [self._output(text, params, is_drafted)]

    chat = generate

    def _output(self, text: str, params: SamplingParams, is_drafted: bool) -> RequestOutput:
        record = SpeculationRecord()
        for _ in range(2):
            record.add(
                drafted=4 * is_drafted, verified=3 * is_drafted, accepted=2 * is_drafted, emitted=1 + 2 * is_drafted
            )
        completions = [
            CompletionOutput(
                index=index,
                text=text,
                token_ids=[ord(c) for c in text],
                finish_reason="stop",
                stop_reason=None,
                logprobs=None,
                speculation=record,
            )
            for index in range(params.n)
        ]
        seconds = (len(text) - 1) * (0.05 if is_drafted else 0.1)
        return RequestOutput(
            request_id="request-0",
            prompt=None,
            prompt_token_ids=[1, 2, 3],
            outputs=completions,
            timings={"arrival": 10.0, "first_token": 10.5, "finished": 10.5 + seconds},
        )
