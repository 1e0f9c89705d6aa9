"""`dspark bench --url`: a server's speed at several concurrencies, with what its counters say of drafts.
It must never mix two concurrencies in one figure, or report a server's counters as measured here."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from dspark.bench.data import PromptRow
from dspark.bench.remote import Counters, RemoteServer, Streamed
from dspark.bench.report import aligned
from dspark.provenance import provenance

WARM_UP = ({"role": "user", "content": "Count from one to twenty in words."},)
WARM_UP_TOKENS = 24
MS = 1e3


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How each prompt is asked."""

    model: str
    max_tokens: int
    temperature: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one concurrency. `throughput`: output tokens of all answers over wall time; medians over answers of seconds
    to the first piece (`ttft`) and a token after it (`tpot`), over pieces of those between (`itl`). `counters`: the
    server's, of this run."""

    concurrency: int
    num_answers: int
    num_tokens: int
    seconds: float
    throughput: float
    ttft: float
    tpot: float | None
    itl: float | None
    counters: Counters

    @property
    def accepted_length(self) -> float | None:
        """Tokens a pass and request: those that came, over those that were not accepted drafts."""
        accepted = self.counters.accepted
        if accepted is None:
            return self.counters.accepted_length
        steps = self.num_tokens - accepted
        return self.num_tokens / steps if steps > 0 else None


def measure(server: RemoteServer, rows: Sequence[PromptRow], asking: Asking, *, concurrency: int) -> Figures:
    """All rows once, by that many clients. Raises ValueError where the server refuses one."""

    def ask(row: PromptRow) -> Streamed:
        return server.stream(asking.model, row.messages, max_tokens=asking.max_tokens, temperature=asking.temperature)

    before, began = server.counters(), time.perf_counter()
    with ThreadPoolExecutor(concurrency) as clients:
        answers = list(clients.map(ask, rows))
    seconds = time.perf_counter() - began
    return figures(answers, seconds, server.counters().since(before), concurrency=concurrency)


def figures(answers: Sequence[Streamed], seconds: float, counters: Counters, *, concurrency: int) -> Figures:
    """Of what was streamed."""
    if told := sum(answer.drafted for answer in answers):  # llama.cpp tells with each answer
        accepted = sum(answer.accepted for answer in answers)
        counters = Counters(engine=counters.engine or "llama.cpp", drafted=float(told), accepted=float(accepted))
    tokens = sum(answer.num_tokens for answer in answers)
    each = [answer.per_token for answer in answers if answer.per_token is not None]
    gaps = [gap for answer in answers for gap in answer.gaps]
    return Figures(
        concurrency=concurrency,
        num_answers=len(answers),
        num_tokens=tokens,
        seconds=seconds,
        throughput=tokens / seconds,
        ttft=statistics.median(answer.first for answer in answers),
        tpot=statistics.median(each) if each else None,
        itl=statistics.median(gaps) if gaps else None,
        counters=counters,
    )


def warm_up(server: RemoteServer, model: str) -> None:
    """One answer that is not counted."""
    server.stream(model, WARM_UP, max_tokens=WARM_UP_TOKENS, temperature=0.0)


def concurrencies(text: str | None, rows: Sequence[PromptRow]) -> list[int]:
    """Of a comma-separated list. Raises ValueError naming what is wrong."""
    from dspark.bench.arrivals import parse_loads

    found = [load.concurrency or 1 for load in parse_loads(text or "1", None, burstiness=1.0)]
    if max(found) > len(rows):
        raise ValueError(f"{max(found)} clients for {len(rows)} prompts: add --data, or lower --concurrency")
    return found


def run(args: Any, rows: Sequence[PromptRow]) -> int:
    """`dspark bench --url`."""
    server = RemoteServer(url=args.url, key=args.api_key, allow_remote=args.allow_remote)
    loads = concurrencies(args.concurrency, rows)
    asking = Asking(model=args.served_model or server.model(), max_tokens=args.max_tokens, temperature=args.temperature)
    warm_up(server, asking.model)
    found = []
    for repetition in range(args.repeat):
        for load in loads:
            found.append(measure(server, rows, asking, concurrency=load))
            print(f"repetition {repetition + 1}, {load} clients: {found[-1].throughput:.1f} tokens/s", file=sys.stderr)
    if args.json:
        values = [asdict(one) | {"accepted_length": one.accepted_length} for one in found]
        print(json.dumps({"provenance": head(args, asking), "figures": values}))
    else:
        print(table(found))
    return 0


def head(args: Any, asking: Asking) -> dict[str, Any]:
    """What was asked of whom. The address is left out: it may name a machine."""
    config = asdict(asking) | {"concurrency": args.concurrency, "data": args.data}
    return provenance(["dspark", args.command], config=config, threads=0, device="remote")


def table(found: Sequence[Figures]) -> str:
    """A line a run."""
    rows = [["clients", "tokens/s", "first token ms", "ms a token", "between pieces ms", "accepted length", "server"]]
    for one in found:
        length, tpot, itl = one.accepted_length, one.tpot, one.itl
        rows.append(
            [
                str(one.concurrency),
                f"{one.throughput:.1f}",
                f"{MS * one.ttft:.0f}",
                "-" if tpot is None else f"{MS * tpot:.1f}",
                "-" if itl is None else f"{MS * itl:.1f}",
                "-" if length is None else f"{length:.2f}",
                one.counters.engine or "no metrics",
            ]
        )
    notes = (
        "medians over answers (first token, ms a token: after the first) and pieces; accepted length by the server's"
    )
    return f"{aligned(rows)}\n{notes} counters: tokens a pass and request, its own token included"
