"""A stand-in for the server behind the live page: the same files and policy, figures and answers from a script.
It must never know more of the page than their contract: addresses, shapes and headers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "src" / "dspark" / "serve" / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class Piece:
    """One token of an answer, as `token_sources` names it."""

    text: str
    source: str | None = "target"
    drafter: str | None = None

    def as_json(self) -> dict[str, str | None]:
        return {"text": self.text, "source": self.source, "drafter": self.drafter}


@dataclass
class PageStub:
    """What the stand-in says next, and what it was asked; tests change the fields while it serves.

    `answer` has the tokens of each chunk; `gate`, where set, is waited for after each chunk; `write_bytes` cuts the
    stream into writes of that many bytes; `refused` counts the faults that it was told to make.
    """

    live: dict[str, Any]
    answer: Iterable[list[Piece]] = ()
    key: str | None = None
    live_status: int = 200
    down: bool = False
    chat_error: tuple[int, str] | None = None
    stream_error: str | None = None
    cut: bool = False
    newline: str = "\n"
    write_bytes: int | None = None
    chunk_seconds: float = 0.0
    gate: threading.Event | None = None
    hung_up: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    refused: int = 0
    url: str = ""

    def bodies(self) -> list[dict[str, Any]]:
        return [body for path, _, body in self.asked if path == "/v1/chat/completions"]

    def polls(self) -> int:
        return sum(path == "/live" for path, _, _ in self.asked)

    def serve(self) -> Iterator[PageStub]:
        """Serves on a free port of this machine until the generator is closed."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": self}))
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    stub: PageStub

    def log_message(self, format: str, *args: Any) -> None:
        """Tests read `asked` instead."""

    def do_GET(self) -> None:
        self.stub.asked.append((self.path, dict(self.headers), None))
        if self.path in FILES:
            name, kind = FILES[self.path]
            self._send(200, (PAGE / name).read_bytes(), kind)
        elif self.path != "/live":
            self._send(404, b"", "text/plain")
        elif self.stub.down:
            self.stub.refused += 1
            self.close_connection = True
        elif self._let_in():
            self.stub.refused += self.stub.live_status != 200
            self._send(self.stub.live_status, json.dumps(self.stub.live).encode(), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.stub.asked.append((self.path, dict(self.headers), body))
        if not self._let_in():
            return
        if self.stub.chat_error is not None:
            self._refuse(*self.stub.chat_error)
            return
        self._head(200, "text/event-stream")
        try:
            self._stream()
        except OSError:
            self.stub.hung_up.set()

    def _stream(self) -> None:
        stub, count = self.stub, 0
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
        for pieces in stub.answer:
            count += len(pieces)
            content = "".join(piece.text for piece in pieces)
            sources = [piece.as_json() for piece in pieces]
            choice = {"index": 0, "delta": {"content": content}, "token_sources": sources, "finish_reason": None}
            self._event({"choices": [choice]})
            if stub.gate is not None:
                stub.gate.wait(20)
            time.sleep(stub.chunk_seconds)
        if stub.stream_error is not None:
            self._event({"error": {"message": stub.stream_error}})
        elif not stub.cut:
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            metrics = {"mean_acceptance_length": 2.1, "draft_acceptance_rate": 0.6}
            usage = {"prompt_tokens": 9, "completion_tokens": count, "total_tokens": 9 + count}
            self._event({"choices": [], "usage": usage, "metrics": {"speculative_decoding": metrics}})
            self._write("data: [DONE]" + 2 * stub.newline)

    def _event(self, chunk: dict[str, Any]) -> None:
        head = {} if "error" in chunk else {"id": "chatcmpl-own", "object": "chat.completion.chunk"}
        text = json.dumps(head | chunk, ensure_ascii=False)
        self._write(f": a comment{self.stub.newline}data: {text}{2 * self.stub.newline}")

    def _write(self, text: str) -> None:
        data = text.encode()
        step = self.stub.write_bytes or len(data)
        for start in range(0, len(data), step):
            self.wfile.write(data[start : start + step])
            self.wfile.flush()
            if self.stub.write_bytes:
                time.sleep(0.0005)

    def _let_in(self) -> bool:
        if self.stub.key is None or self.headers.get("Authorization") == f"Bearer {self.stub.key}":
            return True
        self._refuse(401, "give the API key")
        return False

    def _refuse(self, status: int, message: str) -> None:
        self.stub.refused += 1
        self._send(status, json.dumps({"error": {"message": message}}).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self._head(status, kind, length=len(body))
        self.wfile.write(body)

    def _head(self, status: int, kind: str, *, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()


def idle_live() -> dict[str, Any]:
    """The figures of a server that nobody has asked anything."""
    return {
        "model": "smollm2-135m",
        "version": "0.1.0",
        "uptime_seconds": 12.3,
        "draining": False,
        "speculation": {"method": "auto", "model": None, "policy": "adaptive", "num_speculative_tokens": 8},
        "requests": {"running": 0, "waiting": 0, "max_running": 32},
        "speed": {"tokens_per_second": 0.0, "plain_tokens_per_second": None, "speedup": None},
        "kv_cache_usage": 0.0,
        "totals": dict.fromkeys(("prompt_tokens", "generation_tokens", "drafted", "verified", "accepted", "steps"), 0)
        | {"seconds_saved": None},
        "acceptance": {"by_position": [], "by_class": [], "by_drafter": [], "by_grammar": []},
        "running": [],
    }


def busy_live() -> dict[str, Any]:
    """The figures of a server with three requests running and one waiting."""
    held = [(4210, 3411), (3390, 2508), (2466, 1775), (1741, 1201), (1170, 784), (602, 391), (188, 113), (17, 9)]
    return idle_live() | {
        "uptime_seconds": 8130.0,
        "requests": {"running": 3, "waiting": 1, "max_running": 32},
        "speed": {"tokens_per_second": 412.0, "plain_tokens_per_second": 250.1, "speedup": 1.65},
        "kv_cache_usage": 0.12,
        "totals": {
            "prompt_tokens": 48213,
            "generation_tokens": 191704,
            "drafted": 15120,
            "verified": 13784,
            "accepted": 10192,
            "steps": 4980,
            "seconds_saved": 412.4,
        },
        "acceptance": {
            "by_position": [{"position": i, "verified": n, "accepted": k} for i, (n, k) in enumerate(held)],
            "by_class": [
                _group("chat", steps=2410, verified=4102, accepted=2543),
                _group("code", steps=1730, verified=7120, accepted=5893),
                _group("#3", steps=840, verified=2562, accepted=1756),
            ],
            "by_drafter": [
                _group("suffix", steps=2215, verified=9104, accepted=7239),
                _group("dspark", steps=1930, verified=4680, accepted=2953),
                _group("none", steps=835, verified=0, accepted=0),
            ],
            "by_grammar": [
                _group("none", steps=4312, verified=11230, accepted=8017),
                _group("json_object", steps=668, verified=2554, accepted=2175),
            ],
        },
        "running": [
            _running("chatcmpl-7c1e5a90b2", kind="code", tokens=155, speed=171.3, length=3.42),
            _running("chatcmpl-19f04d77ce", kind="chat", tokens=55, speed=128.0, length=2.1),
            _running("chatcmpl-e2a8b61f03", kind="#3", tokens=12, speed=112.7, length=1.0),
        ],
    }


def _group(name: str, *, steps: int, verified: int, accepted: int) -> dict[str, Any]:
    return {"name": name, "steps": steps, "emitted": steps + accepted, "verified": verified, "accepted": accepted}


def _running(name: str, *, kind: str, tokens: int, speed: float, length: float) -> dict[str, Any]:
    return {
        "id": name,
        "class": kind,
        "seconds": round(tokens / speed, 2),
        "prompt_tokens": 40,
        "tokens": tokens,
        "tokens_per_second": speed,
        "mean_acceptance_length": length,
    }
