"""SamplingParams: everything a request may ask of the sampler, checked once at the door.
It must never import torch, read a tokenizer, or silently accept a field that the engine does not honour."""

from __future__ import annotations

import hashlib
import json as json_text
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

MAX_LOGPROBS = 20
MAX_ANSWERS = 128
MAX_NUMBER = 10**6
MIN_REPETITION_PENALTY = 1e-3
MAX_INTEGER = 2**31
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 256
LONGEST_SHOWN = 120
"""Characters of a wrong value that its refusal repeats."""
MAX_TASK_LENGTH = 128
AUTOMATIC_CLASS = "#"
"""How the names begin of classes of prompts that are found while serving (plan/history): no task may begin so."""


class FieldError(ValueError):
    """A field of a request that is not usable. `param`: its name."""

    def __init__(self, name: str, value: object, cure: str) -> None:
        try:
            shown = repr(value)
        except ValueError:  # more digits than Python writes
            shown = "<a huge number>"
        if len(shown) > LONGEST_SHOWN:
            shown = f"{shown[:LONGEST_SHOWN]}..."
        self.param = re.split(r"[.\[ ]", name)[0]
        super().__init__(f"{name}={shown} is not usable: {cure}")


def _fail(name: str, value: object, cure: str) -> None:
    raise FieldError(name, value, cure)


def _number(name: str, value: object) -> float:
    # The bound is far beyond any use and keeps every product with a logit finite in float32.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -MAX_NUMBER <= value <= MAX_NUMBER:
        _fail(name, value, f"give a finite number, at most {MAX_NUMBER:g} in size")
    return float(value)  # type: ignore[arg-type]


def _integer(name: str, value: object, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        _fail(name, value, f"give a whole number of at least {least}")
    if value >= MAX_INTEGER:  # type: ignore[operator]
        _fail(name, value, "give a whole number below 2**31")
    return int(value)  # type: ignore[call-overload]


@dataclass(frozen=True, kw_only=True)
class RequestSpeculation:
    """How one request is sped up; its answer is the same with any of it.

    `enabled` False decodes plainly. `max_tokens`: longest draft of a step, below the engine's own bound. `task`: any
    word that tells requests of a kind, such as a tenant's name: acceptance is learned by it, instead of by likeness of
    prompts. `policy`: another than the engine's (docs/tuning.md); a name that the engine does not have is refused when
    the request is made.
    """

    enabled: bool = True
    max_tokens: int | None = None
    task: str | None = None
    policy: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            _fail("speculation.enabled", self.enabled, "give true or false")
        if self.max_tokens is not None:
            _integer("speculation.max_tokens", self.max_tokens, least=0)
        for name, value in (("task", self.task), ("policy", self.policy)):
            if value is not None and not (isinstance(value, str) and 0 < len(value) <= MAX_TASK_LENGTH):
                _fail(f"speculation.{name}", value, f"give a word of at most {MAX_TASK_LENGTH} characters")
        if self.task is not None and self.task.startswith(AUTOMATIC_CLASS):
            cure = f"names that begin with {AUTOMATIC_CLASS} are of classes found while serving; choose another"
            _fail("speculation.task", self.task, cure)

    @classmethod
    def read(cls, value: object) -> RequestSpeculation:
        """From true, false, a mapping of its fields, or itself. Unknown keys are an error that names them."""
        if isinstance(value, cls):
            return value
        if isinstance(value, bool):
            return cls(enabled=value)
        if not isinstance(value, Mapping):
            _fail("speculation", value, "give true, false or a table such as {'max_tokens': 4, 'task': 'chat'}")
        assert isinstance(value, Mapping)
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(value) - known, key=str):
            raise ValueError(f"unknown keys {unknown} in speculation: known are {sorted(known)}")
        return cls(**value)  # type: ignore[arg-type]


STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHOICES = 10_000


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What an answer must look like; one of the kinds, named as in vLLM.

    `json`: a JSON schema, as a table, a text, true or false. `json_object`: any JSON object. `regex`: matched by the
    whole answer. `choice`: one of these texts. `grammar`: Lark, or EBNF in llama.cpp's form. `structural_tag`: free
    text in which what begins with a `trigger` follows a schema, {"structures": [{"begin", "schema", "end"}, ...],
    "triggers": [...]} as in vLLM, a table or a text. Raises ValueError naming the field.
    """

    json: str | bool | Mapping[str, object] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, object] | None = None
    disable_any_whitespace: bool = False
    """JSON without spaces and line breaks between its parts."""
    whitespace_pattern: str | None = None
    """JSON with what this regex matches between its parts."""
    after: str | None = None
    """Free text goes before, up to this marker, such as "</think>": the structure begins right behind it."""

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) != 1:
            _fail("structured_outputs", given or None, f"give exactly one of {', '.join(STRUCTURES)}")
        for name in ("regex", "grammar", "whitespace_pattern", "after"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                _fail(f"structured_outputs.{name}", value, "give a text that is not empty")
        if self.json_object is not None and self.json_object is not True:
            _fail("structured_outputs.json_object", self.json_object, "give true, or leave it out")
        if self.after is not None and self.kind in ("grammar", "structural_tag"):
            _fail("structured_outputs.after", self.after, f"write it into the {self.kind} itself")
        if self.choice is not None:
            words = self.choice
            if isinstance(words, str) or not words or not all(isinstance(word, str) and word for word in words):
                _fail("structured_outputs.choice", words, "give a list of texts that are not empty")
            if len(words) > MAX_CHOICES:
                _fail("structured_outputs.choice", f"<{len(words)} texts>", f"at most {MAX_CHOICES} are told apart")
            object.__setattr__(self, "choice", tuple(words))
        if self.json is not None:
            self.schema()
        if self.structural_tag is not None:
            self.tags()
        try:
            self.key()
        except (TypeError, ValueError, RecursionError) as error:
            _fail(f"structured_outputs.{self.kind}", "<...>", f"it cannot be written as JSON ({error})")

    @classmethod
    def read(cls, value: object) -> StructuredOutputs | None:
        """From a mapping of its fields, itself, or None. Unknown keys are an error that names them."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            _fail("structured_outputs", value, "give a table such as {'json': {...}} or {'regex': '...'}")
        assert isinstance(value, Mapping)
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(value) - known, key=str):
            raise ValueError(f"unknown keys {unknown} in structured_outputs: known are {sorted(known)}")
        return cls(**value)  # type: ignore[arg-type]

    @property
    def kind(self) -> str:
        """Which of the kinds it is."""
        return next(name for name in STRUCTURES if getattr(self, name) is not None)

    @property
    def name(self) -> str:
        """A short one, the same for the same structure: acceptance is learned by it."""
        return f"{self.kind}:{hashlib.sha256(self.key().encode()).hexdigest()[:12]}"

    def schema(self) -> object:
        """The JSON schema, parsed."""
        return _parsed("json", self.json, (Mapping, bool))

    def tags(self) -> list[Mapping[str, Any]]:
        """Of `structural_tag`: trigger, begin, schema and end of each."""
        table = _parsed("structural_tag", self.structural_tag, (Mapping,))
        assert isinstance(table, Mapping)
        structures, triggers = table.get("structures"), table.get("triggers")
        shape = 'give {"structures": [{"begin": TEXT, "schema": SCHEMA, "end": TEXT}, ...], "triggers": [TEXT, ...]}'
        found: list[Mapping[str, Any]] = []
        if not (isinstance(structures, list) and structures and isinstance(triggers, list) and triggers):
            _fail("structured_outputs.structural_tag", table, shape)
        for tag in structures:  # type: ignore[union-attr]
            if not isinstance(tag, Mapping) or not isinstance(tag.get("begin"), str) or "schema" not in tag:
                _fail("structured_outputs.structural_tag", tag, shape)
            begins = [word for word in triggers if isinstance(word, str) and word and tag["begin"].startswith(word)]  # type: ignore[union-attr]
            if not begins:
                _fail("structured_outputs.structural_tag", tag["begin"], "each begin must start with a trigger")
            end = tag.get("end", "")
            if not isinstance(end, str):
                _fail("structured_outputs.structural_tag", tag, shape)
            found.append({"trigger": begins[0], "begin": tag["begin"], "schema": tag["schema"], "end": end})
        return found

    def source(self) -> str:
        """What is to be followed, as one text."""
        value = getattr(self, self.kind)
        if self.kind in ("json", "structural_tag") and isinstance(value, str):
            value = json_text.loads(value)
        body = value if isinstance(value, str) else json_text.dumps(value, default=_plain)
        return body

    def key(self) -> str:
        """A text that tells it from all others."""
        shape = (self.kind, self.source(), self.disable_any_whitespace, self.whitespace_pattern, self.after)
        return json_text.dumps(shape)


def _plain(value: object) -> object:
    """Of mappings that are no dictionaries, for JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no place in JSON")


def _parsed(name: str, value: object, kinds: tuple[type, ...]) -> object:
    if isinstance(value, str):
        try:
            value = json_text.loads(value)
        except (ValueError, RecursionError) as error:
            cure = f"it is no JSON ({error}); give a table, or JSON as a text"
            _fail(f"structured_outputs.{name}", value if len(str(value)) < 80 else "<text>", cure)
    if not isinstance(value, kinds):
        _fail(f"structured_outputs.{name}", value, "give a table, or JSON as a text")
    return value


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Names and meanings are those of vLLM and of the OpenAI API.

    Units: `temperature` 0 is greedy (argmax); `top_k` 0 or -1 means no limit; `max_tokens` None means up to the
    context's end; `stop` strings are not part of the text unless `include_stop_str_in_output`.
    `logprobs` is the number of most likely tokens reported at each position (None: none; the chosen token is always
    added); the values are log-softmax of the *raw* logits, before any processor, as vLLM's default.
    `seed` makes the tokens a function of (model, prompt, params) alone: the same in any company, with any drafter and
    draft length, after preemption (see docs/losslessness.md, "seeded requests").

    Raises ValueError naming field, cause and cure.
    """

    n: int = 1
    max_tokens: int | None = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    min_tokens_per_second: float | None = None
    """A floor that the engine tries to keep from the first token on, at the expense of others (docs/tuning.md)."""
    structured_outputs: Mapping[str, object] | StructuredOutputs | None = None
    """What the answer must look like: a table of the fields of StructuredOutputs. Read it with `structure`."""
    speculation: bool | Mapping[str, object] | RequestSpeculation = True
    """False switches it off; a table of the fields of RequestSpeculation says more. Read it with `control`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculation", RequestSpeculation.read(self.speculation))
        object.__setattr__(self, "structured_outputs", StructuredOutputs.read(self.structured_outputs))
        self._check_counts()
        self._check_shape_of_distribution()
        self._check_ends()

    def _check_counts(self) -> None:
        if _integer("n", self.n, least=1) > MAX_ANSWERS:
            _fail("n", self.n, f"at most {MAX_ANSWERS} answers a request; send more requests")
        _integer("min_tokens", self.min_tokens, least=0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, least=1)
            if self.min_tokens > self.max_tokens:
                _fail("min_tokens", self.min_tokens, f"it must not exceed max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and _integer(name, value, least=0) > MAX_LOGPROBS:
                _fail(name, value, f"at most {MAX_LOGPROBS} are reported")
        if (
            self.min_tokens_per_second is not None
            and not _number("min_tokens_per_second", self.min_tokens_per_second) > 0
        ):
            _fail("min_tokens_per_second", self.min_tokens_per_second, "give tokens a second above 0, or None")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            _fail("seed", self.seed, "give a whole number or None")

    def _check_shape_of_distribution(self) -> None:
        if _number("temperature", self.temperature) < 0:
            _fail("temperature", self.temperature, "give 0 (greedy) or a positive number")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or not -1 <= self.top_k < 2**31:
            _fail("top_k", self.top_k, "give a whole number below 2**31; 0 or -1 switches it off")
        if not 0 < _number("top_p", self.top_p) <= 1:
            _fail("top_p", self.top_p, "give a number in (0, 1]")
        if not 0 <= _number("min_p", self.min_p) <= 1:
            _fail("min_p", self.min_p, "give a number in [0, 1]")
        if _number("repetition_penalty", self.repetition_penalty) < MIN_REPETITION_PENALTY:
            cure = f"give a number of at least {MIN_REPETITION_PENALTY}; 1 switches it off"
            _fail("repetition_penalty", self.repetition_penalty, cure)
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= _number(name, getattr(self, name)) <= 2:
                _fail(name, getattr(self, name), "give a number in [-2, 2]")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias token id", token, least=0)
            _number(f"logit_bias[{token}]", bias)

    def _check_ends(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        if len(stops) > MAX_STOP_STRINGS:
            _fail("stop", f"<{len(stops)} strings>", f"at most {MAX_STOP_STRINGS} are watched")
        if len(self.bad_words) > MAX_BAD_WORDS:
            _fail("bad_words", f"<{len(self.bad_words)} words>", f"at most {MAX_BAD_WORDS} are kept out")
        for name, words in (("stop", stops), ("bad_words", self.bad_words)):
            if isinstance(words, str) or any(not isinstance(word, str) for word in words):
                _fail(name, words, "give a list of strings")
            if any(not word for word in words):
                _fail(name, list(words), "an empty string matches everywhere; remove it")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, least=0)
        object.__setattr__(self, "stop", tuple(stops))
        object.__setattr__(self, "bad_words", tuple(self.bad_words))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def control(self) -> RequestSpeculation:
        """How this request is sped up."""
        assert isinstance(self.speculation, RequestSpeculation)
        return self.speculation

    @property
    def structure(self) -> StructuredOutputs | None:
        """What the answer must look like."""
        assert self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputs)
        return self.structured_outputs

    @property
    def greedy(self) -> bool:
        """Temperature 0: the most likely token under the processed logits."""
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether the processed logits of a position depend on the tokens before it (and so on drafts in the block)."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or bool(self.bad_words)
            or self.min_tokens > 0
        )

    @property
    def plain(self) -> bool:
        """No processor touches the logits before temperature, top-k, top-p and min-p."""
        return not self.needs_history and not self.logit_bias

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> SamplingParams:
        """From parsed JSON. Unknown keys are an error that names them."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known, key=str):
            raise ValueError(f"unknown sampling fields {unknown}: known are {sorted(known)}")
        return cls(**values)  # type: ignore[arg-type]
