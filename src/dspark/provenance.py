"""Provenance: what a figure was measured with: command, code, versions, machine and date.
It must never let a path of the machine or a host's name into a result that may be published."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("dspark", "torch", "transformers", "numpy")


def provenance(argv: Sequence[str], *, config: Mapping[str, Any], threads: int, device: str) -> dict[str, Any]:
    """For the head of a result file. `config` is the resolved one; paths in it and in the command are shortened."""
    return {
        "command": command_line(argv),
        "config": scrub(config),
        "git": git_state(Path(__file__).resolve().parent),
        "versions": {"python": platform.python_version()} | versions(),
        "cpu": cpu_model(),
        "num_cpus": os.cpu_count(),
        "threads": threads,
        "device": device,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "platform": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def command_line(argv: Sequence[str]) -> str:
    """The command as a reader would type it: the program's bare name, absolute paths shortened."""
    words = [Path(argv[0]).name if argv else "dspark", *argv[1:]]
    program = "dspark" if words[0] in ("__main__.py", "cli.py") else words[0]
    return shlex.join([program, *(_shorten_word(word) for word in words[1:])])


def _shorten_word(word: str) -> str:
    head, equals, tail = word.partition("=")
    if equals and head.startswith("-"):
        return f"{head}={_shorten_word(tail)}"
    return ",".join(scrub(part) for part in word.split(","))


def scrub(value: Any) -> Any:
    """The value for JSON, with absolute paths as relative to the working folder or as `.../name`."""
    if isinstance(value, Mapping):
        return {str(key): scrub(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [scrub(entry) for entry in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = str(value)
    if not text.startswith(("/", "~")):
        return text
    path = Path(text)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else f".../{path.name}"


def git_state(folder: Path) -> dict[str, Any] | None:
    """Hash of the commit and whether the working tree differs from it; None outside a repository or without git.

    Files that the benchmark itself writes under benchmarks/results do not count as a difference.
    """
    commit = _git("rev-parse", "HEAD", folder=folder)
    root = _git("rev-parse", "--show-toplevel", folder=folder)
    if not commit or not root:
        return None
    changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results", folder=Path(root))
    return {"commit": commit, "dirty": bool(changed)}


def _git(*words: str, folder: Path) -> str | None:
    try:
        command = ["git", "-C", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions() -> dict[str, str]:
    """Versions of the packages that the figures depend on, those that are installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
