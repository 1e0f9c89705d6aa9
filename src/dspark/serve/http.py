"""What every route shares: bodies within limits, streams of events, clients that leave, ids, keys, logs.
It must never log a prompt, an answer or a key, or keep working for a client that has gone.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import sys
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark.observe.metrics import HttpCounts
from dspark.serve.errors import Refusal

log = logging.getLogger("dspark.serve")
T = TypeVar("T")

OPEN = ("/health", "/metrics", "/version", "/openapi.json", "/", "/page/")
"""What needs no key: it shows no request's text and no answer."""
PLAIN_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ClientGone(Exception):
    """Nobody listens any more."""


def dumps(value: Any) -> bytes:
    """JSON as compact as it gets; a number that JSON has no word for is a fault of ours."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


class Json(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


def refused(refusal: Refusal) -> Response:
    """As a response."""
    return Json(refusal.body(), status_code=refusal.status, headers=refusal.headers)


async def read_body(request: Request, *, max_bytes: int, timeout: float) -> bytes:
    """The whole body. Raises Refusal where it is too large, too slow, or not JSON by its own word."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise Refusal(415, f"the body is {kind[:80]!r}: send application/json", code="unsupported_media_type")
    too_large = Refusal(
        413, f"the body has more than {max_bytes} bytes, the server's limit: send less", code="too_large"
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    body = bytearray()

    async def read() -> None:
        async for piece in request.stream():
            body.extend(piece)
            if len(body) > max_bytes:
                raise too_large

    try:
        await asyncio.wait_for(read(), timeout)
    except ClientDisconnect:
        raise ClientGone from None
    except asyncio.TimeoutError:
        raise Refusal(408, f"the body took longer than {timeout:g} s to come: send it at once") from None
    return bytes(body)


async def unless_gone(
    receive: Receive, work: Coroutine[Any, Any, T], *, given_up: Coroutine[Any, Any, None] | None = None
) -> T:
    """What `work` returns; cancels it and raises ClientGone when the client leaves first, or `given_up` ends."""
    task = asyncio.ensure_future(work)
    ends = [asyncio.ensure_future(_disconnect(receive))]
    if given_up is not None:
        ends.append(asyncio.ensure_future(given_up))
    try:
        await asyncio.wait((task, *ends), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, *ends):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await each


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, each a JSON value, [DONE] at the end. An error on the way is an event of its own. `first`
    has been asked for already, so that what is wrong with the request could still become its status. A reader that
    takes nothing for `timeout` seconds has gone."""

    media_type = "text/event-stream"

    def __init__(self, first: Sequence[Any], events: AsyncIterator[Any], *, timeout: float) -> None:
        self.timeout = timeout
        self.sending: float | None = None
        self.first = first
        self.events = events
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await unless_gone(receive, self._send(send), given_up=self._stalled())
        finally:
            if (close := getattr(self.events, "aclose", None)) is not None:
                await close()

    async def _stalled(self) -> None:
        """Ends when a piece has not been taken in time. A timer for each piece would cost more than sending it."""
        while self.sending is None or time.monotonic() - self.sending < self.timeout:
            await asyncio.sleep(self.timeout / 8)

    async def _send(self, send: Send) -> None:
        async def tell(value: bytes) -> None:
            self.sending = time.monotonic()
            await send({"type": "http.response.body", "body": b"data: " + value + b"\n\n", "more_body": True})
            self.sending = None

        try:
            for event in self.first:
                await tell(dumps(event))
            async for event in self.events:
                await tell(dumps(event))
        except Refusal as refusal:
            await tell(dumps(refusal.body()))
        except OSError:
            raise ClientGone from None
        except Exception as error:
            log.exception("a stream failed")
            await tell(dumps(Refusal(500, f"the answer failed: {type(error).__name__}").body()))
        await tell(b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Door:
    """The outermost layer: an id and a log line for each request, the key, and no exception that gets out.

    `keys`: any of which must be sent as a bearer token, unless there are none.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], counts: HttpCounts) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]
        self.counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        scope["dspark"] = told = {"id": given if PLAIN_ID.fullmatch(given) else uuid.uuid4().hex}
        began, status = time.perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", told["id"].encode())]
            await send(message)

        try:
            if self._may_enter(scope, headers):
                await self.app(scope, receive, watched)
            else:
                what = "a wrong API key" if b"authorization" in headers else "no API key"
                refusal = Refusal(401, f"{what}: send 'Authorization: Bearer KEY'", code="invalid_api_key")
                await refused(refusal)(scope, receive, watched)
        except ClientGone:
            told["gone"] = True
        except Exception:
            log.exception("a request failed", extra={"fields": {"id": told["id"]}})
            if not status:
                await refused(Refusal(500, "the server failed on this request; its log says why"))(
                    scope, receive, watched
                )
        finally:
            route = getattr(scope.get("route"), "path", "other")
            code = 499 if told.get("gone") else status
            self.counts.count(route, code)
            fields = {"method": scope["method"], "route": route, "status": code}
            fields["seconds"] = round(time.perf_counter() - began, 4)
            level = logging.DEBUG if route in ("/health", "/metrics", "/live") else logging.INFO
            log.log(level, "request", extra={"fields": told | fields})

    def _may_enter(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")) or "/"
        if not self.keys or scope["method"] == "OPTIONS" or path in OPEN or path.startswith("/page/"):
            return True
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        matches = [hmac.compare_digest(token.strip(), key) for key in self.keys]
        return scheme.lower() == b"bearer" and any(matches)


class LogFormat(logging.Formatter):
    """One line a record, as text or as JSON, with the fields of the request."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        if self.kind == "json":
            values = {"time": when, "level": record.levelname.lower(), "event": message, **fields}
            return json.dumps(values, ensure_ascii=True, default=str)
        told = " ".join(f"{name}={value}" for name, value in fields.items())
        return f"{when} {record.levelname:7} {message}{' ' if told else ''}{told}"


def set_up_logs(kind: str) -> None:
    """The server's own lines, and uvicorn's, on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormat(kind))
    for name, level in (("dspark", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
