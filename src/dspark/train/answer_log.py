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
    ) -> bool:
        """Let the target answer what is not there yet; whether all is. `stop(done, total)` is asked after each answer.

        An answer's seed goes by its prompt's place among all, so that an interruption changes none.
        """
        total, finished = len(prompts) * len(temperatures), True
        for at, temperature in enumerate(temperatures):
            missing = [i for i, prompt in enumerate(prompts) if (prompt.text, temperature) not in self.known]
            if not missing or not finished:
                continue

            def done(index: int, tokens: list[int], missing: Sequence[int] = missing, t: float = temperature) -> bool:
                self._add(prompts[missing[index]], t, tokens, decode)
                return not stop(len(self.known), total)

            answerer(
                [prompts[i].tokens for i in missing],
                max_tokens=max_tokens,
                temperature=temperature,
                seeds=[seed * 1_000_003 + at * len(prompts) + i for i in missing],
                done=done,
            )
            finished = all((prompt.text, temperature) in self.known for prompt in prompts)
        return finished

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
