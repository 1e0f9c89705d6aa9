"""Every setting of the engine and of speculation, as frozen dataclasses, from keywords, JSON or TOML.
It must never import torch, read the environment at import, or let an unknown key pass."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOOKUP_METHODS = ("ngram", "suffix")
HEAD_METHODS = ("dspark", "auto")
METHODS = ("none", *LOOKUP_METHODS, "model", *HEAD_METHODS)
OBJECTIVES = ("throughput", "latency")
POLICIES = ("adaptive", "fixed", "confidence", "heuristic", "shadow")


def _choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known: choose one of {', '.join(map(str, choices))}")


def _at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} is not usable: give a whole number of at least {least}")


def _name_or_path(name: str, value: object) -> str | None:
    if value is not None and not (isinstance(value, (str, Path)) and str(value)):
        raise ValueError(f"{name}={value!r} is not usable: give a name or path, or leave it out")
    return None if value is None else str(value)


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Which drafter, and how long its drafts may be. Key names are vLLM's where the meaning is the same.

    `num_speculative_tokens` is the largest draft of a step; `policy` "adaptive" drafts and verifies as many as pay by
    the measured cost of a pass, "fixed" always that many, "confidence" until all being accepted is less likely than
    `confidence_threshold`, "heuristic" two more after a whole draft was accepted and one fewer after any other, and
    "shadow" drafts and verifies nothing, to record what drafts would be worth (docs/tuning.md). `history`: a file saved
    by LLM.save_history, from which acceptance is known at the start. `quantization` is the draft model's or head's.
    Methods "dspark" and "auto" take the head that comes with dspark for the target, or the one in the folder `model`;
    "auto" looks suffixes up beside it. `prompt_lookup_max/min` are the n-gram sizes of `ngram`;
    `suffix_max_cached_tokens` bounds the memory of finished answers of `suffix`.
    """

    method: str = "none"
    model: str | None = None
    num_speculative_tokens: int = 8
    policy: str = "adaptive"
    confidence_threshold: float = 0.4
    history: str | None = None
    quantization: str | None = None
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    suffix_max_cached_tokens: int = 200_000

    def __post_init__(self) -> None:
        _choice("method", self.method, METHODS)
        _choice("policy", self.policy, POLICIES)
        _choice("quantization", self.quantization, (None, "int8", "int4"))
        _at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        threshold = self.confidence_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
            raise ValueError(f"confidence_threshold={threshold!r} is not usable: give a probability, 0 to 1")
        _at_least("prompt_lookup_min", self.prompt_lookup_min, 1)
        _at_least("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min)
        _at_least("suffix_max_cached_tokens", self.suffix_max_cached_tokens, 0)
        for name in ("model", "history"):
            object.__setattr__(self, name, _name_or_path(name, getattr(self, name)))
        takes_model = self.method in ("model", *HEAD_METHODS)
        if (self.method == "model" and self.model is None) or (self.model is not None and not takes_model):
            raise ValueError(
                f"method={self.method!r} with model={self.model!r} does not fit: "
                "method 'model' needs a model's name, 'dspark' and 'auto' may have a head's, the others take none"
            )

    @classmethod
    def from_draft(cls, draft: str | None, **settings: Any) -> SpeculationConfig:
        """The short spelling: a method's name, or a model's name, folder or GGUF file as draft model."""
        if draft is None or draft in METHODS and draft != "model":
            return cls(method=draft or "none", **settings)
        return cls(**{"method": "model", "model": draft, **settings})

    def drafter_settings(self) -> dict[str, Any]:
        """Keyword arguments of the drafter's constructor (draft/base.registry) that come from here."""
        longest = {"num_speculative_tokens": max(1, self.num_speculative_tokens)}
        if self.method == "ngram":
            return longest | {"prompt_lookup_max": self.prompt_lookup_max, "prompt_lookup_min": self.prompt_lookup_min}
        if self.method in ("suffix", "auto"):
            return longest | {"max_cached_tokens": self.suffix_max_cached_tokens}
        return {}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the target runs.

    `path`: "native" (C++ kernels on CPU), "torch" (fused torch decoder), "general" (transformers' own forward),
    "auto" the first that fits. `exact`: a row's arithmetic must not depend on its company (docs/losslessness.md).
    `cache_gib`: memory of the KV cache in GiB; None chooses from what is free and what the rows can use.
    `max_num_batched_tokens`: new tokens in one pass (prompt chunks, last tokens and drafts together).
    `objective`: "throughput", most tokens a second over all requests, or "latency", few seconds a token for each of
    them and no long stalls by others' prompts (docs/tuning.md).
    `check_memory`: refuse before loading what has no room (docs/choosing-a-draft.md).
    `check`: assert the step invariants after every step (tests; costs time).
    """

    dtype: str = "auto"
    device: str = "auto"
    path: str = "auto"
    exact: bool = False
    quantization: str | None = None
    threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    page_size: int = 16
    cache_gib: float | None = None
    prefix_reuse: bool = True
    seed: int | None = None
    objective: str = "throughput"
    check_memory: bool = True
    check: bool = False

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, ("auto", "bfloat16", "float32"))
        _choice("path", self.path, ("auto", "native", "torch", "general"))
        _choice("quantization", self.quantization, (None, "int8", "int4"))
        _choice("objective", self.objective, OBJECTIVES)
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size"):
            _at_least(name, getattr(self, name), 1)
        for name in ("exact", "prefix_reuse", "check_memory", "check"):
            _choice(name, getattr(self, name), (True, False))
        for name in ("threads", "max_model_len"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.cache_gib is not None and not (isinstance(self.cache_gib, (int, float)) and self.cache_gib > 0):
            raise ValueError(
                f"cache_gib={self.cache_gib!r} is not usable: give a positive number of GiB or leave it out"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "each running sequence needs at least one token a pass; raise the first or lower the second"
            )


REPORTS = ("none", "summary", "detailed")
TOOL_STYLES = ("hermes", "llama3", "mistral")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How `dspark serve` listens and what it lets in. Names are vLLM's where the meaning is the same.

    `served_model_name`: what clients call the model, the first of them in answers (None: the model's own name).
    `api_key`: any of these must be sent as a bearer token. `max_queue`: answers that may wait for a place, beyond which
    a request is told to come again (429). `max_request_bytes` of a body, `body_timeout` seconds to send it,
    `request_timeout` seconds until an answer is given up (None: never), `send_timeout` seconds that a stream waits for
    its reader to take a piece, `shutdown_grace` seconds that running answers get after SIGTERM. `tool_call_parser`: how
    the model writes tool calls (None: told by its chat template). `reasoning_end`: the marker, such as "</think>", up
    to which an answer is reasoning: structures begin behind it, and it is told apart from the content.
    `per_request_spec_decode_metrics`: what of speculation responses tell unasked.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: Sequence[str] = ()
    api_key: Sequence[str] = ()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    allowed_origins: Sequence[str] = ()
    root_path: str = ""
    max_queue: int = 256
    max_request_bytes: int = 8 * 1024**2
    body_timeout: float = 30.0
    request_timeout: float | None = None
    send_timeout: float = 30.0
    keep_alive_timeout: float = 5.0
    shutdown_grace: float = 30.0
    tool_call_parser: str | None = None
    reasoning_end: str | None = None
    chat_template: str | None = None
    per_request_spec_decode_metrics: str = "none"
    log_format: str = "text"
    page: bool = True

    def __post_init__(self) -> None:
        for name in ("served_model_name", "api_key", "allowed_origins"):
            value = getattr(self, name)
            words = [value] if isinstance(value, str) else list(value)
            if not all(isinstance(word, str) and word for word in words):
                shown = "<...>" if name == "api_key" else repr(value)
                raise ValueError(f"{name}={shown} is not usable: give one or more texts that are not empty")
            object.__setattr__(self, name, tuple(words))
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port < 2**16:
            raise ValueError(f"port={self.port!r} is not usable: give 1 to 65535, or 0 for any that is free")
        _at_least("max_queue", self.max_queue, 0)
        _at_least("max_request_bytes", self.max_request_bytes, 1024)
        for name in ("body_timeout", "request_timeout", "send_timeout", "keep_alive_timeout", "shutdown_grace"):
            value = getattr(self, name)
            if name == "request_timeout" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"{name}={value!r} is not usable: give seconds above 0")
        _choice("tool_call_parser", self.tool_call_parser, (None, *TOOL_STYLES))
        _choice("per_request_spec_decode_metrics", self.per_request_spec_decode_metrics, REPORTS)
        _choice("log_format", self.log_format, LOG_FORMATS)
        _choice("page", self.page, (True, False))
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile belong together: give both, or neither")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ValueError("ssl_ca_certs is for TLS: give ssl_certfile and ssl_keyfile too")
        if self.reasoning_end is not None and not self.reasoning_end:
            raise ValueError("reasoning_end is empty: give a marker such as '</think>', or leave it out")
        if not self.root_path.startswith("/") and self.root_path:
            raise ValueError(f"root_path={self.root_path!r} is not usable: it begins with /")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything together, as read from a TOML file with the tables [engine], [speculation] and [server]."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


def _build(cls: type, values: Mapping[str, Any], where: str) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {values!r}, not a table of settings: write the keys under it, one a line")
    known = {f.name for f in fields(cls)}
    if unknown := sorted(set(values) - known, key=str):
        raise ValueError(f"unknown keys {unknown} in {where}: known are {sorted(known)}")
    return cls(**values)


def engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """From keywords; unknown ones are an error that names them."""
    return _build(EngineConfig, values, "the engine's settings")


def speculation_config(values: Mapping[str, Any]) -> SpeculationConfig:
    """From parsed JSON as in vLLM's --speculative-config; a `model` without `method` is a draft model."""
    values = dict(values)
    if "method" not in values and "model" in values:
        values["method"] = "model"
    if values.get("method") == "draft_model":
        values["method"] = "model"
    return _build(SpeculationConfig, values, "the speculation settings")


def load_config(path: str | Path | None = None, *, overrides: Sequence[str] = ()) -> Config:
    """A TOML file, then overrides spelled `engine.exact=true` (the right side is a TOML value)."""
    tables: dict[str, dict[str, Any]] = {"engine": {}, "speculation": {}, "server": {}}
    if path is not None:
        try:
            tables |= tomllib.loads(Path(path).read_text())
        except FileNotFoundError:
            raise ValueError(
                f"{path}: no such file; give a TOML file with the tables [engine], [speculation] and [server]"
            ) from None
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: not TOML: {error}") from None
    for override in overrides:
        key, separator, value = override.partition("=")
        table, _, name = key.strip().partition(".")
        if not separator or not name:
            raise ValueError(f"--set {override!r} is not of the form table.key=value, such as engine.exact=true")
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value.strip()
        if not isinstance(tables.setdefault(table, {}), dict):
            raise ValueError(f"{table} is {tables[table]!r}, not a table of settings: write the keys under it")
        tables[table][name] = parsed
    if unknown := sorted(set(tables) - {f.name for f in fields(Config)}):
        raise ValueError(f"unknown tables {unknown}: known are {[f.name for f in fields(Config)]}")
    return Config(
        engine=_build(EngineConfig, tables["engine"], "[engine]"),
        speculation=_build(SpeculationConfig, tables["speculation"], "[speculation]"),
        server=_build(ServerConfig, tables["server"], "[server]"),
    )
