"""`dspark tune --url`: which draft length a server should have, foretold from its counters or measured by restarts.
It must never start a command that was not given, or leave one running.

Most servers fix the length at the start. Without --command the lengths up to the server's own are judged from its
counters and the times of its answers (bench/advice). With it the server is started anew with each candidate and asked.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from dspark.bench.data import PromptRow, interleave, load_rows
from dspark.bench.remote import RemoteServer

DEFAULT_DATA = "benchmarks/prompts"
CONFIG, LENGTH = "{speculative_config}", "{k}"
GRACE = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The server, the candidates and the load."""
    command = (
        "start the server anew with each candidate: a command with {speculative_config} (JSON, vLLM) or {k} (a number) "
        "in it; for 'off' that word and the option before it are left out"
    )
    add = parser.add_argument
    add_server_arguments(add)
    add("--url", required=True, help="the server, such as http://127.0.0.1:8000")
    add("--data", nargs="+", default=[DEFAULT_DATA], metavar="PATH", help=f"JSON lines of prompts ({DEFAULT_DATA})")
    add("--per-task", type=int, metavar="N", help="the first N prompts of each task (all)")
    add("--concurrency", default="1,4,8", metavar="LIST", help="numbers of clients (%(default)s)")
    add("--max-tokens", type=int, default=128, metavar="N", help="longest answer (%(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="(%(default)s)")
    add("--command", dest="start", metavar="COMMAND", help=command)
    add("--lengths", default="0,2,4,8", metavar="LIST", help="lengths to start it with, 0 is off (%(default)s)")
    add("--speculation", type=json.loads, default={}, metavar="JSON", help="the rest of vLLM's speculative_config")
    add("--start-timeout", type=float, default=600.0, metavar="S", help="for the server to be ready (%(default)s)")
    add("--json", action="store_true", help="one JSON object instead of tables")


def add_server_arguments(add: Callable[..., Any]) -> None:
    """Who is asked, for `dspark bench --url` too."""
    add("--api-key", metavar="KEY", help="of the server at --url")
    add("--served-model", metavar="NAME", help="as the server at --url calls it (the first that it lists)")
    add("--allow-remote", action="store_true", help="--url may be another machine, which its owner allows")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One candidate: its length, and figures by number of clients."""

    k: int
    figures: Mapping[int, Any]


def run(args: argparse.Namespace) -> int:
    """Judge or measure, and print. Raises ValueError, one line, for bad input."""
    from dspark.bench.remote_run import Asking, concurrencies

    rows = interleave(load_rows(args.data, per_task=args.per_task))
    loads = concurrencies(args.concurrency, rows)
    server = RemoteServer(url=args.url, key=args.api_key, allow_remote=args.allow_remote)
    asking = Asking(model=args.served_model or "", max_tokens=args.max_tokens, temperature=args.temperature)
    if args.start is None:
        return _foretell(args, server, rows, loads, asking)
    return _measure(args, server, rows, loads, asking)


def _foretell(
    args: argparse.Namespace, server: RemoteServer, rows: Sequence[PromptRow], loads: Sequence[int], asking: Any
) -> int:
    from dspark.bench.advice import expect, facts, proposal
    from dspark.bench.remote_run import table

    found = _ask(server, rows, loads, asking)
    expected = expect([facts(found[load]) for load in loads])
    best = {load: expected.best(load) for load in loads}
    engine = found[loads[0]].counters.engine
    advice = proposal(best, engine=engine)
    if args.json:
        gains = {load: dict(of) for load, of in expected.gains.items()}
        figures = [asdict(one) for one in found.values()]
        print(json.dumps({"engine": engine, "figures": figures, "foretold": gains, "best": best, "proposal": advice}))
        return 0
    print(table(list(found.values())))
    print("\nforetold tokens/s over those without drafts, by draft length (from counters and times, not measured):")
    for load in loads:
        shares = "  ".join(f"{k}: {gain:.2f}" for k, gain in expected.gains[load].items())
        print(f"{load:4} clients  {shares}   best {best[load]}")
    print(f"\nproposal: {advice}\nstart the server so and compare with `dspark bench --url`, or let --command do it")
    return 0


def _measure(
    args: argparse.Namespace, server: RemoteServer, rows: Sequence[PromptRow], loads: Sequence[int], asking: Any
) -> int:
    from dspark.bench.advice import proposal

    lengths = _lengths(args.lengths)
    words = {k: command_words(args.start, k, args.speculation) for k in lengths}  # mistakes are told before any start
    if _answers(server):
        raise ValueError(f"something answers at {args.url} already: stop it, as --command starts the server itself")
    measured = []
    for k in lengths:
        print(f"dspark tune: starting with {k or 'no'} drafts", file=sys.stderr, flush=True)
        with started(words[k], server, timeout=args.start_timeout):
            measured.append(Measured(k=k, figures=_ask(server, rows, loads, asking)))
    best = {load: max(measured, key=lambda one: one.figures[load].throughput).k for load in loads}
    engine = measured[-1].figures[loads[0]].counters.engine
    advice = proposal(best, engine=engine)
    if args.json:
        values = [{"k": one.k, "figures": [asdict(of) for of in one.figures.values()]} for one in measured]
        print(json.dumps({"engine": engine, "measured": values, "best": best, "proposal": advice}))
    else:
        print(_report(measured, loads, best))
        print(f"\nproposal: {advice}")
    return 0


def _ask(server: RemoteServer, rows: Sequence[PromptRow], loads: Sequence[int], asking: Any) -> dict[int, Any]:
    """Figures by number of clients."""
    from dataclasses import replace

    from dspark.bench.remote_run import measure, warm_up

    asking = replace(asking, model=asking.model or server.model())
    warm_up(server, asking.model)
    found = {}
    for load in loads:
        found[load] = measure(server, rows, asking, concurrency=load)
        print(f"dspark tune: {load} clients, {found[load].throughput:.1f} tokens/s", file=sys.stderr, flush=True)
    return found


def _report(measured: Sequence[Measured], loads: Sequence[int], best: Mapping[int, int]) -> str:
    from dspark.bench.report import aligned

    rows = [["drafts", *(f"{load} clients" for load in loads)]]
    for one in measured:
        cells = [f"{one.figures[load].throughput:.1f}{'*' if best[load] == one.k else ''}" for load in loads]
        rows.append([str(one.k or "off"), *cells])
    return f"output tokens/s, one run each; * is the most\n{aligned(rows)}"


def _lengths(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdigit() for word in words):
        raise ValueError(f"--lengths {text!r} is no list of lengths: give one such as 0,2,4,8")
    return list(dict.fromkeys(int(word) for word in words))


def command_words(command: str, k: int, speculation: Mapping[str, Any]) -> list[str]:
    """The words of the command with drafts of k tokens; for 0 without the placeholder and the option before it."""
    config = json.dumps({**speculation, "num_speculative_tokens": k})
    try:
        given = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"--command cannot be read ({error}): close its quotes") from None
    if not any(CONFIG in word or LENGTH in word for word in given):
        raise ValueError(f"--command has neither {CONFIG} nor {LENGTH} in it: put one where the length belongs")
    words: list[str] = []
    for word in given:
        if k or (CONFIG not in word and LENGTH not in word):
            words.append(word.replace(CONFIG, config).replace(LENGTH, str(k)))
        elif word in (CONFIG, LENGTH) and words and words[-1].startswith("-"):
            words.pop()
    return words


@contextmanager
def started(words: Sequence[str], server: RemoteServer, *, timeout: float) -> Iterator[None]:
    """The server runs inside the block, and nothing of it after. Raises ValueError where it ends or is not ready."""
    try:
        process = subprocess.Popen(words, start_new_session=True, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ValueError(f"--command cannot be started ({error})") from None
    try:
        end = time.monotonic() + timeout
        while not _answers(server):
            if process.poll() is not None:
                raise ValueError(f"the server ended with status {process.returncode}: its own words are above")
            if time.monotonic() > end:
                raise ValueError(f"the server is not ready after {timeout:g} s: raise --start-timeout")
            time.sleep(0.2)
        yield
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[Any]) -> None:
    """The whole group that was started, gently at first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE)
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _answers(server: RemoteServer) -> bool:
    try:
        server.model()
    except ValueError:
        return False
    return True
