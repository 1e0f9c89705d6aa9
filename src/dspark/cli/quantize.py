"""`dspark quantize`: a model's weights in int8 or int4 as a folder, which loads quickly and is never expanded natively.
It must never write into a folder with something in it, nor quantise what is quantised already."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dspark.cli.progress import MIB, ProgressBar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL --to int8|int4 --out FOLDER."""
    parser.add_argument("model", metavar="MODEL", help="a packaged name, a folder, a .gguf file or a hub id")
    parser.add_argument("--to", choices=("int8", "int4"), required=True, help="one scale a row, or one for each group")
    parser.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        help="inputs that share a scale in int4 (default: 32, the most exact)",
    )
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of all else (auto)")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="written whole or not at all; must be empty")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a line")


def run(args: argparse.Namespace) -> int:
    """Load the dense model, quantise it and write the folder; prints what it takes."""
    if args.group_size is not None and args.to != "int4":
        raise ValueError("--group-size is for int4: int8 has one scale a row; leave it out")
    facts = quantize(args)
    if args.json:
        print(json.dumps(facts))
    else:
        before, after = facts["bytes_before"] / MIB, facts["bytes"] / MIB
        print(f"{facts['folder']}  {facts['precision']}  {after:.1f} MiB of weights ({before:.1f} MiB before)")
    return 0


def quantize(args: argparse.Namespace) -> dict[str, Any]:
    """What was written, as facts."""
    from dspark.model.load import load_model, resolve
    from dspark.model.precision import DEFAULT_GROUP, read_settings
    from dspark.model.quantised_folder import check_out, quantised_source, write_quantised

    out, group = Path(args.out).expanduser(), args.group_size or DEFAULT_GROUP
    check_out(out)
    bar = ProgressBar(sys.stderr)
    try:
        source = resolve(args.model, progress=bar)
        if (settings := read_settings(source)) is not None:
            raise ValueError(
                f"{args.model} is quantised already ({settings.get('quant_method')}): quantise the dense model that it "
                "was made from"
            )
        loaded = load_model(args.model, dtype=args.dtype, progress=bar)
        before = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
        record = quantised_source(loaded.name, source, precision=args.to)
        num_bytes = write_quantised(
            loaded.model, source, out, kind=args.to, group_size=group, provenance=record, progress=bar
        )
    finally:
        bar.close()
    facts: dict[str, Any] = {"folder": str(out), "precision": args.to, "bytes": num_bytes, "bytes_before": before}
    return facts | ({"group_size": group} if args.to == "int4" else {})
