"""Resident memory that does not creep: what large steps need is taken at the start, and given back when nothing runs.
It must never free what is in use, or matter where the C library has no such call.

A step with many rows needs some blocks of rows times vocabulary for a moment. glibc keeps what they leave between
smaller pieces, so that a server would grow each time that a step is larger than all before it, for days.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch

INTERVAL = 30.0
"""Seconds between two looks whether anything runs. Giving back takes 5 to 10 ms."""
NUM_BLOCKS = 4
"""Of logits at a time: the target's, a head's, and a copy of each."""
LARGEST_WARMING = 2**30


def warm(rows: int, vocab_size: int) -> None:
    """Have the allocator take what the largest step will, on a CPU. `rows`: of logits in it."""
    num_bytes = min(rows * vocab_size * 4, LARGEST_WARMING // NUM_BLOCKS)
    # All at a time, and touched: only so do they lie beside one another as a step's do.
    blocks = [torch.ones(num_bytes, dtype=torch.uint8) for _ in range(NUM_BLOCKS)]
    del blocks


def trimmer() -> Callable[[], None] | None:
    """What gives memory back, where there is such a thing."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return lambda: trim(0)


class Trimming:
    """Gives memory back while `idle`, on a thread of its own, until `close`."""

    def __init__(self, idle: Callable[[], bool], *, interval: float = INTERVAL) -> None:
        self.idle = idle
        self.interval = interval
        self.stopped = threading.Event()
        self.trim = trimmer()
        self.thread = threading.Thread(target=self._work, name="dspark-memory", daemon=True)
        if self.trim is not None:
            self.thread.start()

    def close(self) -> None:
        """No further call."""
        self.stopped.set()

    def _work(self) -> None:
        assert self.trim is not None
        busy = True
        while not self.stopped.wait(self.interval):
            if self.idle() and busy:
                self.trim()
            busy = not self.idle()
