"""DistilRun: the stages of a distillation, each continued where an earlier call stopped.
It must never hold target and training in memory together where the loss does not need both.

The folder: run.json, answers.jsonl, training-state.pt, then draft/ (a model) or head/, report.json and .md, select/.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dspark.bench import distil_settings as settings
from dspark.bench.answering import EngineAnswerer
from dspark.model.free_memory import cpu_free
from dspark.train.answer_log import AnswerLog
from dspark.train.answers import Example
from dspark.train.distil_recipe import HEAD, DistilRecipe
from dspark.train.estimate import check_memory
from dspark.train.prompts import TrainPrompt, read_prompts

ANSWER_SHARE, LEARN_SHARE = 0.4, 0.4
"""Of --minutes."""
REPORT_SECONDS = 20.0
CACHE_BYTES = 1 << 30
"""What an engine is taken to need beside weights, where memory is asked for before it is loaded."""
Stop = Callable[[], bool]


class DistilRun:
    """One `dspark distil`."""

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        argv: Sequence[str],
        progress: Any,
        say: Callable[[str], None],
    ) -> None:
        """Everything that can be refused without loading a model is refused here. Raises ValueError."""
        from dataclasses import replace

        from dspark.engine.build import shared_vocabulary, vocabulary_difference

        self.args = args
        self.argv = argv
        self.progress = progress
        self.say = say
        self.folder = Path(args.out)
        self.target = settings.describe(args.model, progress=progress)
        self.draft = None if args.draft == HEAD else self._describe_draft(args.draft)
        self.words: Any = None
        if self.draft is not None:
            pair: tuple[Any, Any] = (self.target, self.draft)
            if vocabulary_difference(self.target.tokenizer, self.draft.tokenizer) is not None:
                self.words = shared_vocabulary(*pair)
        recipe = settings.recipe_of(args, same_tokenizer=self.words is None)
        self.prompts = self._prompts(recipe)
        digest = settings.digest_of([prompt.text for prompt in self.prompts])
        self.recipe: DistilRecipe = replace(recipe, digest=digest, start=self._start())
        self.state = settings.claim_folder(self.folder, self.recipe)

    def _describe_draft(self, name: str) -> settings.Described:
        from dspark.engine.heads import is_head

        found = settings.describe(name, progress=self.progress)
        if is_head(found.folder):
            raise ValueError(f"{name} is a draft head: train it with --draft head --start {name}")
        return found

    def _start(self) -> str:
        """The head to go on from; "" for none."""
        from dspark.engine.heads import packaged_head

        if self.draft is not None or self.args.start == "none":
            return ""
        if self.args.start:
            return str(self.args.start)
        found = packaged_head(self.args.model)
        return "" if found is None else str(found)

    def _prompts(self, recipe: DistilRecipe) -> list[TrainPrompt]:
        """Raises ValueError where they are too few, too long, or none."""
        data = recipe.data
        needed = data.max_prompt_tokens + data.max_answer_tokens
        models = [m for m in (self.target, self.draft) if m is not None]
        for model in models:
            if needed > model.max_context:
                raise ValueError(
                    f"prompts of {data.max_prompt_tokens} and answers of {data.max_answer_tokens} tokens do not fit "
                    f"the {model.max_context} tokens of {model.name}: lower --max-prompt-tokens or --max-tokens"
                )
        tokenizer = self.target.tokenizer

        def encode(text: str) -> Sequence[int]:
            try:
                return tokenizer.apply_chat_template([{"role": "user", "content": text}])
            except ValueError:  # no template: the bare text, as dspark bench gives it
                return tokenizer.encode(text)

        prompts, left_out = read_prompts(data, encode)
        trained = sum(not prompt.held_out for prompt in prompts)
        held_out = len(prompts) - trained
        self.say(f"{trained} prompts to learn from, {held_out} held out; left out: {_counts(left_out)}")
        if trained < settings.LEAST_TRAINED or held_out < settings.LEAST_HELD_OUT:
            raise ValueError(
                f"{trained} prompts to learn from and {held_out} held out are too few (at least "
                f"{settings.LEAST_TRAINED} and {settings.LEAST_HELD_OUT}): give more prompts, or change --held-out or "
                "--max-prompt-tokens"
            )
        return prompts

    # -- stages

    def run(self, *, stop: Stop) -> dict[str, Any] | None:
        """The report; None where it was stopped before the end."""
        from dspark.bench.distil_head import learn_head
        from dspark.bench.distil_learn import learn_draft

        if not self._answers(stop):
            return None
        examples = self.log.examples(self.asked, self.recipe.data.temperatures)
        trained = [example for example in examples if not example.held_out]
        if len(trained) < settings.LEAST_TRAINED:
            raise ValueError(f"only {len(trained)} answers were made in time: raise --minutes, or lower --max-tokens")
        learned = (learn_head if self.draft is None else learn_draft)(self, examples, stop=stop)
        if learned is None:
            return None
        gc.collect()
        return self._report(learned, examples)

    def _answers(self, stop: Stop) -> bool:
        """Whether there are all that will be made."""
        self.log = AnswerLog(self.folder / "answers.jsonl")
        data = self.recipe.data
        if self.state["answers_closed"]:
            return True
        asked = self.asked
        missing = len(asked) * len(data.temperatures) - len(self.log.known)
        if missing > 0:
            self.check_target()
            self.say(f"{self.recipe.target} answers {missing} prompts")
        watch = _Watch(self, stop)
        answerer = EngineAnswerer(
            self.args.model,
            max_model_len=data.max_prompt_tokens + data.max_answer_tokens,
            batch=data.batch,
            device=self.args.device,
            threads=self.args.threads,
            progress=self.progress,
        )
        finished = self.log.fill(
            asked,
            answerer,
            temperatures=data.temperatures,
            max_tokens=data.max_answer_tokens,
            seed=data.seed,
            decode=self.target.tokenizer.decode,
            stop=watch,
            group=0 if self.args.minutes is None else 2 * data.batch,
            enough=watch.is_late,
        )
        answerer.close()
        if not finished and not watch.is_late():
            return False
        self.state["answers_closed"] = True
        settings.keep(self.folder, self.state)
        return True

    def check_target(self, beside: int = 0) -> None:
        """Raises ValueError where the target, and `beside` bytes of training, do not fit in memory."""
        check_memory(
            2 * self.target.num_parameters + CACHE_BYTES + beside,
            cpu_free().num_bytes,
            what=f"{self.recipe.target}{' beside the training' if beside else ''}",
            cure="end other programs, use a smaller target or draft, or --loss ce, which learns without the target",
        )

    @property
    def asked(self) -> list[TrainPrompt]:
        """Prompts that the target answers: a head is validated and calibrated on answers to held-out ones, a model is
        measured by the engine, which answers itself."""
        return [prompt for prompt in self.prompts if self.draft is None or not prompt.held_out]

    def held_out(self, count: int) -> list[TrainPrompt]:
        """The first so many."""
        return [prompt for prompt in self.prompts if prompt.held_out][:count]

    # -- measuring

    def _report(self, learned: dict[str, Any], examples: Sequence[Example]) -> dict[str, Any]:
        from dspark.bench.distil_choose import choose, measure_both
        from dspark.provenance import provenance, scrub

        measured = measure_both(self, learned["draft"])
        import torch

        report = {
            "provenance": provenance(
                self.argv, config={}, threads=self.args.threads or torch.get_num_threads(), device=self.args.device
            ),
            "recipe": scrub(self.recipe.as_dict()),
            "prompts": len(self.prompts),
            "answers": len(examples),
            "answer_tokens": sum(example.num_answer for example in examples),
            "learned": scrub(learned),
            "measured": measured,
        }
        return report | choose(self, learned["draft"])


class _Watch:
    """Asked after each answer whether the user stops it; tells how it goes, and whether the budget is spent."""

    def __init__(self, run: DistilRun, stop: Stop) -> None:
        self.say = run.say
        self.stop = stop
        self.start = self.last = time.monotonic()
        minutes = run.args.minutes
        self.seconds = None if minutes is None else 60 * minutes * ANSWER_SHARE
        self.first: int | None = None

    def __call__(self, done: int, total: int) -> bool:
        now = time.monotonic()
        if self.first is None:
            self.first = done - 1
        if now - self.last > REPORT_SECONDS:
            self.last = now
            left = (total - done) * (now - self.start) / (done - self.first)
            self.say(f"{done} of {total} answers, about {left / 60:.0f} min left")
        return self.stop()

    def is_late(self) -> bool:
        """Whether the budget is spent."""
        return self.seconds is not None and time.monotonic() - self.start > self.seconds


def _counts(left_out: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count) or "none"


def free_disk(folder: Path) -> int:
    """Bytes."""
    return shutil.disk_usage(folder).free
