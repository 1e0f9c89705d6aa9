"""register: what vLLM calls in each of its processes when dspark is installed beside it (group vllm.general_plugins).
It must never change a vLLM that does not ask for dspark's proposer or scheduler."""

from __future__ import annotations

import logging


def register() -> None:
    """Warn where this vLLM is not one that the proposer is made for. May be called again."""
    from dspark.integrations.vllm.settings import unsupported

    if (trouble := unsupported()) is not None:
        logging.getLogger("vllm.dspark").warning("dspark: %s; the proposer will propose nothing", trouble)
