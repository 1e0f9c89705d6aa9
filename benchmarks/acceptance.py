"""How well acceptance is foretold: dspark's model beside a global logistic regression and a moving average.

    python benchmarks/acceptance.py PROFILE... --out benchmarks/results

Each PROFILE is a record of `dspark profile` (policy "shadow"). Its answers are gone through in their order, step by
step as with fixed drafts that are all verified; before each verdict every predictor says how likely each draft holds,
given that those before it did, and after it learns. Only drafts that were reached count. "Held-out" figures are over
every second task, after learning on the others. It must never let a predictor see a verdict before it has spoken.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dspark.bench.profile import group_of, read_profile
from dspark.plan.acceptance import FIRST_SQUARES, RATE, AcceptanceModel, logistic, logit
from dspark.plan.replay import Answer, Chance
from dspark.provenance import provenance

AVERAGE_RATE = 0.02
LEAST = 1e-3
CURVE = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class Event:
    """A verified draft of one request."""

    request: int
    task: str
    source: str
    claims: Sequence[float]
    holds: int
    text_kind: str

    @property
    def conditional(self) -> list[float]:
        """Claims of each draft given that those before it hold."""
        before = [1.0, *self.claims[:-1]]
        return [claim / b if b > 0 else 0.0 for claim, b in zip(self.claims, before)]

    @property
    def num_reached(self) -> int:
        return min(len(self.claims), self.holds + 1)


class Predictor(Protocol):
    """Speaks, then learns."""

    def predict(self, event: Event) -> Sequence[float]: ...

    def learn(self, event: Event) -> None: ...


class Claim:
    """The drafter's own word."""

    def predict(self, event: Event) -> Sequence[float]:
        return event.conditional

    def learn(self, event: Event) -> None:
        return None


@dataclass
class MovingAverage:
    """One running share of accepted drafts a drafter; at one stream there is one batch size."""

    share: dict[str, float] = field(default_factory=dict)

    def predict(self, event: Event) -> Sequence[float]:
        return [self.share.get(event.source, 0.6)] * len(event.claims)

    def learn(self, event: Event) -> None:
        for j in range(event.num_reached):
            share = self.share.get(event.source, 0.6)
            self.share[event.source] = share + AVERAGE_RATE * ((j < event.holds) - share)


@dataclass
class GlobalLogistic:
    """Logistic regression on the claim's logit and the position, one for all requests of a drafter; it starts at the
    claim itself and learns online with the same steps as dspark's model."""

    weights: dict[str, list[float]] = field(default_factory=dict)
    squares: dict[str, list[float]] = field(default_factory=dict)

    def predict(self, event: Event) -> Sequence[float]:
        weights = self.weights.setdefault(event.source, [0.0, 1.0, 0.0])
        rows = self._rows(event)
        return [logistic(sum(w * x for w, x in zip(weights, row))) for row in rows]

    def learn(self, event: Event) -> None:
        said = self.predict(event)
        weights = self.weights[event.source]
        squares = self.squares.setdefault(event.source, [FIRST_SQUARES] * 3)
        for j, row in enumerate(self._rows(event)[: event.num_reached]):
            for i, x in enumerate(row):
                gradient = ((j < event.holds) - said[j]) * x
                squares[i] += gradient * gradient
                weights[i] += RATE * gradient / math.sqrt(squares[i])

    @staticmethod
    def _rows(event: Event) -> list[tuple[float, float, float]]:
        return [(1.0, logit(claim), j / 8) for j, claim in enumerate(event.conditional)]


@dataclass
class Hierarchical:
    """dspark's model, with the class of the prompt or without."""

    by_class: bool
    by_kind: bool = True
    blind: bool = False
    model: AcceptanceModel = field(default_factory=AcceptanceModel)
    begun: int = -1

    def predict(self, event: Event) -> Sequence[float]:
        if event.request != self.begun:
            self.model.forget(self.begun)
            self.begun = event.request
            self.model.begin(event.request, event.task if self.by_class else "")
        self.model.read(event.request, event.text_kind if self.by_kind else "")
        if self.blind:
            survival = self.model.foresee(event.request, event.source, len(event.claims))
        else:
            survival = self.model.survival(event.request, event.source, event.claims)
        before = [1.0, *survival[:-1]]
        return [alive / b if b > 0 else 0.0 for alive, b in zip(survival, before)]

    def learn(self, event: Event) -> None:
        counts = {"num_verified": len(event.claims), "num_accepted": event.holds}
        self.model.update(event.request, event.source, event.claims, **counts)


def predictors() -> dict[str, Predictor]:
    return {
        "the drafter's claim": Claim(),
        "moving average": MovingAverage(),
        "global logistic": GlobalLogistic(),
        "dspark, no class": Hierarchical(by_class=False),
        "dspark, no kind of text": Hierarchical(by_class=True, by_kind=False),
        "dspark, before drafting, no kind of text": Hierarchical(by_class=True, by_kind=False, blind=True),
        "dspark": Hierarchical(by_class=True),
        "dspark, before drafting": Hierarchical(by_class=True, blind=True),
    }


def events(answers: Sequence[Answer]) -> Iterator[Event]:
    """Steps of fixed drafts that are all verified."""
    for number, answer in enumerate(answers):
        table: list[Chance | None] = answer.by_position()
        position = 1
        while position < answer.num_tokens:
            chance = table[position]
            if chance is None or not chance.claims:
                position += 1
                continue
            yield Event(
                request=number,
                task=group_of(answer),
                source=chance.source,
                claims=chance.claims,
                holds=min(chance.holds, len(chance.claims)),
                text_kind=chance.text_kind,
            )
            position += 1 + chance.holds


@dataclass
class Score:
    """Sums over reached drafts."""

    loss: float = 0.0
    brier: float = 0.0
    count: int = 0

    def add(self, said: float, held: bool) -> None:
        said = min(1 - LEAST, max(LEAST, said))
        self.loss -= math.log(said if held else 1 - said)
        self.brier += (said - held) ** 2
        self.count += 1

    def means(self) -> tuple[float, float]:
        return self.loss / max(self.count, 1), self.brier / max(self.count, 1)


def measure(answers: Sequence[Answer]) -> tuple[dict[str, Score], dict[str, dict[int, Score]]]:
    """Scores of all predictors on the held-out tasks, and by number of requests seen over all tasks in their order."""
    tasks = list(dict.fromkeys(group_of(answer) for answer in answers))
    first = set(tasks[::2])
    ordered = [a for a in answers if group_of(a) in first] + [a for a in answers if group_of(a) not in first]
    held_out = {name: Score() for name in predictors()}
    for name, predictor in predictors().items():
        for event in events(ordered):
            said = predictor.predict(event)
            if event.task not in first:
                for j in range(event.num_reached):
                    held_out[name].add(said[j], j < event.holds)
            predictor.learn(event)
    curve: dict[str, dict[int, Score]] = {name: {} for name in predictors()}
    for name, predictor in predictors().items():
        for event in events(answers):
            said = predictor.predict(event)
            bin_end = next((end for end in CURVE if event.request < end), CURVE[-1])
            score = curve[name].setdefault(bin_end, Score())
            for j in range(event.num_reached):
                score.add(said[j], j < event.holds)
            predictor.learn(event)
    return held_out, curve


def page(path: str, held_out: dict[str, Score], curve: dict[str, dict[int, Score]]) -> str:
    """Markdown: held-out figures, then log-loss by requests seen."""
    ends = sorted({end for scores in curve.values() for end in scores})
    count = next(iter(held_out.values())).count
    lines = [f"## {Path(path).stem}", "", f"Held-out tasks, {count} drafts:", ""]
    lines += ["| predictor | log-loss | Brier score |", "|---|---|---|"]
    lines += [f"| {name} | {score.means()[0]:.4f} | {score.means()[1]:.4f} |" for name, score in held_out.items()]
    lines += ["", "Log-loss by requests seen before (all tasks, in their order):", ""]
    lines += ["| predictor | " + " | ".join(f"< {end}" for end in ends) + " |", "|---" * (len(ends) + 1) + "|"]
    for name, scores in curve.items():
        cells = [f"{scores[end].means()[0]:.3f}" if end in scores else "" for end in ends]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profiles", nargs="+", metavar="PROFILE")
    parser.add_argument("--out", metavar="DIR", help="also write DIR/<date>-acceptance.md and .jsonl")
    args = parser.parse_args()
    pages, rows = [], []
    for path in args.profiles:
        held_out, curve = measure(read_profile(path).answers)
        pages.append(page(path, held_out, curve))
        for name, score in held_out.items():
            loss, brier = score.means()
            rows.append({"profile": Path(path).stem, "predictor": name, "log_loss": loss, "brier": brier})
    print("\n\n".join(pages))
    if args.out is not None:
        head = provenance(sys.argv, config={"profiles": args.profiles}, threads=1, device="cpu")
        stem = Path(args.out) / f"{datetime.date.today()}-acceptance"
        title = f"# How well acceptance is foretold\n\nCommand: `{head['command']}`\n\n"
        stem.with_suffix(".md").write_text(title + "\n\n".join(pages) + "\n")
        stem.with_suffix(".jsonl").write_text("\n".join(json.dumps(row) for row in [head, *rows]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
