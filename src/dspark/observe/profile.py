"""ProfileLog: a sink that writes for every answer what was drafted at each step and how much of it held.
It must never decide anything, or lose an answer that was begun."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.types import RowStep, Sequence

FORMAT = "dspark-profile-2"


class ProfileLog:
    """RowSteps -> JSON lines: a first line with `header`, then one object an answer, written when it has ended.

    An answer's `steps` have `at` (tokens of the answer before the step), the kind of text there, who drafted, the
    policy's `limit`, the survival `claims` of the draft, how many of its tokens the text confirms (`holds`, of those
    within the answer), how many were `verified` and `accepted`, and the rows of the pass (`packed`). `seconds`: first
    token to last.
    """

    def __init__(self, path: str | Path, *, header: Mapping[str, Any]) -> None:
        try:
            self.file = Path(path).open("w", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write the profile {path}: {error.strerror}; give a file in a folder") from None
        self.open: dict[int, tuple[Sequence, list[RowStep]]] = {}
        self._write({"format": FORMAT, **header})

    def __call__(self, step: RowStep) -> None:
        _, steps = self.open.setdefault(step.seq.id, (step.seq, []))
        steps.append(step)
        if step.seq.finish_reason is not None:
            self._answer(*self.open.pop(step.seq.id))

    def aborted(self, seq: Sequence) -> None:
        """The engine calls this for a sequence that it will not go on with; one that had no step yet is none here."""
        if (begun := self.open.pop(seq.id, None)) is not None:
            self._answer(*begun)

    def close(self) -> None:
        """Write what has not ended, with the reason that it stands at, and close the file."""
        for seq, steps in self.open.values():
            self._answer(seq, steps)
        self.open.clear()
        self.file.close()

    def _answer(self, seq: Sequence, steps: list[RowStep]) -> None:
        first, last = seq.first_token_time, seq.finish_time
        self._write(
            {
                "id": seq.request.id,
                "index": seq.index,
                "task": seq.params.control.task or "",
                "prompt_class": seq.prompt_class,
                "policy": steps[0].policy,
                "temperature": seq.params.temperature,
                "num_prompt": seq.num_prompt,
                "num_tokens": seq.num_output,
                "finish_reason": seq.finish_reason,
                "seconds": None if first is None or last is None else round(last - first, 6),
                "steps": [_step(step, seq.output_token_ids) for step in steps],
            }
        )

    def _write(self, value: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(value) + "\n")
        self.file.flush()  # what was recorded outlives a crash


def _step(step: RowStep, text: list[int]) -> dict[str, Any]:
    holds = 0
    for token, truth in zip(step.tokens, text[step.position :]):
        if token != truth:
            break
        holds += 1
    return {
        "at": step.position,
        "text_kind": step.text_kind,
        "source": step.source,
        "limit": step.limit,
        "claims": [round(claim, 4) for claim in step.claims],
        "holds": holds,
        "verified": step.verified,
        "accepted": step.accepted,
        "packed": step.packed,
    }
