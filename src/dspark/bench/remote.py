"""RemoteServer: any server with OpenAI's API, asked over HTTP, and what it tells of its own speculation.
It must never send anything to another machine unless that was allowed, or take a chunk of a stream for a token."""

from __future__ import annotations

import http.client
import ipaddress
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TIMEOUT = 600.0
PREFIXES = {"vllm:": "vllm", "dspark:": "dspark", "sglang:": "sglang", "llamacpp:": "llama.cpp", "tgi_": "tgi"}
ACCEPTED_AT = "spec_decode_num_accepted_tokens_per_pos_total"
SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """One streamed answer. Seconds from its sending: the `times` at which pieces came. `num_tokens` as the server
    counts them, `drafted` and `accepted` where it tells them with the answer (llama.cpp)."""

    times: Sequence[float]
    num_tokens: int
    text: str = ""
    drafted: int = 0
    accepted: int = 0

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first; None for an answer of one."""
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in zip(self.times, self.times[1:])]


@dataclass(frozen=True, kw_only=True)
class Counters:
    """A server's own of speculation, since its start. `drafts`: blocks that were verified, `drafted` their tokens,
    `accepted_at` those that were accepted, by place. `accepted_length`: what SGLang gives instead, tokens a pass
    lately. None: not told."""

    engine: str = ""
    drafts: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    accepted_at: Sequence[float] = ()
    accepted_length: float | None = None

    def since(self, before: Counters) -> Counters:
        """What came since then."""

        def less(now: float | None, then: float | None) -> float | None:
            return None if now is None else max(0.0, now - (then or 0.0))

        then = [*before.accepted_at, *[0.0] * len(self.accepted_at)]
        return Counters(
            engine=self.engine,
            drafts=less(self.drafts, before.drafts),
            drafted=less(self.drafted, before.drafted),
            accepted=less(self.accepted, before.accepted),
            accepted_at=[max(0.0, now - old) for now, old in zip(self.accepted_at, then)],
            accepted_length=self.accepted_length,
        )


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of Prometheus' text format; lines that are none are left out."""
    for line in text.splitlines():
        if line.startswith("#") or (match := SAMPLE.match(line)) is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        yield match[1], dict(LABEL.findall(match[2] or "")), value


def read_counters(text: str) -> Counters:
    """Of a page of metrics, by the names of vLLM (and dspark), SGLang, llama.cpp and TGI; sums over their engines."""
    found: dict[str, list[float]] = {}
    places: dict[int, float] = {}
    engine = ""
    for name, labels, value in samples(text):
        engine = engine or next((known for prefix, known in PREFIXES.items() if name.startswith(prefix)), "")
        if name.endswith(f":{ACCEPTED_AT}") and labels.get("position", "").isdigit():
            place = int(labels["position"])
            places[place] = places.get(place, 0.0) + value
        found.setdefault(name, []).append(value)

    def total(name: str) -> float | None:
        return sum(found[name]) if name in found else None

    lengths = found.get("sglang:spec_accept_length")
    looked_at = "verified" if engine == "dspark" else "draft"  # vLLM looks at all that it drafts
    accepted = f"{engine}:spec_decode_num_accepted_tokens_total"
    return Counters(
        engine=engine,
        drafts=total(f"{engine}:spec_decode_num_drafts_total"),
        drafted=total(f"{engine}:spec_decode_num_{looked_at}_tokens_total"),
        accepted=total("tgi_request_skipped_tokens_sum" if engine == "tgi" else accepted),
        accepted_at=[places[place] for place in sorted(places)],
        accepted_length=max(lengths) if lengths else None,
    )


@dataclass(kw_only=True)
class RemoteServer:
    """`url`: http(s)://host:port, with or without /v1. `key`: sent as a bearer token."""

    url: str
    key: str | None = None
    allow_remote: bool = False
    timeout: float = TIMEOUT
    base: str = field(init=False)

    def __post_init__(self) -> None:
        self.parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        if self.parts.scheme not in ("http", "https") or not self.parts.hostname:
            raise ValueError(f"{self.url!r} is no server's address: give one such as http://127.0.0.1:8000")
        if not self.allow_remote and not is_loopback(self.parts.hostname):
            raise ValueError(
                f"{self.parts.hostname} is another machine, whose owner may not want a benchmark: add --allow-remote"
            )
        self.base = self.parts.path.rstrip("/").removesuffix("/v1")

    def model(self) -> str:
        """The first that it serves. Raises ValueError where it does not answer."""
        listed = json.loads(self._get("/v1/models"))
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{self.url} names no model under /v1/models: give --served-model") from None

    def counters(self) -> Counters:
        """Empty where it shows no metrics."""
        try:
            return read_counters(self._get("/metrics"))
        except ValueError:
            return Counters()

    def stream(
        self, model: str, messages: Sequence[Mapping[str, str]], *, max_tokens: int, temperature: float
    ) -> Streamed:
        """One answer. Raises ValueError with what the server said."""
        body = {"model": model, "messages": [dict(m) for m in messages], "max_tokens": max_tokens, "stream": True}
        body |= {"temperature": temperature, "stream_options": {"include_usage": True}}
        began = time.perf_counter()
        times: list[float] = []
        texts: list[str] = []
        facts: dict[str, Any] = {}
        with self._request("POST", "/v1/chat/completions", json.dumps(body)) as response:
            for event in _events(response):
                choices = event.get("choices") or [{}]
                delta = choices[0].get("delta") or {}
                piece = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
                if piece:
                    times.append(time.perf_counter() - began)
                    texts.append(piece)
                facts |= {key: event[key] for key in ("usage", "timings", "error") if event.get(key)}
        if not times:
            raise ValueError(f"{self.url} gave no text: {facts.get('error', 'an empty answer')}")
        timings = facts.get("timings") or {}
        return Streamed(
            times=times,
            num_tokens=int((facts.get("usage") or {}).get("completion_tokens") or len(times)),
            text="".join(texts),
            drafted=int(timings.get("draft_n") or 0),
            accepted=int(timings.get("draft_n_accepted") or 0),
        )

    def _get(self, path: str) -> str:
        with self._request("GET", path) as response:
            return response.read().decode("utf-8", "replace")

    def _request(self, method: str, path: str, body: str | None = None) -> _Response:
        kind = http.client.HTTPSConnection if self.parts.scheme == "https" else http.client.HTTPConnection
        assert self.parts.hostname is not None
        connection = kind(self.parts.hostname, self.parts.port, timeout=self.timeout)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        try:
            connection.request(method, self.base + path, body, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ValueError(f"{self.url} does not answer ({error}): is the server up?") from None
        if response.status != 200:
            said = response.read(500).decode("utf-8", "replace")
            connection.close()
            raise ValueError(f"{self.url}{path} answered {response.status}: {said}")
        return _Response(connection, response)


class _Response:
    """A response that closes its connection."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self.connection, self.read, self.readline = connection, response.read, response.readline

    def __enter__(self) -> _Response:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def _events(response: _Response) -> Iterator[dict[str, Any]]:
    """Server-sent events that are JSON objects, up to [DONE]."""
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def is_loopback(host: str) -> bool:
    """Whether it is this machine, by its address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
