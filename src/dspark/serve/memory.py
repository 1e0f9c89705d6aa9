"""Memory that large steps leave behind, given back to the system while nothing runs.
It must never free what is in use, or matter where the C library has no such call.

A step with many rows needs some blocks of rows times vocabulary for a moment, and glibc keeps what they leave between
smaller pieces.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

INTERVAL = 30.0
"""Seconds between two looks whether anything runs. Giving back takes 5 to 10 ms."""


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
