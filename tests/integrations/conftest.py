"""Tests inside other people's engines: `make test-integrations` builds an environment with them.
They must never be collected where the engine is not installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("vllm") else ["test_vllm.py"]
