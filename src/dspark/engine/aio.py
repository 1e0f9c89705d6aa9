"""AsyncLLM: prompts in, streams of growing answers out, for servers.
It must never block the caller's event loop, and never leave a row running that nobody listens to."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from copy import copy
from typing import Any

from dspark.config import SpeculationConfig
from dspark.engine.llm import LLM, Group, Message, Prompt
from dspark.params import SamplingParams
from dspark.types import RequestOutput

Deliver = Callable[[RequestOutput | BaseException], None]


class AsyncLLM:
    """One engine on a thread of its own. Requests may come from any event loop and any thread.

    Arguments are LLM's. `async for output in llm.generate(prompt, params)` yields the RequestOutput as it grows, the
    last with `finished` True. Leaving the loop early, or cancelling its task, aborts the request before the next step.
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
        self.llm = LLM(
            model,
            draft=draft,
            num_speculative_tokens=num_speculative_tokens,
            speculative_config=speculative_config,
            **engine,
        )
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.groups: dict[int, tuple[Group, Deliver]] = {}
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._work, name="dspark-engine", daemon=True)
        self.thread.start()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Stream one answer; a smaller `priority` is more urgent.

        Raises ValueError for a request that cannot be done, RuntimeError when the engine has stopped.
        """
        self._check_alive()
        params = params or SamplingParams()
        await asyncio.to_thread(self.llm.requests.prepare, params)
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()

        def deliver(output: RequestOutput | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody listens
                loop.call_soon_threadsafe(outputs.put_nowait, output)

        box: list[Group] = []
        self.inbox.put(lambda: self._start(prompt, params, priority, deliver, box))
        self._check_alive()  # again: the engine may have stopped since, and then nobody would answer
        finished = False
        try:
            while not finished:
                output = await outputs.get()
                if isinstance(output, BaseException):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.inbox.put(lambda: self._abort(box))

    async def chat(
        self, messages: list[Message], params: SamplingParams | None = None, *, priority: int = 0, **template: Any
    ) -> AsyncIterator[RequestOutput]:
        """Stream the answer to a conversation."""
        prompt = await asyncio.to_thread(self.llm.tokenizer.apply_chat_template, messages, **template)
        async for output in self.generate(prompt, params, priority=priority):
            yield output

    def close(self) -> None:
        """Abort what runs and end the thread. Streams still open end with an error."""
        self.inbox.put(None)
        self.thread.join()

    # -- on the engine's thread

    def _work(self) -> None:
        engine = self.llm.engine
        try:
            while True:
                if not self._drain(block=not engine.has_work):
                    self._fail(RuntimeError("the engine was closed"))
                    return
                if engine.has_work:
                    self._deliver([seq.id for seq in engine.step()])
        except Exception as error:  # the thread's last act: everyone who waits must hear of it
            self._fail(error)

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

    def _start(self, prompt: Prompt, params: SamplingParams, priority: int, deliver: Deliver, box: list[Group]) -> None:
        try:
            group = Group(self.llm, self.llm.requests.make(prompt, params, priority=priority))
        except Exception as error:  # a request must never stop the engine of the others, whatever is wrong with it
            deliver(error)
            return
        box.append(group)
        for seq in group.sequences:
            self.groups[seq.id] = (group, deliver)

    def _abort(self, box: list[Group]) -> None:
        for group in box:
            for seq in group.sequences:
                self.llm.engine.abort(seq.id)
                self.groups.pop(seq.id, None)

    def _deliver(self, seq_ids: list[int]) -> None:
        for group, deliver in {id(self.groups[i][0]): self.groups[i] for i in seq_ids if i in self.groups}.values():
            group.update()
            deliver(copy(group.output))
            if group.output.finished:
                for seq in group.sequences:
                    self.groups.pop(seq.id, None)

    def _fail(self, error: BaseException) -> None:
        """Tell everyone who waits, those too whose requests came after the last drain."""
        self.failure = error
        while not self.inbox.empty():
            if (action := self.inbox.get()) is not None:
                action()
        for group, deliver in list(self.groups.values()):
            self._abort([group])
            deliver(RuntimeError(f"the engine has stopped: {error}"))

    def _check_alive(self) -> None:
        if self.failure is not None or not self.thread.is_alive():
            raise RuntimeError(f"the engine has stopped: {self.failure}; make a new AsyncLLM")
