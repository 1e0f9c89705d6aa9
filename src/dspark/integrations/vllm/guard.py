"""Guard: our code inside another's loop, kept from doing it harm.
It must never hide a fault from the log, or call again what has failed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
logger = logging.getLogger("vllm.dspark")
"""Below vLLM's own, whose handlers and level it shares."""


class Guard:
    """Calls what it is given until a call fails; from then on the host goes on as without us, which changes no text."""

    def __init__(self, trouble: str | None = None) -> None:
        """`trouble`: why nothing is to be called at all, which is told."""
        self.broken = trouble is not None
        if trouble is not None:
            logger.warning("dspark proposes nothing: %s", trouble)

    def __call__(self, call: Callable[[], Value], otherwise: Value) -> Value:
        """The call's answer, or `otherwise` where one has failed."""
        if self.broken:
            return otherwise
        try:
            return call()
        except Exception:  # whatever is wrong with ours must not end the host's requests
            self.broken = True
            logger.exception("dspark failed and proposes nothing from now on; answers go on without drafts")
            return otherwise
