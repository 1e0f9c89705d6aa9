"""Sides: who answers the questions, and what came back. One side decodes plainly, the other speculates.
It must never show a side the other's answer, nor ask it in another way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dspark.quality.questions import Question
from dspark.types import SpeculationRecord


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer. `tokens`: ids, or over HTTP the texts of the tokens; None where the side does not tell them.

    `logprobs`: of each token the likeliest ones there, itself included, by id or text (None: not told).
    `prompt`: ids of the prompt, where they are known. `error`: refused. `record`: what speculation did, where told.
    """

    text: str
    tokens: Sequence[Any] | None = None
    finish_reason: str | None = None
    logprobs: Sequence[Mapping[Any, float]] | None = None
    prompt: Sequence[int] | None = None
    error: str | None = None
    record: SpeculationRecord = field(default_factory=SpeculationRecord)

    @property
    def num_tokens(self) -> int | None:
        """Where it is told."""
        return None if self.tokens is None else len(self.tokens)


class Side(Protocol):
    """Answers many questions at once, in their order."""

    name: str

    def answer(self, questions: Sequence[Question]) -> list[Reply]: ...


class LocalSide:
    """An LLM; both sides over the same weights (LLM.variant)."""

    def __init__(self, llm: Any, *, name: str, encode: Callable[[Question], Sequence[int]]) -> None:
        self.llm = llm
        self.name = name
        self.encode = encode

    def answer(self, questions: Sequence[Question]) -> list[Reply]:
        prompts = [list(self.encode(question)) for question in questions]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # refusals are in the replies
            outputs = self.llm.generate(prompts, [question.params for question in questions])
        return [_reply(output, prompt) for output, prompt in zip(outputs, prompts, strict=True)]


def _reply(output: Any, prompt: Sequence[int]) -> Reply:
    if output.error is not None:
        return Reply(text="", error=output.error, prompt=prompt)
    done = output.outputs[0]
    logprobs = done.logprobs and [{entry.token_id: entry.logprob for entry in row} for row in done.logprobs]
    return Reply(
        text=done.text,
        tokens=list(done.token_ids),
        finish_reason=done.finish_reason,
        logprobs=logprobs,
        prompt=prompt,
        error=done.stop_reason if done.finish_reason == "error" else None,
        record=done.speculation,
    )


def chat_encoder(tokenizer: Any, *, max_tokens: int) -> Callable[[Question], Sequence[int]]:
    """Token ids of a question by the model's chat template, or of its bare text for a model without one; the last
    `max_tokens` of them, so that the call for an answer stays."""

    def encode(question: Question) -> Sequence[int]:
        messages = [dict(message) for message in question.messages]
        if tokenizer.has_chat_template:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        else:
            ids = tokenizer.encode("\n".join(message["content"] for message in messages))
        return list(ids)[-max_tokens:]

    return encode
