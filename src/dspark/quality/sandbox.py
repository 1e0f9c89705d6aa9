"""Sandbox: a program that a model wrote, run in a process of its own with bounds on time, memory and reach.
It must never run such a program in this process, hand it the environment, or wait for it longer than its limit.

What holds it: a new session that is killed as a whole, an own empty folder, no environment, Python's isolated mode,
limits of CPU time, memory, file size and processes, and no network: a network namespace of its own where the system
allows one to an ordinary user (Linux), else sockets that refuse. It is a guard against accidents such as endless loops
and deleted folders, not against a program that attacks the kernel; run it in a container where that matters.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SECONDS = 10.0
MEMORY_BYTES = 2**30
FILE_BYTES = 2**20
MAX_SHOWN = 2000

GUARD = """
import resource, sys
def limit(name, value):
    if hasattr(resource, name):
        resource.setrlimit(getattr(resource, name), (value, value))
limit("RLIMIT_CPU", {cpu})
limit("RLIMIT_AS", {memory})
limit("RLIMIT_FSIZE", {file})
limit("RLIMIT_CORE", 0)
limit("RLIMIT_NPROC", 0)
import _socket, socket
class Refused(socket.socket):
    def __init__(self, *args, **settings):
        raise OSError("there is no network here")
socket.socket = _socket.socket = Refused
source = open("program.py", encoding="utf-8").read()
exec(compile(source, "program.py", "exec"), {{"__name__": "__main__"}})
"""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """`passed`: it came to its end without an error. `reason`: else why not, in a line."""

    passed: bool
    reason: str = ""


def run_program(source: str, *, seconds: float = SECONDS, memory: int = MEMORY_BYTES) -> Ran:
    """Run a Python program to its end. Wall-clock and CPU `seconds`, address space in bytes."""
    with tempfile.TemporaryDirectory(prefix="dspark-verify-") as folder:
        Path(folder, "program.py").write_text(source, encoding="utf-8", errors="replace")
        guard = GUARD.format(cpu=int(seconds) + 1, memory=memory, file=FILE_BYTES)
        command = [*_without_network(), sys.executable, "-I", "-c", guard]
        # An own folder to write into, and nothing of ours to read from: not even PATH.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={"PYTHONHASHSEED": "0", "TMPDIR": folder, "HOME": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            return Ran(passed=False, reason=f"not done after {seconds:g} s")
        finally:
            _kill(process)
    if process.returncode == 0:
        return Ran(passed=True)
    lines = errors.decode(errors="replace")[-MAX_SHOWN:].strip().splitlines()
    return Ran(passed=False, reason=lines[-1][:200] if lines else f"exit code {process.returncode}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """It and whatever it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=5)


@functools.cache
def _without_network() -> tuple[str, ...]:
    """The words before a command that give it a network namespace of its own; none where that is not allowed."""
    program = shutil.which("unshare")
    if program is None:
        return ()
    words = (program, "--user", "--map-current-user", "--net")
    try:
        done = subprocess.run([*words, sys.executable, "-I", "-c", ""], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return words if done.returncode == 0 else ()
