"""`dspark serve`: an OpenAI-compatible server over one model.
It must never print anything on stdout, or take a key into a log."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dspark.cli import options
from dspark.cli.progress import ProgressBar
from dspark.config import LOG_FORMATS, REPORTS, TOOL_STYLES, ServerConfig

KEY_VARIABLE = "DSPARK_API_KEY"
_LISTS = ("served_model_name", "api_key", "allowed_origins")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is served, where, to whom, and within which limits."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the model; the same as --model")
    options.add_engine_arguments(parser)
    engine = parser.add_argument_group("batching")
    engine.add_argument("--max-num-seqs", type=int, metavar="N", help="answers made at once")
    engine.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="new tokens in one pass")
    engine.add_argument("--cache-gib", type=float, metavar="GIB", help="memory of the KV cache")
    engine.add_argument("--seed", type=int, metavar="N", help="of requests that name none")
    options.add_speculation_arguments(parser, task=False)
    learned = parser.add_argument_group("what is learned")
    learned.add_argument("--profile", metavar="FILE", help="record drafts and acceptance of each answer")
    learned.add_argument("--save-history", metavar="FILE", help="keep what was learned of acceptance, at the end")
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", help="address to listen on (default: 127.0.0.1; 0.0.0.0 for all)")
    add("--port", type=int, help="port (default: 8000; 0 for any that is free)")
    add("--served-model-name", nargs="+", metavar="NAME", help="what clients call the model")
    add("--api-key", nargs="+", metavar="KEY", help=f"keys that clients must send (or in {KEY_VARIABLE})")
    add("--ssl-keyfile", metavar="FILE", help="TLS key")
    add("--ssl-certfile", metavar="FILE", help="TLS certificate")
    add("--ssl-ca-certs", metavar="FILE", help="certificates of those who sign clients', which are then asked for")
    add("--allowed-origins", nargs="+", metavar="ORIGIN", help="web pages that may ask (CORS); * for all")
    add("--root-path", metavar="PATH", help="prefix under which a proxy shows the server")
    add("--chat-template", metavar="FILE", help="a template to use instead of the model's: a file, or the text itself")
    add("--tool-call-parser", choices=TOOL_STYLES, help="how the model writes tool calls (default: by its template)")
    add("--reasoning-end", metavar="TEXT", help='marker up to which an answer is reasoning, such as "</think>"')
    add("--per-request-spec-decode-metrics", choices=REPORTS, help="acceptance in each response")
    add("--max-queue", type=int, metavar="N", help="answers that may wait for a place; more get status 429")
    add("--max-request-bytes", type=int, metavar="N", help="largest body")
    add("--body-timeout", type=float, metavar="S", help="seconds for a body to come")
    add("--request-timeout", type=float, metavar="S", help="seconds until an answer is given up (default: never)")
    add("--send-timeout", type=float, metavar="S", help="seconds that a stream waits for its reader")
    add("--keep-alive-timeout", type=float, metavar="S", help="seconds that an idle connection is kept")
    add("--shutdown-grace", type=float, metavar="S", help="seconds that running answers get after SIGTERM")
    add("--log-format", choices=LOG_FORMATS, help="of the log on stderr")
    add("--no-page", dest="page", action="store_false", default=None, help="without the page at /")
    group = parser.add_argument_group("Weights & Biases")
    group.add_argument("--wandb", metavar="PROJECT", help="log speed and acceptance over time to this project")
    group.add_argument("--wandb-interval", type=float, default=30.0, metavar="S", help="seconds between entries")


def run(args: argparse.Namespace) -> int:
    """Until SIGTERM or Ctrl-C."""
    args.model = options.named_model(args)
    config = options.read_config(args)
    engine = config.engine if args.seed is None else dataclasses.replace(config.engine, seed=args.seed)
    config = dataclasses.replace(config, engine=engine, server=_server(args, config.server))
    if args.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise ValueError("--wandb needs Weights & Biases: pip install 'dspark[wandb]'")
    from dspark.serve import server

    def ready(address: str, service: Any) -> None:
        info = service.llm.info()
        page = f", live page {address}/" if config.server.page else ""
        print(
            f"dspark serve: {service.names[0]} with draft {info['draft']} (policy {info['policy']}) "
            f"at {address}/v1{page}, metrics {address}/metrics",
            file=sys.stderr,
            flush=True,
        )

        if args.profile is not None:
            stack.enter_context(service.llm.profile(args.profile))
        if args.wandb is not None:
            stack.enter_context(_logged(service, args))
        served.append(service.llm)

    served: list[Any] = []
    with ExitStack() as stack:
        server.run(args.model, config, progress=ProgressBar(), ready=ready)
    if args.save_history is not None:
        served[0].save_history(args.save_history)
    return 0


@contextmanager
def _logged(service: Any, args: argparse.Namespace) -> Iterator[None]:
    from dspark.observe.wandb_sink import ServingRun

    run = ServingRun(service.metrics, project=args.wandb, config=service.llm.info())
    run.start(args.wandb_interval)
    try:
        yield
    finally:
        run.close()


def _server(args: argparse.Namespace, base: ServerConfig) -> ServerConfig:
    names = [field.name for field in dataclasses.fields(ServerConfig)]
    given: dict[str, Any] = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    if "api_key" not in given and not base.api_key and (key := os.environ.get(KEY_VARIABLE)):
        given["api_key"] = [key]
    if (template := given.get("chat_template")) is not None and "{" not in template:
        try:
            given["chat_template"] = Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--chat-template {template!r} cannot be read ({error}): give a file") from None
    given |= {name: tuple(given[name]) for name in _LISTS if name in given}
    return dataclasses.replace(base, **given)
