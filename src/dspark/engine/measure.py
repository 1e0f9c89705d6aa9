"""PassCost: what a runner's passes cost, by rows and context, measured at the start or read from the cache.
It must never take the figures of another model, device, number of threads or version for its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.model.batch import Span, pack
from dspark.model.cache import KVCache
from dspark.model.registry import cache_dir
from dspark.plan.cost import CostTable, StepCost, profile
from dspark.provenance import cpu_model, versions

SHORT_CONTEXT = 8
LONG_CONTEXT = 1024
"""Cached tokens behind a row when the price of context is measured."""
MAX_PROFILE_ROWS = 256
LONGEST_PASS = 0.25
"""Seconds: beyond the size that takes as long, sizes are not measured. No decision needs them at once, and a start
should take seconds."""
NUM_TRIES = 6
MUCH_QUICKER = 1.3
NUM_SEQS = 8
"""Sequences over which the rows of a measured pass are spread."""
FORMAT = "dspark-cost-2"


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """`table`: seconds by packed rows with next to no context. `per_context`, `per_seq_context`: seconds of one more
    cached token for one row, and for one sequence whatever the number of its rows."""

    table: CostTable
    per_context: float = 0.0
    per_seq_context: float = 0.0

    def step_cost(self) -> StepCost:
        """One that follows the clock, for one engine."""
        return StepCost(self.table, per_context=self.per_context, per_seq_context=self.per_seq_context)

    def as_dict(self) -> dict[str, Any]:
        """As JSON values: points are [rows, seconds]."""
        points = [list(point) for point in self.table.points]
        context = {"per_context": self.per_context, "per_seq_context": self.per_seq_context}
        return {"format": FORMAT, "points": points, **context}

    @classmethod
    def from_dict(cls, values: Any) -> PassCost:
        """Raises ValueError for what `as_dict` did not make."""
        try:
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']!r}")
            table = CostTable([(int(rows), float(seconds)) for rows, seconds in values["points"]])
            prices = {name: float(values[name]) for name in ("per_context", "per_seq_context")}
            if not all(0 <= price < math.inf for price in prices.values()):
                raise ValueError(f"prices {prices}")
            return cls(table=table, **prices)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"these are no costs of passes ({error!r}): measure them again") from None


def known_cost(
    runner: Any, *, model: str, quantization: str | None, threads: int | None, page_size: int, fresh: bool = False
) -> PassCost:
    """From the cache, else measured and stored there. `fresh`: measured in any case, as it is when passes are much
    quicker now than the cache says: then it was written at a bad moment."""
    path = cost_file(runner, model=model, quantization=quantization, threads=threads)
    if not fresh:
        try:
            known = PassCost.from_dict(json.loads(path.read_text()))
            if not _quicker_now(known, runner, page_size=page_size):
                return known
        except (OSError, ValueError):
            pass  # not there, or of another version: measured below
    cost = measure_cost(runner, page_size=page_size)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(cost.as_dict()))
        os.replace(partial, path)
    except OSError:
        pass  # a cache that cannot be written costs the next start a few seconds, no more
    return cost


def cost_file(runner: Any, *, model: str, quantization: str | None, threads: int | None) -> Path:
    """Where the costs of this runner are kept: one file for each thing that they depend on."""
    device = torch.device(runner.device)
    identity = {
        "model": str(Path(model).resolve()) if os.path.exists(model) else model,
        "shape": [runner.num_layers, runner.hidden_size, runner.vocab_size],
        "path": runner.name,
        "exact": bool(runner.exact),
        "quantization": quantization,
        "dtype": str(runner.cache_dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} {cpu_model()}",
        "threads": threads or torch.get_num_threads(),
        "versions": versions(),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    return cache_dir() / "costs" / f"{digest}.json"


def measure_cost(runner: Any, *, page_size: int) -> PassCost:
    """Time passes over up to NUM_SEQS sequences with SHORT_CONTEXT tokens behind each, on a cache of their own, then a
    few with LONG_CONTEXT."""
    room = max(1, runner.max_context // 2)
    behind = min(SHORT_CONTEXT, room)
    long = min(LONG_CONTEXT, room)
    each = -(-MAX_PROFILE_ROWS // NUM_SEQS)
    max_rows = min(MAX_PROFILE_ROWS, NUM_SEQS * min(each, runner.max_context - long))
    run = _passes(runner, page_size=page_size, behind=behind, length=long + each)
    table = profile(run, max_rows=max_rows, longest=LONGEST_PASS)
    if long <= behind:
        return PassCost(table=table)
    apart, together = (_dearer(run, seqs=seqs, behind=behind, long=long) for seqs in (NUM_SEQS, 1))
    # A token more behind each of NUM_SEQS rows of as many sequences costs n (c + c'), behind as many of one n c + c'.
    per_seq = max(0.0, (apart - together) / (NUM_SEQS - 1))
    return PassCost(table=table, per_context=max(0.0, apart / NUM_SEQS - per_seq), per_seq_context=per_seq)


def _quicker_now(known: PassCost, runner: Any, *, page_size: int) -> bool:
    """Whether passes over the smallest size take far less than they are known to."""
    rows, seconds = known.table.points[0]
    behind = min(SHORT_CONTEXT, max(1, runner.max_context // 2))
    run = _passes(runner, page_size=page_size, behind=behind, length=behind + rows)
    return min(run(rows) for _ in range(NUM_TRIES)) < seconds / MUCH_QUICKER


def _passes(runner: Any, *, page_size: int, behind: int, length: int) -> Callable[..., float]:
    """run(rows, start=behind, seqs=NUM_SEQS) -> seconds of a pass over rows of so many sequences, on a cache of its own
    with places for `length` tokens each."""
    cache = KVCache(
        runner.layer_specs,
        num_pages=NUM_SEQS * -(-length // page_size),
        page_size=page_size,
        dtype=runner.cache_dtype,
        device=runner.device,
    )
    for seq_id in range(NUM_SEQS):
        cache.open(seq_id, [0])
        cache.reserve(seq_id, min(length, runner.max_context))

    def run(rows: int, *, start: int = behind, seqs: int = NUM_SEQS) -> float:
        counts = [len(range(seq_id, rows, seqs)) for seq_id in range(seqs)]
        spans = [Span(seq_id=i, start=start, tokens=[0] * n, num_logits=n) for i, n in enumerate(counts) if n]
        begin = time.perf_counter()
        runner.forward(pack(spans, cache), cache).logits.argmax(dim=-1).tolist()
        return time.perf_counter() - begin

    return run


def _dearer(run: Callable[..., float], *, seqs: int, behind: int, long: int) -> float:
    """Seconds by which a pass of NUM_SEQS rows of so many sequences grows with a cached token behind each row."""
    times = {start: min(run(NUM_SEQS, start=start, seqs=seqs) for _ in range(NUM_TRIES)) for start in (behind, long)}
    return (times[long] - times[behind]) / (long - behind)
