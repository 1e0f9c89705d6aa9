"""The native library: compiled once per machine from csrc by the user's own C++ compiler, then loaded from a cache.
It must never fail a program: without a compiler there is no library, and `reason` says why."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch  # loaded before the library, so that both use the OpenMP runtime that torch brings

from dspark.model.registry import cache_dir

_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC")
_TUNINGS = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
_TIMEOUT = 600


@dataclass(frozen=True, kw_only=True)
class Native:
    """The loaded library, or None and why there is none."""

    library: ctypes.CDLL | None
    reason: str


def library() -> ctypes.CDLL | None:
    """The native library, compiled now if need be (some seconds, once per machine); None when that is impossible.

    Reads $CXX (the compiler; else c++, g++ or clang++), $DSPARK_CACHE, and $DSPARK_NATIVE, where 0 means never.
    """
    return _load_for_environment().library


def reason() -> str:
    """Why `library` is None; empty when it is not."""
    return _load_for_environment().reason


def sources() -> list[Path]:
    """Every file of C++ that the library is made of; decoder.cpp includes the others."""
    folder = Path(__file__).parent / "csrc"
    return sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h"))


def compile_library(target: Path, *, compiler: str, tuning: tuple[str, ...] = ("-march=native",)) -> None:
    """Compile csrc/decoder.cpp into the shared library `target`; all or nothing. Raises ValueError with the compiler's
    own first error."""
    main = Path(__file__).parent / "csrc" / "decoder.cpp"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built, linked = Path(scratch) / "decoder.o", Path(scratch) / target.name
        _run([compiler, *_FLAGS, *tuning, "-c", str(main), "-o", str(built)])
        runtime = _openmp_of_torch()
        _run([compiler, "-shared", str(built), "-o", str(linked), str(runtime) if runtime else "-fopenmp"])
        os.replace(linked, target)


def _load_for_environment() -> Native:
    disabled = os.environ.get("DSPARK_NATIVE", "") == "0"
    return _load(disabled=disabled, compiler=os.environ.get("CXX") or None, folder=cache_dir() / "native")


@functools.cache
def _load(*, disabled: bool, compiler: str | None, folder: Path) -> Native:
    if disabled:
        return Native(library=None, reason="DSPARK_NATIVE=0 turns the native code off")
    found = _find_compiler(compiler)
    if found is None:
        what = f"CXX={compiler} is not found" if compiler else "no C++ compiler (c++, g++, clang++) is found"
        return Native(library=None, reason=what)
    target = folder / f"{_fingerprint(found)}.so"
    errors = []
    for tuning in _TUNINGS:
        try:
            if not target.exists():
                compile_library(target, compiler=found, tuning=tuning)
            return Native(library=ctypes.CDLL(str(target)), reason="")
        except (OSError, ValueError) as error:
            errors.append(str(error))
            target.unlink(missing_ok=True)
    return Native(library=None, reason=f"{found} could not build the native code ({errors[0]})")


def _find_compiler(wanted: str | None) -> str | None:
    for name in (wanted,) if wanted else ("c++", "g++", "clang++"):
        if (path := shutil.which(name)) is not None:
            return path
    return None


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"it took more than {_TIMEOUT} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ValueError(next((line for line in lines if "error" in line), lines[-1] if lines else "no message"))


def _openmp_of_torch() -> Path | None:
    """torch's own GNU OpenMP runtime. Linked by path, the library needs that file's soname, which is loaded already;
    a second runtime would bring a second team of threads that spins against the first."""
    return next(iter(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))), None)


def _fingerprint(compiler: str) -> str:
    """Changes with the sources, the compiler, the flags, the OpenMP runtime and the processor."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    digest.update("\n".join([version, *_FLAGS, str(_openmp_of_torch()), _processor()]).encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
