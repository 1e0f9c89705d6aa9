"""Options: the arguments that several commands share, and how they become settings.
It must never import torch, nor give an option a meaning that the settings' own page (config.py, params.py) does not."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.config import OBJECTIVES, POLICIES, Config, SpeculationConfig, load_config, speculation_config
from dspark.params import SamplingParams

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_DRAFT = "auto"
DEFAULT_MAX_TOKENS = 256
_ENGINE_OPTIONS = (
    *("dtype", "device", "path", "exact", "quantization", "threads", "max_model_len", "objective"),
    *("max_num_seqs", "max_num_batched_tokens", "cache_gib", "check_memory"),
)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """--model and how it runs. Whatever is not given here comes from --set, then --config, then the defaults."""
    group = parser.add_argument_group("model and engine")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a packaged name (dspark models list), a folder, a .gguf file or a hub id",
    )
    group.add_argument("--exact", action="store_true", default=None, help="tokens bitwise equal to plain decoding")
    group.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), help="arithmetic of the target")
    group.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    group.add_argument(
        "--path", choices=("auto", "native", "torch", "general"), help="which implementation runs the target"
    )
    group.add_argument("--quantization", choices=("int8", "int4"), help="quantise the target's linears")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt and answer together, in tokens")
    group.add_argument(
        "--no-memory-check",
        dest="check_memory",
        action="store_false",
        default=None,
        help="load also what seems to have no room (see dspark info)",
    )
    group.add_argument("--objective", choices=OBJECTIVES, help="most tokens a second, or few seconds a token")
    group.add_argument(
        "--config", metavar="FILE", help="a TOML file with the tables [engine], [speculation] and [server]"
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        help="one setting, such as engine.page_size=32 (repeatable)",
    )


def add_speculation_arguments(parser: argparse.ArgumentParser, *, task: bool = True) -> None:
    """Which drafter, and how long its drafts may be; `task`: whether there is one request to be named."""
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--draft",
        metavar="NAME",
        help="none, ngram, suffix, dspark (the head that comes with the model), auto (head and suffix), or a draft "
        f"model or head: a name, folder or .gguf file (default: {DEFAULT_DRAFT}, "
        "or what --config says)",
    )
    group.add_argument(
        "--num-speculative-tokens", type=int, metavar="K", help="longest draft of a step (policy adaptive may use less)"
    )
    group.add_argument(
        "--policy",
        choices=POLICIES,
        help="how long drafts are (default: adaptive, or what --config says; see docs/tuning.md)",
    )
    if task:
        group.add_argument("--task", metavar="NAME", help="the kind of request: acceptance is learned by it")
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='the whole speculation setting as in vLLM, such as \'{"method": "ngram", "num_speculative_tokens": 4}\'',
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The fields of SamplingParams; names and meanings are those of the OpenAI API and vLLM."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"longest answer in tokens (default: {DEFAULT_MAX_TOKENS})"
    )
    group.add_argument("--min-tokens", type=int, metavar="N", help="no end before so many tokens")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (the default here)")
    group.add_argument("--top-k", type=int, metavar="K", help="only the K most likely tokens; 0 switches it off")
    group.add_argument("--top-p", type=float, metavar="P", help="only the most likely tokens that hold mass P together")
    group.add_argument("--min-p", type=float, metavar="P", help="only tokens at least P times as likely as the first")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1 discourages tokens seen before")
    group.add_argument(
        "--presence-penalty", type=float, metavar="X", help="subtracted for tokens already in the answer"
    )
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="subtracted for each time in the answer")
    group.add_argument("--seed", type=int, metavar="N", help="same tokens at every run, with any drafter")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    group.add_argument(
        "--stop-token-id", action="append", type=int, metavar="ID", help="end at this token (repeatable)"
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after end-of-text")
    group.add_argument("-n", type=int, metavar="N", help="number of answers")
    group.add_argument("--logprobs", type=int, metavar="N", help="log-probabilities of the N best tokens (with --json)")
    group.add_argument("--json-schema", metavar="FILE", help="answer with JSON under a schema: a file, or JSON itself")
    group.add_argument("--regex", metavar="REGEX", help="answer with what this matches as a whole")
    group.add_argument("--params", metavar="JSON", help='any other field, such as \'{"logit_bias": {"11": -5}}\'')


def read_config(args: argparse.Namespace) -> Config:
    """Options beat --set, --set beats --config. Raises ValueError naming what does not fit."""
    overrides = list(args.set)
    if args.config is None:
        overrides.insert(0, f'speculation.method="{DEFAULT_DRAFT}"')
    config = load_config(args.config, overrides=overrides)
    engine = {name: value for name in _ENGINE_OPTIONS if (value := getattr(args, name, None)) is not None}
    return dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, **engine), speculation=_speculation(args, config.speculation)
    )


def named_model(args: argparse.Namespace) -> str | None:
    """MODEL or --model. Raises ValueError where they differ."""
    if args.model_tag is not None and args.model not in (None, DEFAULT_MODEL, args.model_tag):
        raise ValueError(f"MODEL is {args.model_tag!r} and --model {args.model!r}: give one of them")
    return args.model if args.model_tag is None else args.model_tag


def read_params(args: argparse.Namespace) -> SamplingParams:
    """The options that were given beat --params. Raises ValueError naming field, cause and cure."""
    values: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS, "temperature": 0.0}
    if args.params is not None:
        values |= parse_json_object(args.params, option="--params")
    if isinstance(values.get("logit_bias"), Mapping):
        values["logit_bias"] = {_token_id(key): bias for key, bias in values["logit_bias"].items()}
    for name in [field.name for field in dataclasses.fields(SamplingParams)]:
        value = getattr(args, "stop_token_id" if name == "stop_token_ids" else name, None)
        if value is not None:
            values[name] = value
    if (structure := _structure(args)) is not None:
        if "structured_outputs" in values:
            raise ValueError("--params holds structured_outputs: leave --json-schema and --regex out")
        values["structured_outputs"] = structure
    params = SamplingParams.from_dict(values)
    if getattr(args, "task", None) is not None:
        params = dataclasses.replace(params, speculation=dataclasses.replace(params.control, task=args.task))
    return params


def _structure(args: argparse.Namespace) -> Mapping[str, Any] | None:
    schema, regex = getattr(args, "json_schema", None), getattr(args, "regex", None)
    if schema is not None and regex is not None:
        raise ValueError("--json-schema and --regex ask for different answers: give one of them")
    if regex is not None:
        return {"regex": regex}
    if schema is None:
        return None
    if not schema.lstrip().startswith(("{", "true", "false")):
        try:
            schema = Path(schema).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--json-schema {schema!r} cannot be read ({error}): give a file or JSON") from None
    return {"json": schema}


def parse_json_object(text: str, *, option: str) -> Mapping[str, Any]:
    """A JSON object given on the command line."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{option} is not JSON: {error.msg} at character {error.pos}; quote it for the shell"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{option} holds a {type(value).__name__}: give a JSON object, such as '{{\"key\": 1}}'")
    return value


def _speculation(args: argparse.Namespace, base: SpeculationConfig) -> SpeculationConfig:
    if args.draft is not None and args.speculative_config is not None:
        raise ValueError("--draft and --speculative-config both name a drafter: give one of them")
    if args.speculative_config is not None:
        base = speculation_config(parse_json_object(args.speculative_config, option="--speculative-config"))
    elif args.draft is not None:
        named = SpeculationConfig.from_draft(args.draft)
        base = dataclasses.replace(base, method=named.method, model=named.model)
    if args.policy is not None:
        base = dataclasses.replace(base, policy=args.policy)
    if args.num_speculative_tokens is not None:
        base = dataclasses.replace(base, num_speculative_tokens=args.num_speculative_tokens)
    return base


def _token_id(key: object) -> object:
    """JSON keys are strings, token ids are numbers; what is no number is left for SamplingParams to refuse."""
    return int(key) if isinstance(key, str) and key.lstrip("-").isdigit() else key
