"""History: what past requests have taught, by class of prompt: the part of planning that is saved and loaded.
It must never see a prompt: its class is the caller's word, or found from a sketch, a short list of numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dspark.params import AUTOMATIC_CLASS
from dspark.plan import values as read
from dspark.plan.acceptance import AcceptanceModel
from dspark.plan.classes import PromptClasses
from dspark.plan.gains import KINDS, Gains

FORMAT = "dspark-history-2"


class History:
    """How likely drafts are accepted, what blocks bring, and the classes that prompts are known by."""

    def __init__(self) -> None:
        self.acceptance = AcceptanceModel()
        self.gains = {kind: Gains() for kind in KINDS}
        self.classes = PromptClasses()

    def begin(self, seq_id: int, *, task: str | None = None, sketch: Sequence[float] | None = None) -> str:
        """A request comes in; returns its class: `task` where the caller names one, else that of prompts like it,
        "#0", "#1", ..., else "" where there is no sketch either."""
        prompt_class = task or ""
        if task is None and sketch is not None:
            prompt_class = f"{AUTOMATIC_CLASS}{self.classes.assign(sketch)}"
        self.acceptance.begin(seq_id, prompt_class)
        for gains in self.gains.values():
            gains.begin(seq_id, prompt_class)
        return prompt_class

    def read(self, seq_id: int, text_kind: str) -> None:
        """What the request's answer looks like before its next draft: a name that acceptance is learned by as well."""
        self.acceptance.read(seq_id, text_kind)

    def learn(
        self,
        seq_id: int,
        source: str,
        claims: Sequence[float],
        *,
        num_verified: int,
        num_accepted: int,
        block: str | None = None,
    ) -> None:
        """The end of a step in which the request was allowed drafts: of `claims`, those of all that `source` drafted,
        the first `num_verified` were looked at. `block`: its kind (plan/gains), where the drafter had to be paid for
        the whole of it."""
        counts = {"num_verified": num_verified, "num_accepted": num_accepted}
        if num_verified:
            self.acceptance.update(seq_id, source, claims, **counts)
        else:
            self.acceptance.rest(seq_id)
        if block is not None and claims:
            self.gains[block].update(seq_id, **counts)
        else:
            for gains in self.gains.values():
                gains.rest(seq_id)

    def expected(self, seq_id: int, kind: str) -> tuple[float, float]:
        """Drafts of a block of that kind that will be accepted, and verified, in the request's next step."""
        return self.gains[kind].expected(seq_id)

    def forget(self, seq_id: int) -> None:
        """The request has ended; what it taught stays."""
        self.acceptance.forget(seq_id)
        for gains in self.gains.values():
            gains.forget(seq_id)

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        gains = {kind: found.as_dict() for kind, found in self.gains.items()}
        parts = {"acceptance": self.acceptance.as_dict(), "gains": gains, "classes": self.classes.as_dict()}
        return {"format": FORMAT, **parts}

    @classmethod
    def from_dict(cls, values: Any) -> History:
        """Raises ValueError for what `as_dict` did not make."""
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"there is no {FORMAT} in it")
        history = cls()
        history.acceptance = AcceptanceModel.from_dict(read.table(values, "acceptance"))
        gains = read.table(values, "gains")
        history.gains = {kind: Gains.from_dict(read.table(gains, kind)) for kind in KINDS}
        history.classes = PromptClasses.from_dict(read.table(values, "classes"))
        return history

    def save(self, path: str | Path) -> None:
        """As JSON, whole or not at all. Raises ValueError where the file cannot be written."""
        partial = Path(f"{path}.partial")
        try:
            partial.write_text(json.dumps(self.as_dict()), encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise ValueError(f"cannot write the history {path}: {error.strerror}; give a file in a folder") from None

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Raises ValueError naming the file, cause and cure."""
        try:
            return cls.from_dict(read.parse(Path(path).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ValueError(f"{path}: no such file; save one with LLM.save_history") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: not a history of acceptance: {error}; save one with LLM.save_history") from None
