"""What serving costs, against the same engine asked in Python: tokens/s of streams, and the time to a first token.

    python benchmarks/serving.py cost smollm2-135m --draft auto --data FOLDER --clients 8 --repeat 5
    python benchmarks/serving.py soak smollm2-135m --data FOLDER --minutes 15 --clients 16

`cost`: both sides take turns over the same prompts in one process; clients of the server run in a process of their own,
as they would, and share this machine's cores with it. Time to the first token of an idle server: client's clock.

`soak`: a server under mixed load, with clients that leave, bad requests and grammars. Fails on any error that was not
asked for, on an answer that differs from the one given alone, on anything left in the cache, and on memory that grows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from dspark import LLM, SamplingParams
from dspark.bench.data import encode_rows, interleave, load_rows
from dspark.config import Config, EngineConfig, ServerConfig, SpeculationConfig
from dspark.provenance import provenance
from dspark.serve.server import address_of, bind, make_server, run
from dspark.serve.service import Service

LARGEST_GROWTH = 0.03
FIRST_PROMPTS = 20  # whose first tokens are timed in each repetition
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def main(argv: Sequence[str] | None = None) -> int:
    """1 where a soak fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "soak"))
    parser.add_argument("model")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--data", required=True, action="append")
    parser.add_argument("--per-task", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--cache-gib", type=float, default=0.25, help="that the first minutes fill")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    found = cost(args) if args.what == "cost" else soak(args)
    found["provenance"] = provenance(
        sys.argv, config=vars(args) | {"out": None}, threads=os.cpu_count() or 1, device="cpu"
    )
    text = json.dumps(found, default=str)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 1 if found.get("failures") else 0


# -- cost


def cost(args: argparse.Namespace) -> dict[str, Any]:
    """Medians, with all that was measured."""
    llm = LLM(args.model, draft=args.draft, max_num_seqs=args.clients, prefix_reuse=False)
    rows = interleave(load_rows(args.data, per_task=args.per_task))
    prompts = encode_rows(rows, llm.tokenizer)
    listener = bind("127.0.0.1", 0)
    service = Service(llm, ServerConfig())
    server = make_server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = address_of(listener)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    client = context.Process(target=_client, args=(theirs, url, args.clients, args.max_tokens), daemon=True)
    client.start()
    speeds: dict[str, list[float]] = {"python": [], "http": []}
    firsts: list[tuple[float, float]] = []  # by Python and by HTTP, of one prompt
    for repetition in range(args.repeat + 1):
        for side in ("python", "http") if repetition % 2 else ("http", "python"):
            if side == "python":
                tokens, seconds = asyncio.run(_in_python(service, prompts, args.clients, args.max_tokens))
            else:
                pipe.send(("speed", prompts))
                tokens, seconds = pipe.recv()
            if repetition:  # the first warms up
                speeds[side].append(tokens / seconds)
            print(f"{side}: {tokens / seconds:.1f} tokens/s", file=sys.stderr)
        found = _firsts(service, pipe, prompts[:FIRST_PROMPTS])
        firsts += found if repetition else []
        print(f"first token: {1e3 * _late(found):+.2f} ms by HTTP, median of {len(found)} pairs", file=sys.stderr)
    pipe.send(None)
    client.join()
    server.should_exit = True
    thread.join()
    service.close()
    ratios = [http / python for http, python in zip(speeds["http"], speeds["python"])]
    return {
        "tokens_per_second": speeds,
        "http_over_python": {"median": statistics.median(ratios), "all": ratios},
        "first_token_ms": {
            "python": 1e3 * statistics.median(python for python, _ in firsts),
            "http": 1e3 * statistics.median(http for _, http in firsts),
            "http_later": {"median": 1e3 * _late(firsts), "all": [1e3 * (http - python) for python, http in firsts]},
        },
    }


def _firsts(service: Service, pipe: Any, prompts: Sequence[list[int]]) -> list[tuple[float, float]]:
    """Seconds to the first token of each prompt by Python and by HTTP, one straight after the other and every other
    pair in the other order: a prompt's time wanders by more than what is looked for."""
    found = []
    for i, prompt in enumerate(prompts):
        seconds = {}
        for side in ("python", "http") if i % 2 else ("http", "python"):
            if side == "python":
                seconds[side] = asyncio.run(_first_in_python(service, prompt))
            else:
                pipe.send(("first", [prompt]))
                seconds[side] = pipe.recv()
        found.append((seconds["python"], seconds["http"]))
    return found


def _late(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(http - python for python, http in pairs)


async def _in_python(
    service: Service, prompts: Sequence[list[int]], clients: int, max_tokens: int
) -> tuple[int, float]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    left, tokens, start = iter(prompts), 0, time.perf_counter()

    async def ask() -> None:
        nonlocal tokens
        for prompt in left:
            async for output in service.engine.generate(prompt, params):
                last = output
            tokens += len(last.outputs[0].token_ids)

    await asyncio.gather(*(ask() for _ in range(clients)))
    return tokens, time.perf_counter() - start


async def _first_in_python(service: Service, prompt: list[int]) -> float:
    start, first = time.perf_counter(), None
    async for _ in service.engine.generate(prompt, SamplingParams(temperature=0, max_tokens=1)):
        first = first or time.perf_counter() - start  # the end of the answer comes after it
    assert first is not None
    return first


def _client(pipe: Any, url: str, clients: int, max_tokens: int) -> None:
    """In a process of its own."""
    while (asked := pipe.recv()) is not None:
        what, prompts = asked
        pipe.send(
            asyncio.run(
                _over_http(url, prompts, clients, max_tokens) if what == "speed" else _first_http(url, prompts[0])
            )
        )


async def _over_http(url: str, prompts: Sequence[list[int]], clients: int, max_tokens: int) -> tuple[int, float]:
    left, tokens, start = iter(prompts), 0, time.perf_counter()

    async def ask() -> None:
        nonlocal tokens
        for prompt in left:
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
            last = await Stream.ask(url, body | {"stream_options": {"include_usage": True}})
            usage = last[last.rindex(b"data: {") + 6 : last.rindex(b"data: [DONE]")]
            tokens += json.loads(usage[: usage.rindex(b"}") + 1])["usage"]["completion_tokens"]

    await asyncio.gather(*(ask() for _ in range(clients)))
    return tokens, time.perf_counter() - start


async def _first_http(url: str, prompt: list[int]) -> float:
    start = time.perf_counter()
    await Stream.ask(url, {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}, until=b"data: {")
    return time.perf_counter() - start


class Stream(asyncio.Protocol):
    """A stream's answer, read with as little work as can be: clients share this machine's cores with the server, and
    what is measured is the server. Keeps the last 4 KiB."""

    def __init__(self, request: bytes, until: bytes) -> None:
        self.request = request
        self.until = until
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.last = b""

    @classmethod
    async def ask(cls, url: str, body: Any, *, until: bytes = b"data: [DONE]") -> bytes:
        """The end of what has come when `until` has."""
        host, port = url.removeprefix("http://").split(":")
        text = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        request = head + b"Content-Length: %d\r\n\r\n" % len(text) + text
        loop = asyncio.get_running_loop()
        transport, stream = await loop.create_connection(lambda: cls(request, until), host, int(port))
        try:
            return await stream.done
        finally:
            transport.close()

    def connection_made(self, transport: Any) -> None:
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.last = (self.last + data)[-4096:]
        if not self.done.done() and self.until in self.last:
            self.done.set_result(self.last)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError(self.last.decode("utf-8", "replace")))


# -- soak


@dataclass
class Tally:
    """What happened to requests, and what should not have."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Counts, failures and memory by minute."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=_serve, args=(theirs, args.model, args.draft, args.clients, args.cache_gib))
    child.start()
    url = pipe.recv()
    tally = Tally()
    rows = interleave(load_rows(args.data, per_task=args.per_task))
    texts = [row.messages for row in rows]
    asyncio.run(_soak(url, texts, args, tally, child.pid or 0))
    os.kill(child.pid or 0, signal.SIGTERM)
    left = pipe.recv() if pipe.poll(120) else {"left": "the server did not end"}
    child.join(60)
    if left != {"rows": 0, "sequences": 0, "boxes": 0} or child.exitcode != 0:
        tally.failures.append(f"left behind: {left}, exit {child.exitcode}")
    # Until then the cache, and the store of finished answers that lookups draft from, fill for the first time.
    warm = [mib for minute, mib in tally.memory if minute >= min(5.0, args.minutes / 3)]
    growth = statistics.median(warm[-10:]) / statistics.median(warm[:10]) - 1
    if growth > LARGEST_GROWTH:
        tally.failures.append(f"memory grew by {growth:.1%}")
    return {
        "counts": dict(tally.counts),
        "failures": tally.failures[:50],
        "memory_growth": growth,
        "memory_mib": [round(mib) for _, mib in tally.memory[:: max(1, len(tally.memory) // 30)]],
    }


def _serve(pipe: Any, model: str, draft: str, clients: int, cache_gib: float) -> None:
    """The server, which tells what is left in it at the end."""
    config = Config(
        engine=EngineConfig(exact=True, max_num_seqs=clients, max_model_len=2048, cache_gib=cache_gib),
        speculation=SpeculationConfig(method=draft),
        server=ServerConfig(port=0, log_format="json"),
    )
    kept: list[Service] = []
    sys.stderr = open(os.devnull, "w")

    def ready(address: str, service: Service) -> None:
        kept.append(service)
        pipe.send(address)

    run(model, config, ready=ready)
    engine = kept[0].llm.engine
    engine.cache.check()
    pipe.send({"rows": len(engine.rows), "sequences": len(engine.cache.sequences), "boxes": len(kept[0].boxes)})


async def _soak(url: str, chats: Sequence[Any], args: argparse.Namespace, tally: Tally, pid: int) -> None:
    rng = random.Random(0)
    limits = httpx.Limits(max_connections=args.clients + 4)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        asks = [_ask(chat, kind, args.max_tokens) for chat in chats for kind in ("free", "json", "schema", "regex")]
        truth = []
        for ask in asks:
            response = await client.post("/v1/chat/completions", json=ask)
            truth.append(response.json()["choices"][0]["message"]["content"])
        end, start = time.monotonic() + 60 * args.minutes, time.monotonic()
        tasks = [_worker(client, rng, asks, truth, end, tally) for _ in range(args.clients)]
        watch = asyncio.create_task(_watch(pid, start, tally))
        await asyncio.gather(*tasks)
        watch.cancel()


def _ask(messages: Any, kind: str, max_tokens: int) -> dict[str, Any]:
    shapes: dict[str, Any] = {
        "free": {},
        "json": {"response_format": {"type": "json_object"}},
        "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        "regex": {"guided_regex": r"(yes|no), because [a-z ]{5,60}\."},
    }
    return {"messages": messages, "temperature": 0, "max_tokens": max_tokens, **shapes[kind]}


async def _worker(
    client: httpx.AsyncClient, rng: random.Random, asks: Sequence[Any], truth: Sequence[str], end: float, tally: Tally
) -> None:
    while time.monotonic() < end:
        place, dice = rng.randrange(len(asks)), rng.random()
        ask = asks[place]
        try:
            if dice < 0.2:
                await _leave(client, ask, rng)
                tally.counts["left"] += 1
            elif dice < 0.3:
                bad = rng.choice(
                    [
                        {"colour": 1},
                        {"temperature": -1},
                        {"n": 9999},
                        {"guided_regex": "("},
                        {"messages": []},
                        {"stop": [""]},
                    ]
                )
                response = await client.post("/v1/chat/completions", json=ask | bad)
                tally.counts[f"bad {response.status_code}"] += 1
                if response.status_code != 400:
                    tally.failures.append(f"{bad}: {response.status_code}")
            else:
                text = await _text(client, ask, stream=dice < 0.7)
                tally.counts["answered"] += 1
                if text != truth[place]:
                    tally.failures.append(f"another answer: {text[:80]!r} for {truth[place][:80]!r}")
        except Exception as error:
            tally.failures.append(f"{type(error).__name__}: {error}")


async def _leave(client: httpx.AsyncClient, ask: dict[str, Any], rng: random.Random) -> None:
    """Ask, and go away at some time."""
    if rng.random() < 0.5:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=ask))
        await asyncio.sleep(rng.random())
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return
    async with client.stream("POST", "/v1/chat/completions", json=ask | {"stream": True}) as response:
        left = rng.randrange(8)
        async for _ in response.aiter_lines():
            left -= 1
            if left < 0:
                return


async def _text(client: httpx.AsyncClient, ask: dict[str, Any], *, stream: bool) -> str:
    if not stream:
        response = await client.post("/v1/chat/completions", json=ask)
        assert response.status_code == 200, response.text[:300]
        return response.json()["choices"][0]["message"]["content"]
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=ask | {"stream": True}) as response:
        assert response.status_code == 200, response.status_code
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["delta"].get("content", "")
    return text


async def _watch(pid: int, start: float, tally: Tally) -> None:
    """Resident memory of the server, every five seconds."""
    while True:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        tally.memory.append(((time.monotonic() - start) / 60, pages * os.sysconf("SC_PAGE_SIZE") / 2**20))
        await asyncio.sleep(5)


if __name__ == "__main__":
    raise SystemExit(main())
