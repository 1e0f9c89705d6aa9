"""Memory that the allocator keeps after a large step, given back to the system.
It must never free what is in use, or matter where the C library has no such call.

A step with many rows needs a hundred megabytes for a moment, and glibc keeps what lies between smaller pieces: the
resident memory of a server would creep up with the largest steps that it has seen.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

INTERVAL = 30.0
"""Seconds. A call takes 5 to 10 ms."""


def trimmer() -> Callable[[], None] | None:
    """What gives memory back, where there is such a thing."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return lambda: trim(0)


class Trimming:
    """Gives memory back every INTERVAL seconds, on a thread of its own, until `close`."""

    def __init__(self, *, interval: float = INTERVAL) -> None:
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
        while not self.stopped.wait(self.interval):
            self.trim()
