"""Refusals: what a client is told when it does not get an answer, in OpenAI's shape.
They must never hold a prompt's text, or a traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class Refusal(Exception):
    """`status`: of HTTP. `code`: a word for programs. `param`: the field that is wrong. `retry_after`: seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        # A lone surrogate or a control character of a client's must not make the answer itself unreadable.
        message = self.message.encode("utf-8", "backslashreplace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code or self.status}}

    @property
    def headers(self) -> dict[str, str]:
        """Beside the body."""
        found = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


@contextmanager
def askers_fault() -> Iterator[None]:
    """Where a ValueError says what is wrong with the request, and not with us."""
    try:
        yield
    except ValueError as error:
        raise Refusal(400, str(error), param=getattr(error, "param", None)) from None
