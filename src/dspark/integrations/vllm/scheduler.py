"""Scheduler: vLLM's own, whose drafts are ours, as the class that vLLM takes as `scheduler_cls`.
It must never change which requests run or what they emit: only what is drafted for them.

Where the Proposer has to guess, this knows: each request by its id, whether it is greedy, what is left of its answer,
how many drafts were looked at, what a step was made of, and when a request has ended. It lives in the engine process,
one for all tensor and pipeline parallel workers, which then draft nothing themselves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler as HostScheduler

from dspark.integrations.vllm.companion import Companion
from dspark.integrations.vllm.guard import Guard
from dspark.integrations.vllm.proposer import LONGEST_STEP, build_companion
from dspark.integrations.vllm.settings import read_settings, unsupported
from dspark.params import SamplingParams


class Scheduler(HostScheduler):
    """vLLM's scheduler with drafts by lookup; its own behaviour without speculative_config, and after a fault."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.dspark_numbers: dict[str, int] = {}
        self.dspark_began: float | None = None
        self.dspark_companion: Companion | None = None
        trouble = unsupported()
        if vllm_config.speculative_config is None:
            trouble = "there is no speculative_config (docs/vllm.md)"
        elif vllm_config.scheduler_config.async_scheduling:
            trouble = "async scheduling drafts in the workers; use method 'custom_class'"
        self.dspark_guard = Guard(trouble)
        if trouble is None:
            self.dspark_companion = build_companion(replace(read_settings(vllm_config), scheduled=True))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self.dspark_began = time.perf_counter()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        took = None if self.dspark_began is None else time.perf_counter() - self.dspark_began
        ran = {key: self.requests.get(key) for key in scheduler_output.num_scheduled_tokens}
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.dspark_guard(lambda: self._dspark_follow(scheduler_output, ran, took), None)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        ours = self.dspark_guard(lambda: self._dspark_draft(draft_token_ids), None)
        super().update_draft_token_ids(draft_token_ids if ours is None else ours)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        finished = super().finish_requests(request_ids, finished_status)
        self.dspark_guard(self._dspark_sweep, None)
        return finished

    def shutdown(self) -> None:
        if (companion := self.dspark_companion) is not None:
            self.dspark_guard(companion.close, None)
        super().shutdown()

    # -- ours

    def _dspark_follow(self, step: Any, ran: Mapping[str, Any], took: float | None) -> None:
        """Tell the companion what the step emitted, how long it took, and who has ended."""
        companion, packed = self.dspark_companion, step.num_scheduled_tokens
        assert companion is not None
        asked = {work.seq.id for work in companion.works}
        decoded = {self.dspark_numbers.get(key) for key in packed}
        for key, request in ran.items():
            if request is None:
                continue
            number = self.dspark_numbers.get(key)
            if number is None and request.num_output_tokens:
                number = self._dspark_begin(request)
            if number is None:
                continue
            known = len(companion.rows[number].answer.tokens)
            if new := list(request.all_token_ids[known:]):
                drafts = step.scheduled_spec_decode_tokens.get(key, ())
                companion.commit(number, new, num_verified=len(drafts))
        if took is not None and took < LONGEST_STEP and asked and asked == decoded:
            companion.time(took, packed=step.total_num_scheduled_tokens)
        for key, request in ran.items():
            if request is not None and request.is_finished():
                self._dspark_end(key, request)

    def _dspark_begin(self, request: Any) -> int:
        """The request has its first token: its prompt is what came before."""
        companion, given = self.dspark_companion, request.sampling_params
        assert companion is not None
        # Of the host's settings only whether it is greedy: all others may be such as ours do not take.
        params = SamplingParams(max_tokens=None, temperature=float(given.temperature > 0))
        prompt = list(request.all_token_ids[: request.num_prompt_tokens])
        number = companion.begin(prompt, request_id=request.request_id, params=params)
        self.dspark_numbers[request.request_id] = number
        return number

    def _dspark_draft(self, draft_token_ids: Any) -> Any:
        """Ours in the place of the worker's drafts, which are none."""
        companion = self.dspark_companion
        assert companion is not None
        drafting, rooms = [], []
        for key in draft_token_ids.req_ids:
            request = self.requests.get(key)
            if key in self.dspark_numbers and request is not None and not request.is_finished():
                drafting.append(key)
                rooms.append(request.max_tokens - request.num_output_tokens)
        found = companion.propose([self.dspark_numbers[key] for key in drafting], rooms=rooms)
        drafts = dict(zip(drafting, found))
        return replace(draft_token_ids, draft_token_ids=[drafts.get(key, []) for key in draft_token_ids.req_ids])

    def _dspark_end(self, key: str, request: Any) -> None:
        if (number := self.dspark_numbers.pop(key, None)) is not None and self.dspark_companion is not None:
            self.dspark_companion.end(number, str(request.get_finished_reason() or "ended"))

    def _dspark_sweep(self) -> None:
        """End what the host has ended otherwise, such as answers that nobody reads any more."""
        for key in [key for key in self.dspark_numbers if key not in self.requests]:
            if self.dspark_companion is not None:
                self.dspark_companion.end(self.dspark_numbers.pop(key))
