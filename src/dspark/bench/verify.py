"""`dspark verify`: its arguments, and the run from sides to checks, every pair written down as it comes.
It must never import torch, or anything that does, before the run starts, nor lose what was found to an interruption.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.bench.endpoint import Endpoint
    from dspark.quality.checks import Check, Score
    from dspark.quality.pairs import Pair
    from dspark.quality.questions import Question
    from dspark.quality.sampled import Plan, Sampled

TASKS = "humaneval,gsm8k,mmlu,mtbench,jsonschema"
RESULTS = "benchmarks/results"
SHARE_OF_PAIRS = 0.65
"""Of --minutes, for the paired answers; the rest is for samples."""
MAX_PROMPT_TOKENS = 1000
REMOTE_BOUND = 0.5
SAMPLED_SEQS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked, how much of it, what is allowed, and where the report goes."""
    add = parser.add_argument
    add("--tasks", default=TASKS, metavar="LIST", help="comma-separated (%(default)s)")
    add("--data", required=True, metavar="FOLDER", help="with TASK.jsonl for each task (docs/verify.md)")
    add("--per-task", type=int, metavar="N", help="N rows of each task, chosen by --seed (all)")
    add("--max-tokens", type=int, default=128, metavar="N", help="longest answer (%(default)s)")
    add("--batch", type=int, default=8, metavar="N", help="questions that run together (%(default)s)")
    add("--minutes", type=float, metavar="M", help="stop asking after about M minutes and report on what there is")
    add(
        "--margin", type=float, default=0.1, metavar="POINTS", help="differences of scores below are none (%(default)s)"
    )
    add("--seed", type=int, default=0, metavar="N", help="of the choice of rows and of all sampling (%(default)s)")
    samples = parser.add_argument_group("sampled answers")
    samples.add_argument("--samples", type=int, default=1000, metavar="N", help="of each prefix; 0: no such test")
    samples.add_argument("--prefixes", type=int, default=4, metavar="N", help="prefixes sampled from (%(default)s)")
    samples.add_argument(
        "--control", type=float, default=0.5, metavar="P", help="the control keeps this share of refused drafts"
    )
    remote = parser.add_argument_group("servers")
    remote.add_argument(
        "--url", metavar="URL", help="a server with the OpenAI API instead of --model: the plain side, or both"
    )
    remote.add_argument(
        "--url2", metavar="URL", help="the speculative side (without it: --url with and without 'speculation': false)"
    )
    remote.add_argument("--served-model", metavar="NAME", help="the model's name there (the first that is listed)")
    remote.add_argument(
        "--bound", type=float, default=REMOTE_BOUND, metavar="LOGITS", help="near-ties of servers (%(default)s)"
    )
    remote.add_argument("--judge-url", metavar="URL", help="a model that compares open answers, asked in both orders")
    remote.add_argument("--judge-model", metavar="NAME", help="its name (the first that is listed)")
    add("--strict", action="store_true", help="exit code 1 also where a check is inconclusive")
    add("--out", default=RESULTS, metavar="DIR", help="folder of the result files (%(default)s)")
    add("--name", help="the result files are DIR/<date>-NAME.jsonl, .md and .html (the model's name and verify)")
    add("--json", action="store_true", help="print one JSON object instead of tables")


@dataclass(kw_only=True)
class Sides:
    """Both sides of a run with what judges them. `sample`: the distribution test over texts (name, ids or None, text,
    where the answer begins), which reports as it goes; None: there is none."""

    plain: Any
    other: Any
    judge: Any
    late: Any
    exact: bool
    bound: float
    told: bool
    config: Mapping[str, Any]
    sample: Callable[[Sequence[Pair], Plan, Callable[[Sampled], None]], Sampled] | None = None
    letter_ids: Mapping[int, str] = field(default_factory=dict)
    threads: int = 0
    device: str = "remote"


@dataclass(kw_only=True)
class Found:
    """What a run has found so far; bench/verify_report writes it."""

    head: Mapping[str, Any]
    pairs: list[Pair] = field(default_factory=list)
    sampled: Sampled | None = None
    scores: list[Score] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    num_questions: int = 0
    interrupted: bool = False
    passed: bool = False


def run(args: argparse.Namespace, *, open_sides: Callable[[argparse.Namespace], Sides], argv: Sequence[str]) -> int:
    """0 when the gate is passed, 1 when not. Raises ValueError, one line, for bad input; KeyboardInterrupt, and
    ValueError of a server that goes away, after the report of what there was."""
    from dspark.bench.endpoint import Endpoint
    from dspark.bench.verify_report import Journal, as_json, text_report
    from dspark.provenance import provenance
    from dspark.quality.goodness import require_scipy

    check_arguments(args)
    if args.samples:
        require_scipy()
    questions = read_questions(args)
    judge = Endpoint(args.judge_url, model=args.judge_model) if args.judge_url else None
    sides = open_sides(args)
    settings = {name: value for name, value in vars(args).items() if name != "run" and not callable(value)}
    head = provenance(
        argv, config={"verify": settings, "sides": sides.config}, threads=sides.threads, device=sides.device
    )
    found = Found(head=head, num_questions=len(questions))
    journal = Journal(args, head)
    stopped: BaseException | None = None
    with journal, _terminated_as_interrupted():
        try:
            _ask(args, sides, questions, found, journal)
            _sample(args, sides, found, journal)
        except (KeyboardInterrupt, ValueError) as error:  # Ctrl-C, or a server that has gone
            found.interrupted, stopped = True, error
        conclude(args, sides, found, judge=judge if not found.interrupted else None)
        journal.close(found)
        print(as_json(found) if args.json else text_report(found))
    say(f"written {journal.stem}.jsonl, .md and .html")
    if stopped is not None:
        raise stopped
    return 0 if found.passed else 1


def check_arguments(args: argparse.Namespace) -> None:
    """Before minutes of answering."""
    for name, least in (("max_tokens", 1), ("batch", 1), ("samples", 0), ("prefixes", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: give at least {least}")
    if args.per_task is not None and args.per_task < 1:
        raise ValueError(f"--per-task {args.per_task} leaves no question: give at least 1")
    if not 0 < args.margin < 100:
        raise ValueError(f"--margin {args.margin:g}: give points of a hundred, more than 0")
    if not 0 < args.control <= 1:
        raise ValueError(f"--control {args.control:g}: give a share, more than 0 and at most 1")
    if args.url2 is not None and args.url is None:
        raise ValueError("--url2 is the speculative side: give the plain one as --url")


def read_questions(args: argparse.Namespace) -> list[Question]:
    """Of all tasks in turns, so that a run that ends early has looked at each."""
    from dspark.quality.questions import questions_of, read_rows
    from dspark.quality.scoring import SCORES

    tasks = list(dict.fromkeys(task.strip() for task in args.tasks.split(",") if task.strip()))
    if not tasks:
        raise ValueError(f"--tasks names none: choose of {TASKS}")
    listed = []
    for task in tasks:
        rows = read_rows(args.data, task, per_task=args.per_task, seed=args.seed)
        listed.append(questions_of(task, rows, max_tokens=args.max_tokens, seed=args.seed))
        if task == "jsonschema":
            SCORES[task]("{}", {"schema": {}})  # whether it can be judged at all
    longest = max(map(len, listed))
    return [questions[i] for i in range(longest) for questions in listed if i < len(questions)]


def _ask(args: argparse.Namespace, sides: Sides, questions: Sequence[Question], found: Found, journal: Any) -> None:
    from dspark.quality.checks import agreement
    from dspark.quality.pairs import ask_both

    deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes * _pairs_share(args)
    if sides.letter_ids:
        questions = [replace(q, row={**q.row, "letter_ids": sides.letter_ids}) for q in questions]
    pairs = ask_both(sides.plain, sides.other, questions, judge=sides.judge, late=sides.late, chunk=args.batch)
    for pair in pairs:
        found.pairs.append(pair)
        journal.pair(pair)
        if len(found.pairs) % args.batch == 0 or len(found.pairs) == len(questions):
            total = agreement(found.pairs, "all")
            refused = {"refused": total.refused} if total.refused else {}
            told = ", ".join(f"{count} {verdict}" for verdict, count in {**total.verdicts, **refused}.items())
            say(f"{len(found.pairs)}/{len(questions)} questions: {told}")
            if deadline is not None and time.monotonic() > deadline:
                say("the time for paired answers is over")
                break


def _pairs_share(args: argparse.Namespace) -> float:
    return SHARE_OF_PAIRS if args.samples else 1.0


def _sample(args: argparse.Namespace, sides: Sides, found: Found, journal: Any) -> None:
    from dspark.quality.sampled import Plan

    if not args.samples or sides.sample is None:
        return
    plan = Plan(samples=args.samples, share=args.control, seed=args.seed)
    begun = time.monotonic()

    def heard(sampled: Sampled) -> None:
        found.sampled = sampled
        tested = sampled.tested[-1]
        journal.tested(tested)
        control = "" if tested.control is None else f", control p {tested.control.p_value:.2g}"
        say(f"prefix {len(sampled.tested)} ({tested.prefix.manner}): p {tested.fit.p_value:.2g}{control}")
        budget = None if args.minutes is None else 60 * args.minutes * (1 - SHARE_OF_PAIRS)
        if budget is not None and time.monotonic() - begun > budget:
            say("the time for samples is over")
            raise TimeoutError

    with contextlib.suppress(TimeoutError):
        sides.sample(found.pairs, plan, heard)


def conclude(args: argparse.Namespace, sides: Sides, found: Found, *, judge: Endpoint | None) -> None:
    """From what was found to checks and the gate."""
    from dspark.quality import checks

    margin = args.margin / 100
    found.scores = checks.score_tasks(found.pairs, checks.Scorer(), margin=margin)
    made = [checks.check_identity(found.pairs, exact=sides.exact), checks.check_ends(found.pairs)]
    told = sides.told or bool(checks.speculation(found.pairs).num_verified)
    made.append(checks.check_drafts(found.pairs, told=told))
    made += [found_check for found_check in [checks.check_letters(found.pairs, bound=sides.bound)] if found_check]
    made += checks.check_scores(found.scores, margin=margin)
    made += [found_check for found_check in [checks.check_open(found.pairs)] if found_check]
    if judge is not None:
        made.append(_judged(judge, found.pairs))
    if found.sampled is not None:
        kind = "the target's law" if found.sampled.drafts_told else "the plain side's samples"
        made.append(checks.check_sampled(found.sampled, kind=kind))
    elif args.samples:
        text = "no samples were drawn: no answer was long enough, or the run ended before"
        made.append(checks.Check(name="sampled answers", verdict=checks.INCONCLUSIVE, text=text))
    found.checks = made
    found.passed = checks.gate(made, strict=args.strict) and not found.interrupted


def _judged(judge: Endpoint, pairs: Sequence[Pair]) -> Check:
    """Open answers that differ, by a model; equal ones need no judge."""
    from dspark.bench.endpoint import preference
    from dspark.quality.checks import ALPHA, FAIL, PASS, Check
    from dspark.quality.paired import sign_test

    votes = []
    for pair in pairs:
        if pair.question.task == "mtbench" and not pair.refused:
            same = pair.plain.text == pair.other.text
            question = pair.question.messages[-1]["content"]
            votes.append(0 if same else preference(judge, question, pair.plain.text, pair.other.text))
    plain, other = votes.count(-1), votes.count(1)
    p_value = sign_test(plain, other)
    text = f"of {len(votes)} answers {plain} better plain, {other} better speculative, sign test p {p_value:.2g}"
    figures = {"n": len(votes), "plain": plain, "speculative": other, "p_value": p_value, "model": judge.model}
    return Check(name="judge", verdict=FAIL if p_value < ALPHA else PASS, text=text, figures=figures)


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: with a report."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not on the main thread: nobody sends signals here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def say(line: str) -> None:
    """On stderr."""
    print(f"dspark verify: {line}", file=sys.stderr, flush=True)


def describe(value: Any) -> str:
    """For JSON lines."""
    return json.dumps(value, ensure_ascii=False, default=str)


def model_name(args: argparse.Namespace) -> str:
    """Of the files."""
    if args.url is not None:
        return args.served_model or "server"
    path = Path(str(args.model))
    return path.stem if path.suffix == ".gguf" else path.name
