"""Requests of the OpenAI-compatible API, and what they mean to the engine. Names are OpenAI's, then vLLM's.
It must never import torch, or let a field pass that would change the answer and that nobody honours.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.params import FieldError, SamplingParams, StructuredOutputs
from dspark.serve.tools import tool_structure

MAX_PROMPTS = 256
TAKEN = frozenset(
    "self messages conversation tools documents chat_template tokenize padding truncation max_length return_tensors "
    "return_dict return_assistant_tokens_mask tokenizer_kwargs continue_final_message add_generation_prompt".split()
)
"""Names that chat_template_kwargs may not set: they are the server's, or of what reads the template and not of it."""
Ids = Annotated[list[int], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]


class Model(BaseModel):
    """Unknown fields are refused by name, and numbers are numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)


class StreamOptions(Model):
    """When usage is told in a stream: at its end, or in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Model):
    """Of response_format. Schemas are followed to the letter, whether `strict` or not."""

    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(default=True, alias="schema")
    strict: bool | None = None


class ResponseFormat(Model):
    """What the answer must look like. "structural_tag" is vLLM's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class Harmless(Model):
    """Fields that no answer depends on. They are taken and not used."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class Generation(Harmless):
    """What completions and chats have in common."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # ours
    speculation: bool | dict[str, Any] | None = None
    min_tokens_per_second: float | None = None
    include_metrics: bool = False
    token_sources: bool = False

    def structure(self, *, reasoning_end: str | None) -> StructuredOutputs | None:
        """What the answer must look like, by whichever spelling. Raises ValueError where there are several."""
        found: list[Mapping[str, Any]] = [] if self.structured_outputs is None else [self.structured_outputs]
        for name in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{name}")) is not None:
                found.append({name: value})
        form = self.response_format
        if form is not None and form.type == "json_object":
            found.append({"json_object": True})
        elif form is not None and form.type == "json_schema":
            if form.json_schema is None:
                raise ValueError("response_format.json_schema is missing: give its name and schema")
            found.append({"json": form.json_schema.schema_})
        elif form is not None and form.type == "structural_tag":
            found.append({"structural_tag": {"structures": form.structures, "triggers": form.triggers}})
        if len(found) > 1:
            raise ValueError("response_format, structured_outputs and guided_* ask for several structures: give one")
        structure = StructuredOutputs.read(found[0]) if found else None
        free = structure is not None and structure.after is None and structure.kind not in ("grammar", "structural_tag")
        if free and structure is not None and reasoning_end is not None:
            return replace(structure, after=reasoning_end)
        return structure

    def values(self) -> dict[str, Any]:
        """The fields of SamplingParams that were given."""
        names = (
            *("n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop", "top_k", "min_p"),
            *("repetition_penalty", "min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
            *("skip_special_tokens", "bad_words", "prompt_logprobs", "speculation", "min_tokens_per_second"),
        )
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            values["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return values

    @property
    def wants_usage(self) -> bool:
        """At the end of a stream."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check_stream(self) -> None:
        """Raises ValueError for options of a stream that is none."""
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs cannot be streamed: ask for them without stream")


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: str | Ids | Texts | IdLists
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """One for each answer asked."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    @property
    def only_prompt(self) -> bool:
        """echo with no tokens asked: the prompt is to be scored, nothing to be said."""
        return self.echo and self.max_tokens == 0

    def params(self, *, reasoning_end: str | None = None) -> SamplingParams:
        """Raises ValueError for what the engine cannot do."""
        self.check_stream()
        if self.suffix:
            raise ValueError("suffix is not supported: the model continues a text, it does not fill one in")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not supported: it must equal n, or be left out")
        values = self.values() | {"max_tokens": 1 if self.only_prompt else self.max_tokens}
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs
            if self.echo and self.prompt_logprobs is not None:
                raise ValueError("echo with logprobs gives the prompt's too: leave prompt_logprobs out")
            if self.echo:
                values["prompt_logprobs"] = self.logprobs
        return SamplingParams(**values, structured_outputs=self.structure(reasoning_end=reasoning_end))


class Function(Model):
    """What a tool is called, does and takes."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Model):
    """Only functions can be called."""

    type: Literal["function"] = "function"
    function: Function


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def tool_tables(self) -> list[dict[str, Any]]:
        """As templates read them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or []]

    @property
    def calls_tools(self) -> bool:
        """Whether calls are looked for in the answer."""
        return bool(self.tools) and self.tool_choice != "none"

    def params(self, *, tool_style: str, reasoning_end: str | None = None) -> SamplingParams:
        """Raises ValueError for what the engine cannot do."""
        self.check_stream()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are the same: give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        structure = self.structure(reasoning_end=reasoning_end)
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError(f"tool_choice={self.tool_choice!r} and no tools: give tools, or leave it out")
        if self.calls_tools:
            several = self.parallel_tool_calls is not False
            choice = self.tool_choice or "auto"
            tools = tool_structure(self.tool_tables, choice, style=tool_style, parallel=several)
            if tools is not None and structure is not None:
                raise ValueError("tools and a structure of the answer ask for different texts: give one of them")
            structure = tools or structure
        tokens = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        values = self.values() | {"max_tokens": tokens}
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        return SamplingParams(**values, structured_outputs=structure)

    def template_messages(self) -> list[dict[str, Any]]:
        """As templates read them: texts in one piece, arguments of calls as tables. Raises ValueError naming the
        message that cannot be read."""
        return [_message(number, message) for number, message in enumerate(self.messages)]

    def template_values(self) -> dict[str, Any]:
        """What else the chat template is told."""
        values: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if taken := sorted(TAKEN & set(values)):
            raise ValueError(f"chat_template_kwargs cannot set {taken}: they are the server's")
        values["add_generation_prompt"] = self.add_generation_prompt and not self.continue_final_message
        if self.continue_final_message:
            values["continue_final_message"] = True
        if self.tools and self.tool_choice != "none":
            values["tools"] = self.tool_tables
        return values


class TokenizeRequest(Harmless):
    """POST /tokenize, of a prompt or of messages, as in vLLM."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    def check(self) -> None:
        """Raises ValueError unless there is one text to read."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, and one of them only")


class DetokenizeRequest(Harmless):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def parse(kind: type[Model], body: bytes) -> Any:
    """A request of `kind` from JSON. Raises ValueError naming the field, what is wrong and what would be right."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise InvalidRequest(error) from None


class InvalidRequest(ValueError):
    """A body that is no request. `param`: the field."""

    def __init__(self, error: ValidationError) -> None:
        errors = error.errors(include_url=False, include_context=False)
        # Of a field with several forms every form complains. Which knows best: the one that finds but the length wrong,
        # or the fewest faults, or came furthest.
        faults = Counter(each["loc"][:2] for each in errors)
        first = min(
            errors,
            key=lambda each: (
                each["type"] not in ("too_long", "too_short"),
                faults[each["loc"][:2]],
                -len(each["loc"]),
            ),
        )
        # Forms go by names of types, which are none of the field's.
        names = [str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
        names = [name for i, name in enumerate(names) if i == 0 or name not in ("str", "int", "float", "bool")]
        self.param = names[0] if names else None
        place = ".".join(names) or "the body"
        if first["type"] == "extra_forbidden":
            text = f"{place} is not known here: leave it out, since ignoring it could change the answer"
        elif first["type"] == "missing":
            text = f"{place} is missing"
        elif first["type"] == "json_invalid":
            text = f"the body is not JSON: {first['msg']}"
        else:
            text = f"{place} is not usable: {first['msg']}"
        super().__init__(text)


def _token_id(key: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,10}", key):
        raise FieldError("logit_bias", key, "its keys are token ids")
    return int(key)


def _message(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"messages[{number}] has no role: give system, user, assistant or tool")
    read = {**message, "role": "system" if role == "developer" else role}
    if isinstance(content, list):
        read["content"] = "".join(_part(number, part) for part in content)
    elif content is None and (message.get("tool_calls") or role == "assistant"):
        read["content"] = ""
    elif not isinstance(content, str):
        raise ValueError(f"messages[{number}].content is no text: give a text, or parts of type text")
    if message.get("tool_calls") is not None:
        read["tool_calls"] = _calls(number, message["tool_calls"])
    return read


def _part(number: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise ValueError(
            f"messages[{number}].content has a part of type {str(kind)[:40]!r}: this model reads text only"
        )
    return text


def _calls(number: int, calls: Any) -> list[dict[str, Any]]:
    """Clients send arguments as a text of JSON, templates write tables."""
    if not isinstance(calls, list):
        raise ValueError(f"messages[{number}].tool_calls is no list")
    read = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"messages[{number}].tool_calls has a call without a function's name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise ValueError(
                    f"messages[{number}].tool_calls: the arguments of {function['name'][:64]} are not JSON"
                ) from None
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read
