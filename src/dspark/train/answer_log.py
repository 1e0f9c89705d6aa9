"""AnswerLog: the target's answers as JSON lines, one written as soon as it is there.
It must never lose an answer to an interruption, nor give one out for a prompt that was not asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from dspark.train.answers import Example
from dspark.train.prompts import TrainPrompt

Decode = Callable[[Sequence[int]], str]


class Answerer(Protocol):
    """Who answers: the engine, for training."""

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float,
        seeds: Sequence[int],
        done: Callable[[int, list[int]], bool],
    ) -> None:
        """Answer all prompts; `done(i, tokens)` as soon as the i-th is answered. Where it returns False, stop."""
        ...


class AnswerLog:
    """A file of answers: {"prompt", "task", "held_out", "temperature", "tokens", "answer"} a line."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file that is none of ours; a last line that was cut off is dropped."""
        self.path = path
        self.known: dict[tuple[str, float], list[int]] = {}
        if path.exists():
            self._read()

    def _read(self) -> None:
        text = self.path.read_text(encoding="utf-8")
        whole, _, rest = text.rpartition("\n")
        if rest:
            self.path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        for number, line in enumerate(filter(None, whole.split("\n")), 1):
            try:
                row = json.loads(line)
                self.known[row["prompt"], float(row["temperature"])] = [int(token) for token in row["tokens"]]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{self.path}:{number} is no answer: delete the file, or choose another --out"
                ) from None

    def fill(
        self,
        prompts: Sequence[TrainPrompt],
        answerer: Answerer,
        *,
        temperatures: Sequence[float],
        max_tokens: int,
        seed: int,
        decode: Decode,
        stop: Callable[[int, int], bool] = lambda done, total: False,
        group: int = 0,
        enough: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Let the target answer what is not there yet; whether all is. `stop(done, total)` is asked after each answer,
        `enough()` after each `group` of them (0: all), so that what a budget leaves out is not the long answers.

        An answer's seed goes by its prompt's place among all, so that an interruption changes none.
        """
        asked = [(at, i) for at in range(len(temperatures)) for i in range(len(prompts))]
        missing = [(at, i) for at, i in asked if (prompts[i].text, temperatures[at]) not in self.known]
        for part in _groups(missing, group):
            temperature = temperatures[part[0][0]]

            def done(
                index: int, tokens: list[int], part: Sequence[tuple[int, int]] = part, t: float = temperature
            ) -> bool:
                self._add(prompts[part[index][1]], t, tokens, decode)
                return not stop(len(self.known), len(asked))

            answerer(
                [prompts[i].tokens for _, i in part],
                max_tokens=max_tokens,
                temperature=temperature,
                seeds=[seed * 1_000_003 + at * len(prompts) + i for at, i in part],
                done=done,
            )
            if enough() or any((prompts[i].text, temperature) not in self.known for _, i in part):
                break
        return all((prompts[i].text, temperatures[at]) in self.known for at, i in asked)

    def _add(self, prompt: TrainPrompt, temperature: float, tokens: list[int], decode: Decode) -> None:
        row = {"prompt": prompt.text, "task": prompt.task, "held_out": prompt.held_out, "temperature": temperature}
        row |= {"tokens": tokens, "answer": decode(tokens)}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ValueError(
                f"an answer cannot be written to {self.path} ({error.strerror}): free space, and give the same command "
                "again; the answers so far are kept"
            ) from None
        self.known[prompt.text, temperature] = tokens

    def examples(self, prompts: Sequence[TrainPrompt], temperatures: Sequence[float]) -> list[Example]:
        """Of the prompts that are answered."""
        return [
            Example(
                tokens=prompt.tokens + tuple(self.known[prompt.text, temperature]),
                num_prompt=len(prompt.tokens),
                task=prompt.task,
                temperature=temperature,
                held_out=prompt.held_out,
            )
            for temperature in temperatures
            for prompt in prompts
            if self.known.get((prompt.text, temperature))
        ]


def _groups(missing: Sequence[tuple[int, int]], size: int) -> list[Sequence[tuple[int, int]]]:
    """(temperature, prompt) in groups of one temperature each."""
    found: list[Sequence[tuple[int, int]]] = []
    for at in sorted({at for at, _ in missing}):
        of_one = [pair for pair in missing if pair[0] == at]
        found += [of_one[start : start + (size or len(of_one))] for start in range(0, len(of_one), size or len(of_one))]
    return found
