"""What an import costs: the package and the command line start without the heavy libraries.
It must never measure time: which modules are loaded is what counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dspark

HEAVY = {"torch", "transformers", "numpy", "scipy", "matplotlib", "gguf", "huggingface_hub", "tokenizers"}
PROLOGUE = "import sys, io, contextlib, json\n"
EPILOGUE = "\nsys.__stdout__.write(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
MAIN = "from dspark.cli import main\nwith contextlib.redirect_stdout(io.StringIO()):\n    assert main({argv}) == 0"


def loaded_by(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after running `code`."""
    environment = {**os.environ, "PYTHONPATH": str(Path(dspark.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + code + EPILOGUE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "code",
    [
        "import dspark",
        "from dspark import SamplingParams, SpeculationConfig, EngineConfig, RequestOutput",
        "import dspark.plan.budget",
        MAIN.format(argv=["--help"]),
        MAIN.format(argv=["--version"]),
        MAIN.format(argv=["generate", "--help"]),
        MAIN.format(argv=["bench", "--help"]),
        MAIN.format(argv=["models", "list"]),
    ],
)
def test_no_heavy_import(code: str) -> None:
    assert not loaded_by(code) & HEAVY


def test_the_check_can_fail() -> None:
    assert "numpy" in loaded_by("import numpy")


def test_help_does_not_load_the_commands() -> None:
    code = MAIN.format(argv=["--help"]) + "\nassert not [m for m in sys.modules if m.startswith('dspark.cli.')]"
    assert "dspark" in loaded_by(code)


def test_public_names_are_found() -> None:
    for name in dspark.__all__:
        assert getattr(dspark, name) is not None
    assert set(dspark.__all__) <= set(dir(dspark))
    with pytest.raises(AttributeError, match="Nothing"):
        _ = dspark.Nothing
