"""A server with OpenAI's streaming API whose counters and pace are given: as a block in a test, or as a program.
It must never need torch, or anything beyond the standard library."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Script:
    """`pieces` of each answer with so many tokens in all, `pause` seconds before each; `metrics` after n answers."""

    pieces: int = 4
    tokens: int = 12
    pause: float = 0.0
    metrics: Any = staticmethod(lambda answered: "")
    timings: dict[str, int] = field(default_factory=dict)
    status: int = 200
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


def vllm_metrics(*, drafts: int = 4, accepted: tuple[int, ...] = (3, 2, 1), drafted: int = 12) -> Any:
    """Counters that each answer adds to, as vLLM writes them."""

    def page(answered: int) -> str:
        label = 'model_name="a \\"b\\"",engine="0"'
        lines = ["# HELP vllm:spec_decode_num_drafts Number of spec decoding drafts.", "# TYPE x counter"]
        lines.append(f"vllm:spec_decode_num_drafts_total{{{label}}} {float(drafts * answered)}")
        lines.append(f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {float(drafted * answered)}")
        lines.append(f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {float(sum(accepted) * answered)}")
        for place, count in enumerate(accepted):
            name = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}",{label}}}'
            lines.append(f"{name} {float(count * answered)}")
        return "\n".join(lines)

    return page


def make(script: Script, port: int = 0) -> ThreadingHTTPServer:
    """Bound to loopback, not yet serving."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(200, json.dumps({"data": [{"id": "tiny"}]}).encode())
            elif self.path == "/metrics":
                self._send(200, script.metrics(len(script.asked)).encode())
            else:
                self._send(404, b"")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.keys.append(self.headers.get("Authorization"))
            if script.status != 200:
                return self._send(script.status, b'{"error": "no"}')
            self.send_response(200)
            self.end_headers()
            for _ in range(script.pieces):
                time.sleep(script.pause)
                self._event({"choices": [{"delta": {"content": "word "}}]})
            script.asked.append(body)
            last: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": script.tokens}}
            self._event(last | ({"timings": script.timings} if script.timings else {}))
            self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")

        def _event(self, value: Any) -> None:
            self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
            self.wfile.flush()

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return None

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """Its address, while the block runs."""
    server = make(script)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


if __name__ == "__main__":  # PORT K: a server that is quickest with drafts of 4
    length = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    make(Script(pause=0.002 if length == 4 else 0.1, metrics=vllm_metrics()), int(sys.argv[1])).serve_forever()
