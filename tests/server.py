"""A real server over loopback on a thread, for tests of what clients see.
It must never outlive the block that started it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from dspark.config import ServerConfig
from dspark.engine.llm import LLM
from dspark.serve.server import Server, address_of, bind, make_server
from dspark.serve.service import Service


@dataclass
class Running:
    """`url` without a path."""

    url: str
    service: Service
    server: Server

    @property
    def client(self) -> openai.OpenAI:
        """OpenAI's own client, which does not try again."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def post(self, path: str, body: Any = None, **settings: Any) -> httpx.Response:
        """A plain request."""
        return httpx.post(self.url + path, **({"json": body} if body is not None else {}), timeout=120, **settings)

    def get(self, path: str, **settings: Any) -> httpx.Response:
        """A plain request."""
        return httpx.get(self.url + path, timeout=30, **settings)

    def settle(self) -> None:
        """Wait until nothing runs, and assert that nothing is left of what ran."""
        engine, end = self.service.llm.engine, time.monotonic() + 60
        while (engine.rows or self.service.num_open) and time.monotonic() < end:
            time.sleep(0.01)
        assert not engine.rows and not engine.scheduler.running and not engine.scheduler.waiting
        assert self.service.num_open == 0 and not self.service.boxes and not self.service.metrics.open
        engine.cache.check()
        assert not engine.cache.sequences


@contextmanager
def serving(llm: LLM, **settings: Any) -> Iterator[Running]:
    """A server of `llm`, which is its own from then on; settings are ServerConfig's."""
    listener = bind("127.0.0.1", 0)
    service = Service(llm, ServerConfig(**settings))
    server = make_server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield Running(address_of(listener), service, server)
    finally:
        server.should_exit = True
        thread.join(60)
        service.close()
        listener.close()
    assert not thread.is_alive(), "the server did not stop"
