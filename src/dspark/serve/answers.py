"""Answers: what the engine made, in the shapes of the OpenAI API.
It must never touch the engine; usage counts are those of the tokens that were delivered.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dspark import __version__
from dspark.serve.parts import Parts
from dspark.types import CompletionOutput, RequestOutput, SpeculationRecord, TokenLogprob

FINGERPRINT = f"dspark-{__version__}"


class Words(Protocol):
    """What is needed of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def stream(self, *, skip_special_tokens: bool = True) -> Any: ...


@dataclass(kw_only=True)
class Head:
    """What all pieces of one response begin with. `kind`: "chat.completion" or "text_completion"."""

    kind: str
    model: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, kind: str, model: str) -> Head:
        """With a fresh id."""
        prefix = "chatcmpl" if kind == "chat.completion" else "cmpl"
        return cls(kind=kind, model=model, id=f"{prefix}-{uuid.uuid4().hex}")

    def response(self, choices: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        """The whole answer."""
        return self._with(self.kind, choices, rest)

    def chunk(self, choices: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        """A piece of a stream."""
        return self._with(f"{self.kind}.chunk" if self.kind == "chat.completion" else self.kind, choices, rest)

    def _with(self, kind: str, choices: list[dict[str, Any]], rest: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
            **rest,
        }


@dataclass(kw_only=True)
class Choice:
    """One answer of a request and how far it was sent. `index` among all answers of the response; `base`: characters
    of an echoed prompt before it. `reports_logprobs` (with the `num_top` likeliest), `reports_sources`: what is told of
    each token."""

    index: int
    parts: Parts
    words: Words
    is_chat: bool
    reports_logprobs: bool = False
    num_top: int = 0
    reports_sources: bool = False
    base: int = 0
    num_chars: int = 0
    num_tokens: int = 0
    begun: bool = False
    ended: bool = False

    def piece(self, output: CompletionOutput, *, echoed: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """What came since the last piece, as a choice of a chunk; None where there is nothing to tell. `echoed`: text
        and logprobs of the prompt, which the first piece begins with."""
        if self.ended:
            return None
        start, self.num_tokens = self.num_tokens, len(output.token_ids)
        text, self.num_chars = output.text[self.num_chars :], len(output.text)
        self.parts.push(text)
        if output.finish_reason is not None:
            self.parts.finish()
            self.ended = True
        delta = self.parts.delta()
        tells = self.num_tokens > start and (self.reports_logprobs or self.reports_sources)
        if not (delta or tells or self.ended or (echoed and not self.begun)):
            return None
        choice: dict[str, Any] = {"index": self.index}
        logprobs = self.logprobs(output, start) if self.reports_logprobs else None
        if self.is_chat:
            choice["delta"] = delta if self.begun else {"role": "assistant", "content": ""} | delta
        else:
            choice["text"] = delta.get("content", "")
            if echoed and not self.begun:
                choice["text"] = echoed["text"] + choice["text"]
                logprobs = _joined(echoed["logprobs"], logprobs)
        choice["logprobs"] = logprobs
        choice["finish_reason"] = self.finish_reason(output)
        if self.ended and output.stop_reason is not None:
            choice["stop_reason"] = output.stop_reason
        if self.reports_sources:
            choice["token_sources"] = self.sources(output, start)
        self.begun = True
        return choice

    def whole(self, output: CompletionOutput, *, echoed: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A finished answer, as a choice of a response."""
        self.parts.push(output.text)
        self.parts.finish()
        choice: dict[str, Any] = {"index": self.index}
        logprobs = self.logprobs(output, 0) if self.reports_logprobs else None
        if self.is_chat:
            choice["message"] = self.parts.message()
        else:
            choice["text"] = self.parts.content
            if echoed:
                choice["text"] = echoed["text"] + choice["text"]
                logprobs = _joined(echoed["logprobs"], logprobs)
        choice["logprobs"] = logprobs
        choice["finish_reason"] = self.finish_reason(output)
        choice["stop_reason"] = output.stop_reason
        if self.reports_sources:
            choice["token_sources"] = self.sources(output, 0)
        return choice

    def finish_reason(self, output: CompletionOutput) -> str | None:
        """OpenAI's word for it."""
        if output.finish_reason == "stop" and self.is_chat and self.parts.calls:
            return "tool_calls"
        return output.finish_reason

    def logprobs(self, output: CompletionOutput, start: int) -> dict[str, Any]:
        """Of the tokens from `start` on."""
        entries = (output.logprobs or [])[start : len(output.token_ids)]
        if self.is_chat:
            return {"content": [_chat_entry(self.words, entry, self.num_top) for entry in entries]}
        ends = [0, *output.text_ends]
        offsets = [self.base + ends[start + place] for place in range(len(entries))]
        return completion_logprobs(self.words, entries, offsets)

    def sources(self, output: CompletionOutput, start: int) -> list[dict[str, Any]]:
        """Where the tokens from `start` on came from, with the text that each made known."""
        ends = [0, *output.text_ends]
        return [
            {"text": output.text[ends[place] : ends[place + 1]], "source": origin.source, "drafter": origin.drafter}
            for place, origin in enumerate(output.origins[: len(output.token_ids)])
            if place >= start
        ]


def completion_logprobs(
    words: Words, entries: Sequence[Sequence[TokenLogprob] | None], offsets: Sequence[int]
) -> dict[str, Any]:
    """OpenAI's legacy form. An entry begins with the token itself; None: nothing foretold it."""
    tokens, values, top = [], [], []
    for entry in entries:
        tokens.append("" if not entry else _text(words, entry[0].token_id))
        values.append(None if not entry else entry[0].logprob)
        top.append(None if not entry else {_text(words, item.token_id): item.logprob for item in reversed(entry)})
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": list(offsets)}


def echo_of(words: Words, output: RequestOutput, *, logprobs: bool) -> dict[str, Any]:
    """An echoed prompt: its text and, where asked, its logprobs."""
    ids = output.prompt_token_ids
    text = output.prompt if output.prompt is not None else words.decode(ids, skip_special_tokens=False)
    if not logprobs:
        return {"text": text, "logprobs": None}
    offsets, place, stream = [], 0, words.stream(skip_special_tokens=False)
    for token in ids:
        offsets.append(min(place, len(text)))
        place += len(stream.push(token))
    known = completion_logprobs(words, output.prompt_logprobs or [], offsets)
    known["tokens"] = [_text(words, token) for token in ids]
    return {"text": text, "logprobs": known}


def usage_of(outputs: Sequence[RequestOutput], *, only_prompt: bool = False) -> dict[str, Any]:
    """Tokens of prompts and answers of one response; `only_prompt`: no token of the answers was delivered."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = 0 if only_prompt else sum(len(c.token_ids) for output in outputs for c in output.outputs)
    cached = sum(output.num_cached_prompt_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def speculation_of(outputs: Sequence[RequestOutput], *, detailed: bool) -> dict[str, Any]:
    """What speculation did for a response, under vLLM's names. mean_acceptance_length = 1 + accepted / steps with
    drafts; draft_acceptance_rate = accepted / draft tokens; acceptance_histogram[j] = steps with drafts of which j were
    accepted. num_verified_tokens: those that the target looked at, which this planner may make fewer than were drafted.
    """
    record = SpeculationRecord()
    for output in outputs:
        for completion in output.outputs:
            record.merge(completion.speculation)
    steps = record.verified_at[0] if record.verified_at else 0
    survivors = [steps, *record.accepted_at, 0]
    found: dict[str, Any] = {
        "mean_acceptance_length": 1 + record.num_accepted / steps if steps else 1.0,
        "draft_acceptance_rate": record.num_accepted / record.num_drafted if record.num_drafted else 0.0,
        "acceptance_histogram": [a - b for a, b in zip(survivors, survivors[1:])],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": record.num_accepted,
        "num_draft_tokens": record.num_drafted,
        "num_spec_tokens": len(record.verified_at),
        "num_verified_tokens": record.num_verified,
    }
    if detailed:
        found["num_steps"] = record.num_steps
        found["verified_per_position"] = list(record.verified_at)
        found["accepted_per_position"] = list(record.accepted_at)
    return {"speculative_decoding": found}


def _chat_entry(words: Words, entry: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
    top = sorted((item for item in entry if item.rank <= num_top), key=lambda item: item.rank)
    return _described(words, entry[0]) | {"top_logprobs": [_described(words, item) for item in top]}


def _described(words: Words, item: TokenLogprob) -> dict[str, Any]:
    raw = words.token_bytes(item.token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": item.logprob, "bytes": list(raw)}


def _text(words: Words, token_id: int) -> str:
    return words.token_bytes(token_id).decode("utf-8", "replace")


def _joined(first: Mapping[str, Any] | None, then: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if first is None or then is None:
        return None if first is None and then is None else dict(first or then or {})
    return {name: [*first[name], *then[name]] for name in first}
