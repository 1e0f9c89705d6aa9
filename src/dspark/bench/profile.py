"""`dspark profile`: record what drafts are worth on your prompts, and say under which policy they would pay.
It must never report a second that was neither measured nor computed from the measured costs in the record."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark.bench.data import PromptRow, encode_rows, files_of, interleave, load_rows, printable
from dspark.observe.profile import FORMAT
from dspark.params import RequestSpeculation
from dspark.plan import values as read
from dspark.plan.history import History
from dspark.plan.replay import (
    Answer,
    Costs,
    Outcome,
    answer_from_dict,
    best_possible,
    costs_from_dict,
    policy_replay,
    replay,
)

OUT = "profile.jsonl"
POLICIES = ("confidence", "heuristic", "adaptive")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A record read back: `info` of what ran as written, answers in their order."""

    info: Mapping[str, Any]
    costs: Costs
    answers: Sequence[Answer]

    @property
    def max_tokens(self) -> int:
        """The longest draft that the record holds."""
        return max((len(chance.claims) for answer in self.answers for chance in answer.drafts.values()), default=0)


def read_profile(path: str | Path) -> Profile:
    """Raises ValueError naming file, line, cause and cure; warns of a last line that was cut and leaves it out."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the profile {path}: {error}; record one with dspark profile") from None
    info, costs, answers = None, None, []
    for number, line in enumerate(_lines(text, path), start=1):
        try:
            value = read.parse(line)
            if number > 1:
                answers.append(answer_from_dict(value))
                continue
            if not isinstance(value, dict) or value.get("format") != FORMAT:
                raise ValueError(f"no line of a {FORMAT}")
            info, costs = read.table({"info": {}, **value}, "info"), costs_from_dict(read.table(value, "costs"))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}; record the profile again with dspark profile") from None
    if info is None or costs is None or not answers:
        raise ValueError(f"{path}: the profile holds no answer; record one with dspark profile")
    return Profile(info=info, costs=costs, answers=answers)


def _lines(text: str, path: str | Path) -> list[str]:
    """Each ends with a newline when it is written: what is behind the last one was cut where an interrupt came."""
    *lines, rest = text.split("\n")
    if rest:
        try:
            read.parse(rest)
        except ValueError:
            if lines:
                warnings.warn(f"{path}: the last answer is cut, and left out; the rest is used", stacklevel=3)
                return lines
        lines.append(rest)
    return lines


def group_of(answer: Answer) -> str:
    """What figures are grouped by: the caller's task, else the class that was found."""
    return answer.task or answer.prompt_class


def replay_all(profile: Profile) -> dict[str, dict[str, Outcome]]:
    """policy -> group ("" for all) -> outcome; "fixed@k" for each k, then the policies that look."""
    longest = profile.max_tokens
    made = {f"fixed@{k}": ("fixed", k) for k in range(1, longest + 1)}
    made |= {name: (name, longest) for name in POLICIES}

    def under(policy: str, k: int) -> dict[str, Outcome]:
        return replay(profile.answers, policy_replay(policy, profile.costs, max_tokens=k), by=group_of)

    return {name: under(*policy) for name, policy in made.items()}


def learned(profile: Profile) -> History:
    """What an engine under the adaptive policy would have learned from the recorded answers, by their tasks. Classes
    that were found while recording are left out: without their centres no prompt can come to them again."""
    under = policy_replay("adaptive", profile.costs, max_tokens=profile.max_tokens)
    replay([replace(answer, prompt_class="") for answer in profile.answers], under)
    return under.history


def best_fixed(outcomes: Mapping[str, Mapping[str, Outcome]], group: str) -> str:
    """The fixed length that is quickest for a group; "none" where plain decoding is."""
    names = [name for name in outcomes if name.startswith("fixed@")]
    best = max(names, key=lambda name: outcomes[name][group].speedup)
    return best if outcomes[best][group].speedup > 1 else "none"


def text_report(profile: Profile, outcomes: Mapping[str, Mapping[str, Outcome]]) -> str:
    """Speedups over plain decoding by group and policy, as replayed."""
    groups = [group for group in outcomes["adaptive"] if group] + [""]
    names = ["best fixed", *[name for name in outcomes if not name.startswith("fixed@")]]
    rows = [["", "answers", *names, "accepted length"]]
    for group in groups:
        count = sum(not group or group_of(answer) == group for answer in profile.answers)
        best = best_fixed(outcomes, group)
        shown = "none 1.00" if best == "none" else f"@{best.partition('@')[2]} {outcomes[best][group].speedup:.2f}"
        adaptive = outcomes["adaptive"][group]
        cells = [f"{outcomes[name][group].speedup:.2f}" for name in names[1:]]
        rows.append(
            [printable(group or "all"), str(count), shown, *cells, f"{adaptive.tokens / max(adaptive.steps, 1):.2f}"]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *_verdicts(profile, outcomes)])


def _verdicts(profile: Profile, outcomes: Mapping[str, Mapping[str, Outcome]]) -> list[str]:
    adaptive = outcomes["adaptive"]
    groups = [group for group in adaptive if group]
    single = best_fixed(outcomes, "")
    single_seconds = adaptive[""].plain_seconds if single == "none" else outcomes[single][""].seconds
    by_group = 0.0
    for group in groups or [""]:
        best = best_fixed(outcomes, group)
        by_group += adaptive[group].plain_seconds if best == "none" else outcomes[best][group].seconds
    seconds = adaptive[""].seconds
    return [
        f"adaptive takes {seconds:.2f} s by the measured costs: {single_seconds / seconds:.3f} times as fast as the "
        f"best single length ({single}), {by_group / seconds:.3f} times as fast as the best length of each group",
        "a planner who knew how every draft ends would be "
        f"{single_seconds / best_possible(profile.answers, profile.costs).seconds:.3f} times as fast as that length: "
        "no choice of lengths over these drafts can do better",
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is recorded, and where the report goes."""
    parser.add_argument("--data", nargs="+", metavar="PATH", help="prompts to record: JSON lines, folders, - for stdin")
    parser.add_argument("--replay", metavar="FILE", help="report on this profile instead of recording one")
    parser.add_argument("--out", metavar="FILE", help=f"the profile to write (default: {OUT})")
    parser.add_argument("--report", metavar="FILE", help="also an HTML page with plots")
    parser.add_argument(
        "--history",
        metavar="FILE",
        help="also what was (or with --replay: would be) learned, for `history`",
    )
    parser.add_argument("--tasks", metavar="LIST", help="only these tasks, comma-separated")
    parser.add_argument("--per-task", type=int, metavar="N", help="the first N prompts of each task (all)")


def run(args: argparse.Namespace, *, load: Callable[[], Any], params: Any) -> int:
    """Record unless --replay is given, then report. `load` makes the LLM, `params` are the requests' own."""
    if (args.replay is None) == (args.data is None):
        raise ValueError(
            "give prompts to record (--data PATH) or a profile to report on (--replay FILE), one of the two"
        )
    path = args.replay or args.out or OUT
    _check_files(args, path)
    if args.replay is None:
        if not params.control.enabled or params.control.max_tokens == 0:
            raise ValueError("--params switches speculation off, so there is nothing to record: leave that out")
        rows = _rows(args)  # before the model is loaded: whatever is wrong with them is soon told
        record(rows, load(), params, path=path, history=args.history)
    profile = read_profile(path)
    if not profile.max_tokens:
        raise ValueError(f"{path}: nothing was drafted; choose another --draft than none, or longer answers")
    if args.replay is not None and args.history is not None:
        learned(profile).save(args.history)
    outcomes = replay_all(profile)
    print(text_report(profile, outcomes))
    if args.report is not None:
        from dspark.bench.profile_page import write_page

        write_page(Path(args.report), profile, outcomes)
    return 0


def _check_files(args: argparse.Namespace, path: str) -> None:
    """Before any work: whatever is to be written can be, and is neither read nor written as something else."""
    taken = [file for data in args.data or () if data != "-" for file in files_of(data)]
    outputs = [("--out", path), ("--report", args.report), ("--history", args.history)]
    if args.replay is not None:
        taken.append(Path(path))
        del outputs[0]
    for option, name in outputs:
        if name is None:
            continue
        file = Path(name)
        target = file if file.exists() else file.parent
        if file.is_dir() or not file.parent.is_dir() or not os.access(target, os.W_OK):
            raise ValueError(f"cannot write {option} {name}: give a file in a folder that can be written")
        if any(_same(file, other) for other in taken):
            raise ValueError(f"{option} {name} is read, or written as something else, by this run: give another file")
        taken.append(file)


def _same(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()


def _rows(args: argparse.Namespace) -> list[PromptRow]:
    """The prompts, interleaved by task."""
    tasks = None
    if args.tasks is not None:
        tasks = [task.strip() for task in args.tasks.split(",") if task.strip()]
        if not tasks:
            raise ValueError("--tasks names no task: give names with commas between, or leave it out")
    return interleave(load_rows(args.data, per_task=args.per_task, tasks=tasks, check_task=_as_task))


def _as_task(task: str) -> None:
    """Raises ValueError for a row's task that no request can have."""
    RequestSpeculation(task=task)


def record(rows: Sequence[PromptRow], llm: Any, params: Any, *, path: str, history: str | None = None) -> None:
    """Answer every prompt, one at a time, with each row's task as its own."""
    prompts = encode_rows(rows, llm.tokenizer, max_tokens=llm.engine.max_context // 2)
    with llm.profile(path):
        for number, (row, prompt) in enumerate(zip(rows, prompts), start=1):
            control = replace(params.control, task=row.task)
            llm.generate(prompt, replace(params, speculation=control))
            if number % 20 == 0 or number == len(rows):
                print(f"dspark profile: {number} of {len(rows)} answers recorded", file=sys.stderr, flush=True)
    if history is not None:
        llm.save_history(history)
