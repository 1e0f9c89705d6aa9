"""The command line's page, docs/cli.md, written from the parsers (`make docs`).
It must never say what the parsers do not: a test compares the page with them."""

from __future__ import annotations

import argparse
import sys

from dspark.cli import build_parser

HEADER = """# The command line

Written by `make docs` from the parsers; do not edit. The answer goes to stdout, progress and warnings to stderr.
Exit codes: 0; 1 the command's own "no" (such as a difference that exact mode forbids); 2 a user's error, told in one
line; 130 Ctrl-C.
"""


def reference() -> str:
    """The page as Markdown: a table of arguments for each command."""
    return HEADER + "".join(_command(parser) for parser in _leaves(build_parser()))


def _leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    children = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not children:
        return [parser]
    return [leaf for action in children for child in action.choices.values() for leaf in _leaves(child)]


def _command(parser: argparse.ArgumentParser) -> str:
    positional = [_name(action) for action in parser._actions if not action.option_strings]
    lines = ["", f"## {' '.join([parser.prog, '[options]', *positional])}", ""]
    if parser.description:
        lines += [parser.description, ""]
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS and "--help" not in a.option_strings]
        if not actions:
            continue
        title = group.title or ""
        if title and title not in ("options", "optional arguments", "positional arguments"):
            lines += [f"**{title[0].upper()}{title[1:]}**", ""]
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| {_spelling(action)} | {_meaning(action)} |" for action in actions]
        lines.append("")
    return "\n".join(lines)


def _name(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    return f"[{name}]" if action.nargs in ("?", "*") else name


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return " " + "\\|".join(str(choice) for choice in action.choices)
    return f" {action.metavar if isinstance(action.metavar, str) else action.dest.upper()}"


def _spelling(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{_name(action)}`"
    value = _value(action)
    return ", ".join(f"`{option}`" for option in action.option_strings) + value


def _meaning(action: argparse.Action) -> str:
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%").replace("|", "\\|")
    shown = action.default not in (None, False, argparse.SUPPRESS, []) and "default" not in text
    return f"{text} (default: {action.default})" if shown else text


if __name__ == "__main__":
    sys.stdout.write(reference())
