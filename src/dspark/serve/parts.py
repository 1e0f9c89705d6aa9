"""Parts: reasoning, content and tool calls of a growing answer, and what of them has been sent.
It must never send a character twice, or lose one.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from dspark.serve.tools import ToolCall, ToolCallStream


def call_id() -> str:
    """For a tool call; chats refer to it."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(kw_only=True)
class _Sent:
    """How far one call has been sent."""

    id: str
    num_arguments: int = 0


@dataclass(kw_only=True)
class Parts:
    """Push the answer's text in any portions. `style`: of tool calls, None where there are none to be looked for;
    `reasoning_end`: the marker up to which the text is reasoning."""

    style: str | None = None
    reasoning_end: str | None = None
    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = ToolCallStream(self.style) if self.style is not None else None
        self.reasons = self.reasoning_end is not None
        self.held = ""
        self.num_content = self.num_reasoning = 0
        self.sent: list[_Sent] = []

    def push(self, piece: str) -> None:
        """More text."""
        if self.reasons:
            piece = self._reason(piece)
        self._tell(piece)

    def finish(self) -> None:
        """The answer has ended: what was held back is what it seems to be."""
        self.reasoning += self.held
        self.held = ""
        if self.stream is not None:
            self.stream.finish()
            self.content, self.calls = self.stream.content, self.stream.calls

    def delta(self) -> dict[str, Any]:
        """What has come since the last call, as OpenAI's delta; empty where nothing has."""
        found: dict[str, Any] = {}
        if reasoning := self.reasoning[self.num_reasoning :]:
            found["reasoning_content"] = reasoning
        if content := self.content[self.num_content :]:
            found["content"] = content
        self.num_reasoning, self.num_content = len(self.reasoning), len(self.content)
        calls = [call for index in range(len(self.calls)) if (call := self._call_delta(index))]
        if calls:
            found["tool_calls"] = calls
        return found

    def message(self) -> dict[str, Any]:
        """The whole, as OpenAI's message."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning_end is not None:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [
                {"id": call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return found

    def _tell(self, piece: str) -> None:
        if self.stream is None:
            self.content += piece
            return
        self.stream.push(piece)
        self.content, self.calls = self.stream.content, self.stream.calls

    def _reason(self, piece: str) -> str:
        """The text behind the marker."""
        assert self.reasoning_end is not None
        self.held += piece
        before, marker, behind = self.held.partition(self.reasoning_end)
        if marker:
            self.reasoning += before
            self.held, self.reasons = "", False
            return behind
        keep = next(
            size
            for size in range(min(len(self.reasoning_end) - 1, len(self.held)), -1, -1)
            if self.held.endswith(self.reasoning_end[:size])
        )
        self.reasoning += self.held[: len(self.held) - keep]
        self.held = self.held[len(self.held) - keep :]
        return ""

    def _call_delta(self, index: int) -> dict[str, Any] | None:
        call = self.calls[index]
        if index == len(self.sent):
            self.sent.append(_Sent(id=call_id(), num_arguments=len(call.arguments)))
            function = {"name": call.name, "arguments": call.arguments}
            return {"index": index, "id": self.sent[index].id, "type": "function", "function": function}
        sent = self.sent[index]
        piece = call.arguments[sent.num_arguments :]
        sent.num_arguments += len(piece)
        return {"index": index, "function": {"arguments": piece}} if piece else None
