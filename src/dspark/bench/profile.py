"""`dspark profile`: record what drafts are worth on your prompts, and say under which policy they would pay.
It must never report a second that was neither measured nor computed from the measured costs in the record."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.observe import FORMAT
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

POLICIES = ("confidence", "heuristic", "adaptive")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A record read back: `header` as written, answers in their order."""

    header: Mapping[str, Any]
    costs: Costs
    answers: Sequence[Answer]
    lines: Sequence[Mapping[str, Any]]

    @property
    def max_tokens(self) -> int:
        """The longest draft that the record holds."""
        return max((len(chance.claims) for answer in self.answers for chance in answer.drafts.values()), default=0)


def read_profile(path: str | Path) -> Profile:
    """Raises ValueError naming file, line, cause and cure."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the profile {path}: {error}; record one with dspark profile") from None
    values = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict) or (number == 1 and value.get("format") != FORMAT):
                raise ValueError(f"no line of a {FORMAT}")
            values.append(value)
            if number > 1:
                answer_from_dict(value)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}; record the profile again with dspark profile") from None
    if len(values) < 2:
        raise ValueError(f"{path}: the profile holds no answer; record one with dspark profile")
    return Profile(
        header=values[0],
        costs=costs_from_dict(values[0].get("costs") or {}),
        answers=[answer_from_dict(value) for value in values[1:]],
        lines=values[1:],
    )


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
    """What an engine under the adaptive policy would have learned from the recorded answers, by their tasks."""
    under = policy_replay("adaptive", profile.costs, max_tokens=profile.max_tokens)
    replay(profile.answers, under)
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
        rows.append([group or "all", str(count), shown, *cells, f"{adaptive.tokens / max(adaptive.steps, 1):.2f}"])
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
    parser.add_argument("--out", default="profile.jsonl", metavar="FILE", help="the profile to write (%(default)s)")
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
    path = args.replay
    if path is None:
        path = args.out
        record(args, load(), params)
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


def record(args: argparse.Namespace, llm: Any, params: Any) -> None:
    """Answer every prompt, one at a time, interleaved by task, with each row's task as its own."""
    from dataclasses import replace

    from dspark.bench.data import encode_rows, interleave, load_rows

    tasks = [task.strip() for task in args.tasks.split(",") if task.strip()] if args.tasks else None
    rows = interleave(load_rows(args.data, per_task=args.per_task, tasks=tasks))
    prompts = encode_rows(rows, llm.tokenizer, max_tokens=llm.engine.max_context // 2)
    with llm.profile(args.out):
        for number, (row, prompt) in enumerate(zip(rows, prompts), start=1):
            control = replace(params.control, task=row.task)
            llm.generate(prompt, replace(params, speculation=control))
            if number % 20 == 0 or number == len(rows):
                print(f"dspark profile: {number} of {len(rows)} answers recorded", file=sys.stderr, flush=True)
    if args.history is not None:
        llm.save_history(args.history)
