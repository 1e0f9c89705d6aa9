"""`dspark export`: a trained head or a draft model in the format of another engine, and the command that serves it.
It must never print anything but the answer on stdout."""

from __future__ import annotations

import argparse
import json
import sys

from dspark.cli.progress import ProgressBar

ENGINES = ("vllm", "sglang", "speculators", "deepspec", "llama.cpp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare every option on `parser`."""
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="a head's folder, or a draft model's name, folder or GGUF file")
    add("--to", required=True, choices=ENGINES, help="the engine, or the format of a head")
    add("--out", required=True, metavar="FOLDER", help="a new folder")
    add(
        "--model",
        metavar="TARGET",
        help="the model that it drafts for, by name or folder: checked, put into the command, and needed for heads "
        "that leave its embeddings out and do not name it",
    )
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the weights (%(default)s)")
    add("--type", choices=("f16", "bf16", "q8_0"), default="f16", help="of a GGUF file's matrices (%(default)s)")
    add("--json", action="store_true", help="what was written, as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write it; the path and the command go to stdout, remarks to stderr."""
    from dspark.integrations.export import export

    bar = ProgressBar()
    try:
        made = export(
            args.checkpoint,
            to=args.to,
            out=args.out,
            target=args.model,
            dtype=args.dtype,
            gguf_type=args.type,
            progress=bar,
        )
    finally:
        bar.close()
    if args.json:
        print(json.dumps(made.as_dict()))
        return 0
    for note in made.notes:
        print(f"dspark: note: {note}", file=sys.stderr)
    print(made.path)
    if made.command:
        print(made.command)
    return 0
