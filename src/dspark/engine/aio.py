"""AsyncLLM: prompts in, streams of growing answers out, for servers.
It must never block the caller's event loop, and never leave a row running that nobody listens to."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Any

from dspark.config import SpeculationConfig
from dspark.engine.llm import LLM, Group, Message, Prompt
from dspark.params import SamplingParams
from dspark.types import Request, RequestOutput


class EngineStopped(RuntimeError):
    """No further request can be answered."""


MAX_FAILED_STEPS = 3
"""In a row, after which the engine is taken for broken."""


class Mailbox:
    """The newest output of one request, for one reader on an event loop. Outputs hold all of their text so far, so a
    reader that is slow misses nothing of it, and what waits for it does not grow."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.newest: deque[RequestOutput | BaseException] = deque(maxlen=1)
        self.ready = asyncio.Event()
        self.groups: list[Group] = []
        self.interruption: BaseException | None = None

    def put(self, output: RequestOutput | BaseException) -> None:
        """On the engine's thread; `wake` tells the reader."""
        self.newest.append(output)

    def interrupt(self, error: BaseException) -> None:
        """On the event loop: the reader gets `error` next, and the request is given up."""
        self.interruption = error
        self.ready.set()

    async def get(self) -> RequestOutput:
        """On the event loop. Raises what came instead of an output."""
        while self.interruption is None and not self.newest:
            self.ready.clear()
            await self.ready.wait()
        found = self.interruption or self.newest.pop()
        if isinstance(found, BaseException):
            raise found
        return found


def wake(boxes: list[Mailbox]) -> None:
    """Tell the readers of boxes that were filled: once an event loop, since each call has a price."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
    for box in boxes:
        by_loop.setdefault(box.loop, []).append(box)
    for loop, filled in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody listens
            loop.call_soon_threadsafe(_set, filled)


def _set(boxes: list[Mailbox]) -> None:
    for box in boxes:
        box.ready.set()


class AsyncLLM:
    """One engine on a thread of its own. Requests may come from any event loop and any thread.

    Arguments are LLM's. `async for output in llm.generate(prompt, params)` yields the RequestOutput as it grows, the
    last with `finished` True. Leaving the loop early, or cancelling its task, aborts the request before the next step.
    A step that raises ends the answers that ran in it with finish_reason "error"; those that wait go on.
    """

    def __init__(
        self,
        model: str,
        *,
        draft: str | None = None,
        num_speculative_tokens: int | None = None,
        speculative_config: Mapping[str, Any] | SpeculationConfig | None = None,
        **engine: Any,
    ) -> None:
        self._begin(
            LLM(
                model,
                draft=draft,
                num_speculative_tokens=num_speculative_tokens,
                speculative_config=speculative_config,
                **engine,
            )
        )

    @classmethod
    def over(cls, llm: LLM) -> AsyncLLM:
        """Over an LLM that is used by nothing else from now on."""
        self = object.__new__(cls)
        self._begin(llm)
        return self

    def _begin(self, llm: LLM) -> None:
        self.llm = llm
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.boxes: dict[int, tuple[Group, Mailbox]] = {}
        self.failure: BaseException | None = None
        self.num_failed_steps = 0
        # Fast tokenizers refuse to be used by two threads at once.
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="dspark-read")
        self.thread = threading.Thread(target=self._work, name="dspark-engine", daemon=True)
        self.thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests can be answered."""
        return self.failure is None and self.thread.is_alive()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Stream one answer; a smaller `priority` is more urgent.

        Raises ValueError for a request that cannot be done, EngineStopped when the engine has stopped.
        """
        self._check_alive()
        request = await self.make(prompt, params or SamplingParams(), priority=priority, request_id=request_id)
        async for output in self.stream(request):
            yield output

    async def make(
        self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, request_id: str | None = None
    ) -> Request:
        """A checked request for `stream`: what takes long, tokenising and compiling grammars, is done off the engine's
        thread. Raises ValueError for a request that cannot be done."""
        arrival, requests = time.perf_counter(), self.llm.requests
        if params.structure is not None:
            await asyncio.to_thread(requests.prepare, params)
        return await self.read(
            lambda: requests.make(prompt, params, priority=priority, request_id=request_id, arrival=arrival)
        )

    async def stream(self, request: Request, *, box: Mailbox | None = None) -> AsyncGenerator[RequestOutput, None]:
        """The answer to a request of `make`, as it grows; through `box`, where the caller may have to interrupt it."""
        self._check_alive()
        box = box or Mailbox(asyncio.get_running_loop())
        self.inbox.put(lambda: self._start(request, box))
        self._check_alive()  # again: the engine may have stopped since, and then nobody would answer
        finished = False
        try:
            while not finished:
                output = await box.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.inbox.put(lambda: self._abort(box))

    async def chat(
        self, messages: list[Message], params: SamplingParams | None = None, *, priority: int = 0, **template: Any
    ) -> AsyncIterator[RequestOutput]:
        """Stream the answer to a conversation."""
        prompt = await self.read(lambda: self.llm.tokenizer.apply_chat_template(messages, **template))
        async for output in self.generate(prompt, params, priority=priority):
            yield output

    async def read(self, work: Callable[[], Any]) -> Any:
        """Run what needs the tokenizer, off the event loop and off the engine's thread. Raises EngineStopped once the
        engine was closed."""
        try:
            reading = self.reader.submit(work)
        except RuntimeError as error:
            raise EngineStopped("the engine was closed") from error
        return await asyncio.wrap_future(reading)

    def close(self) -> None:
        """Abort what runs and end the thread. Streams still open end with an error."""
        self.inbox.put(None)
        self.thread.join()
        # What is being read may end: to cancel it would look to its caller as if the caller were cancelled.
        self.reader.shutdown(wait=False)

    # -- on the engine's thread

    def _work(self) -> None:
        engine = self.llm.engine
        try:
            while True:
                if not self._drain(block=not engine.has_work):
                    self._fail(RuntimeError("the engine was closed"))
                    return
                if engine.has_work:
                    self._step()
        except BaseException as error:  # the thread's last act: everyone who waits must hear of it
            self._fail(error)

    def _step(self) -> None:
        engine = self.llm.engine
        try:
            grown = engine.step()
            self.num_failed_steps = 0
        except Exception as error:
            self.num_failed_steps += 1
            if self.num_failed_steps == MAX_FAILED_STEPS:
                raise
            engine.recover(error)
            # Those too that had ended in the step before it failed: nobody else will tell of them.
            grown = [seq for group, _ in self.boxes.values() for seq in group.sequences if seq.finish_reason]
        self._deliver([seq.id for seq in grown])

    def _drain(self, *, block: bool) -> bool:
        """Run what others have asked for; False when asked to stop."""
        while True:
            try:
                action = self.inbox.get(block=block)
            except queue.Empty:
                return True
            if action is None:
                return False
            action()
            block = False

    def _start(self, request: Request, box: Mailbox) -> None:
        try:
            group = Group(self.llm, request)
        except Exception as error:  # a request must never stop the engine of the others, whatever is wrong with it
            box.put(error)
            wake([box])
            return
        box.groups.append(group)
        for seq in group.sequences:
            self.boxes[seq.id] = (group, box)

    def _abort(self, box: Mailbox) -> None:
        for group in box.groups:
            for seq in group.sequences:
                self.llm.engine.abort(seq.id)
                self.boxes.pop(seq.id, None)

    def _deliver(self, seq_ids: list[int]) -> None:
        grown = {id(self.boxes[i][0]): self.boxes[i] for i in seq_ids if i in self.boxes}
        for group, box in grown.values():
            group.update()
            box.put(copy(group.output))
            if group.output.finished:
                for seq in group.sequences:
                    self.boxes.pop(seq.id, None)
        wake([box for _, box in grown.values()])

    def _fail(self, error: BaseException) -> None:
        """Tell everyone who waits, those too whose requests came after the last drain."""
        self.failure = error
        while not self.inbox.empty():
            if (action := self.inbox.get()) is not None:
                with contextlib.suppress(Exception):
                    action()
        boxes = [box for _, box in self.boxes.values()]
        for box in boxes:
            box.put(EngineStopped(f"the engine has stopped: {error!r}"))
        wake(boxes)
        for box in boxes:
            with contextlib.suppress(Exception):  # they have been told, whatever else is broken
                self._abort(box)

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineStopped(f"the engine has stopped: {self.failure}; make a new AsyncLLM")
