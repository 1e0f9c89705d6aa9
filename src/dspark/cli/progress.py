"""Progress: how far a download or a conversion is, on stderr.
It must never write to stdout, nor draw a bar where nobody looks (a file, a log, CI)."""

from __future__ import annotations

import sys
import time
from typing import TextIO

BAR_WIDTH = 28
REDRAW_SECONDS = 0.1
MIB = 1024 * 1024


class ProgressBar:
    """Called as `progress(stage, done, total)`, as dspark.model.registry tells it.

    On a terminal one line is redrawn; elsewhere each stage gets one line when it starts. `total` 0 means unknown.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._stage = ""
        self._drawn_at = 0.0
        self._open = False
        self._complete = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self.close()
            self._stage = stage
            self._drawn_at = 0.0
            self._complete = False
            if not self._is_terminal:
                self._stream.write(f"dspark: {_verb(stage)}{_amount(total)}\n")
                self._stream.flush()
        if self._is_terminal:
            self._draw(stage, done, total)

    def close(self) -> None:
        """End the line that is being drawn, if there is one."""
        if self._open:
            self._stream.write("\n")
            self._stream.flush()
            self._open = False

    def _draw(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        is_last = total > 0 and done >= total
        if self._complete or (not is_last and now - self._drawn_at < REDRAW_SECONDS):
            return
        self._complete = is_last
        self._drawn_at = now
        share = min(done / total, 1.0) if total else 0.0
        filled = round(BAR_WIDTH * share)
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        text = f"{_verb(stage):<22} [{bar}] {100 * share:3.0f}%{_amount(total)}" if total else _verb(stage)
        self._stream.write(f"\r\033[K{text}")
        self._stream.flush()
        self._open = True
        if is_last:
            self.close()


def _verb(stage: str) -> str:
    verbs = {
        "download": "downloading",
        "join": "joining and checking",
        "convert": "converting",
        "wait": "waiting for another process",
    }
    return verbs.get(stage, stage)


def _amount(total: int) -> str:
    """The size, where `total` is plainly a number of bytes and not of steps."""
    return f" {total / MIB:.0f} MiB" if total >= MIB else ""
