"""Tool calls: OpenAI's `tools` and `tool_choice` as a structure of the answer, and the calls in an answer's text.
It must never take what only looks like a call for one, or lose a character of what is none.

A model writes calls as its chat template taught it. A style is that form: Qwen's and Hermes's tags, Llama 3's objects,
Mistral's list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dspark.params import StructuredOutputs

SPELLING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""Of arguments, as chat templates write them. Free spaces invite a model to go on with them for ever."""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
CHOICES = ("auto", "none", "required")
COMBINES = {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"}
OPENS = {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class ToolStyle:
    """How a model writes a call: `begin` + name + `middle` + arguments as JSON + `end`, the list between `first` and
    `last`, calls parted by `between`. `triggers`: how a call may begin; the first starts one under "auto". `head` and
    `tail`: the same as it may be written freely, with the name as its group."""

    begin: str
    middle: str
    end: str
    between: str
    triggers: Sequence[str]
    head: re.Pattern[str]
    tail: re.Pattern[str]
    first: str = ""
    last: str = ""


def _head(before: str, key: str) -> re.Pattern[str]:
    return re.compile(rf'{before}\s*\{{\s*"name"\s*:\s*"({NAME.pattern})"\s*,\s*"{key}"\s*:\s*(?=[^\s])')


STYLES: Mapping[str, ToolStyle] = MappingProxyType(
    {
        "hermes": ToolStyle(
            begin='<tool_call>\n{"name": "',
            middle='", "arguments": ',
            end="}\n</tool_call>",
            between="\n",
            triggers=("<tool_call>",),
            head=_head("<tool_call>", "arguments"),
            tail=re.compile(r"\s*\}\s*</tool_call>"),
        ),
        "llama3": ToolStyle(
            begin='{"name": "',
            middle='", "parameters": ',
            end="}",
            between="; ",
            triggers=('{"name"', "<|python_tag|>"),
            head=_head(r"(?:<\|python_tag\|>)?(?:\s*;)?", "(?:parameters|arguments)"),
            tail=re.compile(r"\s*\}"),
        ),
        "mistral": ToolStyle(
            begin='{"name": "',
            middle='", "arguments": ',
            end="}",
            between=", ",
            triggers=('[{"name"', "[TOOL_CALLS]"),
            head=_head(r"(?:\[TOOL_CALLS\])?(?:\s*\[)?(?:\s*,)?", "arguments"),
            tail=re.compile(r"\s*\}"),
            first="[",
            last="]",
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function of OpenAI's `tools`. `parameters`: a JSON schema."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(kw_only=True)
class ToolCall:
    """A call in an answer; `arguments` as the text of its JSON, which grows in a stream until it is `whole`."""

    name: str
    arguments: str = ""
    whole: bool = False


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Of OpenAI's form, {"type": "function", "function": {"name", "parameters", ...}}. Raises ValueError naming which
    is none, and names that are given twice."""
    found: list[Tool] = []
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise ValueError(
                f'tools[{number}] is no function: give {{"type": "function", "function": {{"name": ...}}}}'
            )
        name, parameters = function.get("name"), function.get("parameters") or NO_PARAMETERS
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"tools[{number}]: the name {name!r} is not usable: give 1 to 64 of a-z, 0-9, _ . -")
        if not isinstance(parameters, Mapping):
            raise ValueError(f"tools[{number}] ({name}): parameters are no JSON schema: give a table")
        if name in [other.name for other in found]:
            raise ValueError(f"tools[{number}]: there is a function {name!r} already: name each once")
        found.append(Tool(name=name, parameters=parameters))
    return found


def tool_structure(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] = "auto",
    *,
    style: str,
    parallel: bool = True,
) -> StructuredOutputs | None:
    """What an answer may look like. "auto": free text in which what begins a call is one; "required": one call or,
    where `parallel`, several; {"type": "function", "function": {"name": ...}}: one call of that function; "none": None.

    Raises ValueError for a choice or a style that there is not.
    """
    form, found = _style(style), read_tools(tools)
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        found = [tool for tool in found if tool.name == name]
        if not found:
            raise ValueError(f"tool_choice asks for {name!r}: choose one of the tools")
        return _calls(found, form, several=False)
    if tool_choice not in CHOICES:
        raise ValueError(f"tool_choice={tool_choice!r} is not known: choose {', '.join(CHOICES)}, or a function")
    if tool_choice == "none":
        return None
    if not found:
        raise ValueError(f"tool_choice={tool_choice!r} and no tools: give tools, or leave it out")
    if tool_choice == "required":
        return _calls(found, form, several=parallel)
    if form.first:  # a list of calls: what begins as one is the whole list
        return None
    structures = [
        {"begin": f"{form.begin}{tool.name}{form.middle}", "schema": _spelled(tool), "end": form.end} for tool in found
    ]
    return StructuredOutputs(structural_tag={"structures": structures, "triggers": [form.triggers[0]]})


def _spelled(tool: Tool) -> dict[str, Any]:
    return {**closed(tool.parameters), "x-guidance": SPELLING}


def closed(schema: Any) -> Any:
    """The schema with no fields but those it names, where it does not say. Arguments that a function does not know
    help nobody, and small models go on inventing them. Objects that combine schemas are left as they are: what one
    part does not name another may."""
    if not isinstance(schema, Mapping) or COMBINES & set(schema):
        return schema
    found = dict(schema)
    if isinstance(properties := schema.get("properties"), Mapping):
        found["properties"] = {name: closed(value) for name, value in properties.items()}
        if not OPENS & set(schema):
            found["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            found[key] = closed(schema[key])
    return found


def _calls(tools: Sequence[Tool], form: ToolStyle, *, several: bool) -> StructuredOutputs:
    """In Lark: nothing but calls."""
    quoted = json.dumps
    body = [f"call_{i}" for i in range(len(tools))]
    start = f"call ({quoted(form.between)} call)*" if several else "call"
    start = " ".join(part for part in (quoted(form.first) if form.first else "", start) if part)
    lines = [f"start: {start}" + (f" {quoted(form.last)}" if form.last else ""), f"call: {' | '.join(body)}"]
    for i, tool in enumerate(tools):
        begin = quoted(f"{form.begin}{tool.name}{form.middle}")
        lines.append(f"call_{i}: {begin} args_{i} {quoted(form.end)}")
        lines.append(f"args_{i}: %json {json.dumps(_spelled(tool))}")
    return StructuredOutputs(grammar="\n".join(lines) + "\n")


class ToolCallStream:
    """Content and calls of a growing answer. Push pieces of its text in any portions; what is certain is never taken
    back."""

    def __init__(self, style: str) -> None:
        self.form = _style(style)
        self.text = ""
        self.content = ""
        self.calls: list[ToolCall] = []
        self.place = 0
        """Up to where the text has been told apart."""
        self.inside = False
        self.value = _Value(0)

    def push(self, piece: str) -> None:
        """More text."""
        self.text += piece
        while self._advance():
            pass

    def finish(self) -> None:
        """The answer has ended: what looked like a call and is none is content after all. A call whose arguments are
        complete is whole, whatever of its end is missing; one that was cut in its arguments is not."""
        if self.calls and not self.calls[-1].whole:
            self.calls[-1].whole = self.value.end(self.text) is not None
        else:
            rest = self.text[self.place :]
            if not (self.calls and rest.strip() in ("", self.form.last, self.form.between.strip())):
                self.content += rest
        self.place = len(self.text)

    def _advance(self) -> bool:
        """Tell more of the text apart; whether there may be more to tell."""
        if self.calls and not self.calls[-1].whole:
            return self._read_arguments()
        if not self.inside:
            start = self._next_trigger()
            words = len(self.text[self.place : start].rstrip())
            self.content += self.text[self.place : self.place + words]
            self.place += words
            if not any(self.text.startswith(trigger, start) for trigger in self.form.triggers):
                return False
            self.inside, self.place = True, start  # spaces before a call are no content
        found = self.form.head.match(self.text, self.place)
        if found is None:
            return False
        self.place = found.end()
        self.value = _Value(self.place)
        self.calls.append(ToolCall(name=found[1]))
        return True

    def _next_trigger(self) -> int:
        """Where the first trigger begins, whole or as far as the text goes."""
        for start in range(self.place, len(self.text)):
            rest = self.text[start : start + max(map(len, self.form.triggers))]
            if any(rest.startswith(trigger) or trigger.startswith(rest) for trigger in self.form.triggers):
                return start
        return len(self.text)

    def _read_arguments(self) -> bool:
        call, start = self.calls[-1], self.place
        end = self.value.end(self.text)
        if end is None:
            call.arguments = self.text[start:]
            return False
        call.arguments = self.text[start:end]
        tail = self.form.tail.match(self.text, end)
        if tail is None:
            return False
        call.whole, self.place = True, tail.end()
        self.inside = not self.form.triggers[0].startswith("<")  # without tags only calls follow a call
        return True


def parse_tool_calls(text: str, style: str) -> tuple[str, list[ToolCall]]:
    """(content, calls) of a finished answer."""
    stream = ToolCallStream(style)
    stream.push(text)
    stream.finish()
    return stream.content, stream.calls


def _style(name: str) -> ToolStyle:
    if name not in STYLES:
        raise ValueError(f"style={name!r} of tool calls is not known: choose one of {', '.join(STYLES)}")
    return STYLES[name]


class _Value:
    """Where the JSON object or array ends that begins at `start` of a growing text. Each character is read once: calls
    may hold whole files."""

    def __init__(self, start: int) -> None:
        self.place = start
        self.depth = 0
        self.quoted = self.escaped = self.broken = False

    def end(self, text: str) -> int | None:
        """None while it goes on, and for what is neither object nor array."""
        while self.place < len(text) and not self.broken:
            sign = text[self.place]
            self.place += 1
            if self.quoted:
                self.quoted = self.escaped or sign != '"'
                self.escaped = sign == "\\" and not self.escaped
            elif sign == '"':
                self.quoted = True
            elif sign in "{[":
                self.depth += 1
            elif sign in "}]":
                self.depth -= 1
                if self.depth == 0:
                    self.place -= 1  # asked again, it says the same
                    self.depth = 1
                    return self.place + 1
            self.broken = self.depth <= 0 and not sign.isspace()
        return None
