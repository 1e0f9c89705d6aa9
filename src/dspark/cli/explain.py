"""Explainer: `dspark generate --explain`, one line a step: what was drafted, kept, accepted, and why.
It must never say more than was known when the decision was made."""

from __future__ import annotations

from typing import TextIO

from dspark.types import RowStep

HEAD = (
    "    at  drafter         limit  drafted  verified  accepted  chance that drafts 0..j all hold, | where it was cut"
)


class Explainer:
    """A sink of RowSteps that writes them as a table."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.begun = False

    def __call__(self, step: RowStep) -> None:
        if not self.begun:
            self.begun = True
            kind = f", prompt class {step.seq.prompt_class}" if step.seq.prompt_class else ""
            print(f"policy {step.policy}{kind}", file=self.stream)
            print(" " * len(_name(step)) + HEAD, file=self.stream)
        print(explain(step), file=self.stream)


def explain(step: RowStep) -> str:
    """One line of the table."""
    source = step.source or "-"
    counts = f"{step.limit:5}  {len(step.tokens):7}  {step.verified:8}  {step.accepted:8}"
    return f"{_name(step)}{step.position:6}  {source:14}  {counts}  {_reason(step)}".rstrip()


def _name(step: RowStep) -> str:
    """Which of several answers, numbered as `dspark generate` prints them."""
    return f"[{step.seq.index + 1}] " if step.seq.params.n > 1 else ""


def _reason(step: RowStep) -> str:
    if not step.tokens:
        if step.position == 0:
            return "the prompt's own pass"
        if not step.allowed:
            return "no draft: none is allowed, by the settings or so near the end"
        return "no draft: the policy expects none to pay" if not step.limit else "the drafters had none that pays"
    chances = [f"{alive:.2f}" for alive in step.survival]
    if step.verified < len(chances):
        chances.insert(step.verified, "|")
    return " ".join(chances)
