"""What a distillation needs: memory before anything is loaded, memory and seconds from a trial of its longest step.
It must never learn anything from the trial, nor call a guess a measurement."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HEADROOM = 0.9
"""Of the memory that is free, what may be planned with."""
WEIGHT, LEARNING = 4, 12
"""Bytes of a parameter in float32, and of its gradient and AdamW's two moments where it learns."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """`seconds` for `steps` steps at the pace of the trial; `peak_bytes` that a step takes beside what is there, None
    where the system does not tell."""

    seconds: float
    steps: int
    peak_bytes: int | None

    def text(self) -> str:
        """In one line."""
        memory = "" if self.peak_bytes is None else f"; a step takes {gib(self.peak_bytes)} beside weights and moments"
        return f"{self.steps} steps in about {self.seconds / 60:.1f} min (measured on the longest step){memory}"


def draft_bytes(num_parameters: int, num_learning: int) -> int:
    """Of a draft model that learns: weights, gradients and moments."""
    return WEIGHT * num_parameters + LEARNING * num_learning


def check_memory(need: int, free: int, *, what: str, cure: str) -> None:
    """Raises ValueError, by name, where `need` bytes do not fit."""
    if need > HEADROOM * free:
        raise ValueError(f"{what} needs about {gib(need)} of memory and {gib(free)} are free: {cure}")


def check_disk(need: int, free: int, *, folder: Path) -> None:
    """Raises ValueError where checkpoints and result do not fit."""
    if need > free:
        raise ValueError(
            f"checkpoint and result need about {gib(need)} in {folder} and {gib(free)} are free: free space, or give "
            "another --out"
        )


def quicker_precision(device: str) -> str:
    """ "bf16" or "float32", by the time of a product as training has them. Processors without instructions for bf16
    emulate it, many times slower."""
    import torch

    best: dict[str, float] = {}
    for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = (torch.ones(512, 512, dtype=dtype, device=device) for _ in range(2))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            float((a @ b)[0, 0])  # waits for the device
            times.append(time.perf_counter() - start)
        best[name] = min(times)
    return min(best, key=lambda name: best[name])


def measure(trial: Callable[[], float], *, steps: int) -> Estimate:
    """Two trials, the first of which warms up."""
    with watched_peak() as peak:
        trial()
        seconds = trial()
    return Estimate(seconds=seconds * steps, steps=steps, peak_bytes=peak[0] if peak else None)


@contextlib.contextmanager
def watched_peak() -> Iterator[list[int]]:
    """A list that holds, afterwards, by how much the process grew at most; empty where the system does not tell."""
    found: list[int] = []
    before = _reset_peak()
    yield found
    after = _status("VmHWM")
    if before is not None and after is not None:
        found.append(max(0, after - before))


def _reset_peak() -> int | None:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now (proc(5))
    except OSError:
        return None
    return _status("VmRSS")


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def gib(num_bytes: float) -> str:
    """For people."""
    return f"{num_bytes / 2**30:.2f} GiB"
