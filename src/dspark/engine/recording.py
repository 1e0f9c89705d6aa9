"""recording: an LLM's answers written to a profile, with the costs that a replay needs.
It must never leave the log attached, or unfinished answers out of it, when the block ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.observe.profile import ProfileLog

if TYPE_CHECKING:
    from dspark.engine.llm import LLM
    from dspark.engine.speculator import Speculator
    from dspark.plan.cost import PacedTable, StepCosts


@contextmanager
def recorded(llm: LLM, path: str | Path) -> Iterator[None]:
    """Every answer given inside the block goes to the file. Raises ValueError where it cannot be written, or where the
    engine measured no costs."""
    speculator = llm.engine.speculator
    if speculator.cost is None:
        raise ValueError(
            f"this engine measured no costs (policy {speculator.policy!r}, draft {speculator.drafter.name!r}), which a "
            "profile needs: start it with a draft and policy 'shadow' or 'adaptive'"
        )
    log = ProfileLog(path, header={"info": llm.info(), "costs": costs(speculator)})
    llm.engine.row_sinks.append(log)
    try:
        yield
    finally:
        llm.engine.row_sinks.remove(log)
        log.close()


def costs(speculator: Speculator) -> dict[str, Any]:
    """As plan/replay.costs_from_dict reads them: points are [rows, seconds]."""
    blocks, by_token = speculator.block_costs, speculator.draft_cost
    return {
        "target": _points(speculator.cost),
        "draft": _points(by_token if blocks is None else blocks.greedy),
        "block_sources": dict(speculator.block_sources),
        "token_sources": [] if by_token is None else [speculator.drafter.name],
    }


def _points(table: PacedTable | StepCosts | None) -> list[list[float]] | None:
    return None if table is None else [[rows, seconds] for rows, seconds in table.points]
