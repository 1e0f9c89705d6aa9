"""Service: the engine behind the server: who is let in, what is asked of the engine, and how it ends.
It must never know HTTP, or let more requests in than it has promised to keep.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from dspark.config import ServerConfig
from dspark.engine.aio import AsyncLLM, EngineStopped, Mailbox
from dspark.engine.llm import LLM
from dspark.observe.metrics import EngineMetrics, Gauges
from dspark.params import SamplingParams
from dspark.serve.errors import Refusal, askers_fault
from dspark.serve.memory import Trimming
from dspark.types import Request, RequestOutput

log = logging.getLogger("dspark.serve")

LEAST_RETRY = 1
MOST_RETRY = 60


class Service:
    """One model, served. `config`: limits and names."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.config = config
        self.llm = llm
        self.num_open = 0
        self.names = tuple(config.served_model_name) or (llm.info()["model"],)
        self.style = config.tool_call_parser or tool_style(config.chat_template or llm.tokenizer.chat_template)
        self.metrics = EngineMetrics(self._gauges)
        llm.add_sink(self.metrics.on_step)
        llm.add_row_sink(self.metrics)
        self.engine = AsyncLLM.over(llm)
        self.memory = Trimming(lambda: not self.num_open)
        self.longest_token = llm.tokenizer.longest_token
        self.began = time.monotonic()
        self.created = int(time.time())
        self.draining = False
        self.boxes: set[Mailbox] = set()
        self.warned = False

    # -- the door

    def check_model(self, name: str | None) -> None:
        """Raises Refusal for a model that is not served."""
        if name is not None and name not in self.names:
            raise Refusal(
                404,
                f"the model {name[:200]!r} is not served here: use {self.names[0]!r}",
                code="model_not_found",
                param="model",
            )

    def admit(self, count: int) -> None:
        """Let `count` answers in, or raise Refusal. What is let in must be given to `answers`."""
        if self.draining:
            raise Refusal(503, "the server is shutting down: ask another, or again later", retry_after=LEAST_RETRY)
        if not self.engine.alive:
            raise Refusal(503, f"the engine has stopped ({self.engine.failure}): restart the server")
        places = self.llm.engine_config.max_num_seqs + self.config.max_queue
        if count > places:
            raise Refusal(400, f"{count} answers in one request and the server holds {places}: ask for fewer")
        if self.num_open + count > places:
            raise Refusal(
                429,
                f"{self.num_open} answers are being made or wait, and the server holds {places}: try again later",
                code="queue_full",
                retry_after=self._retry_after(),
            )

    def _retry_after(self) -> int:
        """Seconds after which about a place should be free: the mean time of an answer, over the rows at once."""
        histogram = self.metrics.histograms["request_inference_time_seconds"]
        count = sum(histogram.counts)
        mean = histogram.total / count if count else 1.0
        waiting = max(1, self.num_open - self.llm.engine_config.max_num_seqs)
        return round(min(MOST_RETRY, max(LEAST_RETRY, mean * waiting / self.llm.engine_config.max_num_seqs)))

    # -- answers

    async def chat_ids(self, messages: Sequence[dict[str, Any]], values: dict[str, Any]) -> list[int]:
        """Token ids of a conversation. Raises ValueError where the template refuses it."""
        self._check_length(sum(len(message["content"]) for message in messages if message.get("content")))
        if self.config.chat_template is not None:
            values = values | {"chat_template": self.config.chat_template}
        return await self.engine.read(lambda: self.llm.tokenizer.apply_chat_template(messages, **values))

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises ValueError for one that no context holds."""
        self._check_length(len(text))
        tokenizer = self.llm.tokenizer
        return await self.engine.read(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _check_length(self, num_characters: int) -> None:
        """Before a tokenizer spends half a minute on what cannot fit."""
        most = self.llm.engine.max_context * self.longest_token
        if num_characters > most:
            raise ValueError(
                f"the prompt has {num_characters} characters, and the context of {self.llm.engine.max_context} tokens "
                f"never holds more than {most}: shorten it"
            )

    async def make(
        self, prompts: Sequence[str | list[int]], params: SamplingParams, *, priority: int, request_id: str
    ) -> list[Request]:
        """Checked requests, one a prompt. Raises ValueError for what cannot be done."""
        for prompt in prompts:
            self._check_length(len(prompt))
        many = len(prompts) > 1
        return [
            await self.engine.make(
                prompt, params, priority=priority, request_id=f"{request_id}-{i}" if many else request_id
            )
            for i, prompt in enumerate(prompts)
        ]

    async def answers(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(place of the request, its output so far), as they grow, until all have finished. Ends early with Refusal
        when the server closes or the time for a request is over; then nothing of it runs on."""
        count = sum(request.params.n for request in requests)
        self.admit(count)
        loop, limit = asyncio.get_running_loop(), self.config.request_timeout
        boxes = [Mailbox(loop) for _ in requests]
        timer = None if limit is None else loop.call_later(limit, _interrupt, boxes, _too_long(limit))
        self.num_open += count
        self.boxes.update(boxes)
        try:
            streams = [self.engine.stream(request, box=box) for request, box in zip(requests, boxes)]
            with askers_fault():
                async with aclosing(_merged(streams)) as merged:
                    async for item in merged:
                        yield item
        except EngineStopped as error:
            raise Refusal(503, f"{error}: restart the server") from None
        finally:
            self.num_open -= count
            self.boxes.difference_update(boxes)
            if timer is not None:
                timer.cancel()
            self._warn()

    # -- the end

    async def drain(self, seconds: float, *, hurry: Callable[[], bool] = lambda: False) -> None:
        """Let nothing more in, wait for what runs, and after `seconds`, or when `hurry`, end it with a reason."""
        self.draining = True
        end = time.monotonic() + seconds
        while self.num_open and time.monotonic() < end and not hurry():
            await asyncio.sleep(0.05)
        if self.num_open:
            log.warning("%d answers are cut off: the grace period is over", self.num_open)
        _interrupt(self.boxes, Refusal(503, "the server shut down before the answer was complete", code="shutdown"))

    def close(self) -> None:
        """Stop the engine."""
        self.memory.close()
        self.engine.close()

    # -- what is the case

    def _gauges(self) -> Gauges:
        scheduler, pools = self.llm.engine.scheduler, self.llm.engine.cache.pools
        pages = sum(pool.num_pages for pool in pools)
        free = sum(len(pool.free) for pool in pools)
        return Gauges(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            cache_usage=1 - free / pages if pages else 0.0,
        )

    def _warn(self) -> None:
        """Loudly and once, when speculation is configured and does nothing."""
        if self.llm.speculation.method != "none" and self.metrics.silent and not self.warned:
            self.warned = True
            log.warning(
                "no draft of method %r has held for %d steps: this traffic gains nothing from it (docs/tuning.md); "
                "dspark:spec_decode_silent is 1 while this lasts",
                self.llm.speculation.method,
                self.metrics.counts.silent_steps,
            )


def _interrupt(boxes: Iterable[Mailbox], refusal: Refusal) -> None:
    for box in list(boxes):
        box.interrupt(refusal)


def _too_long(limit: float) -> Refusal:
    return Refusal(504, f"the answer took longer than {limit:g} s, the server's limit", code="timeout")


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Several streams as one, in the order in which their outputs come."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(place: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    await queue.put((place, output))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.ensure_future(pump(place, stream)) for place, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def tool_style(template: str | None) -> str:
    """How a model writes tool calls, told by its chat template."""
    template = template or ""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters": ' in template and "<tool_call>" not in template:
        return "llama3"
    return "hermes"
