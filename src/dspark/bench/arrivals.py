"""Arrivals: when the requests of a load come, for closed loops, and open ones by Poisson or burstier processes.
They must never depend on how quickly anything is answered, unless the loop is closed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Load:
    """How requests come. Closed loop: `concurrency` clients, each asks again as soon as it is answered. Open loop:
    `rate` requests a second whatever the engine does, in gaps that are Gamma(`burstiness`) distributed: 1 is a Poisson
    process, smaller is burstier, larger more even (as in vLLM's benchmark); rate inf: all at once. `num_floors`: of the
    requests that run at a time, so many ask for `floor` tokens/s.
    """

    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    num_floors: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a load is closed (--concurrency) or open (--rate): give one of the two")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency={self.concurrency} is not usable: give at least 1")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"rate={self.rate} is not usable: give requests a second above 0, or inf")
        if not 0 < self.burstiness < math.inf:
            raise ValueError(f"burstiness={self.burstiness} is not usable: give a number above 0; 1 is Poisson")

    @property
    def name(self) -> str:
        """For tables: "8" clients, "2.5/s"; "8 (2 at 40/s)" with floors."""
        name = str(self.concurrency) if self.rate is None else f"{self.rate:g}/s"
        return name + (f" ({self.num_floors} at {self.floor:g}/s)" if self.num_floors else "")

    def times(self, count: int, *, seed: int) -> list[float]:
        """Seconds from the start at which each of `count` requests may be sent, rising; a closed loop's are all 0, as
        its clients say when."""
        if self.rate is None or math.isinf(self.rate):
            return [0.0] * count
        gaps = np.random.default_rng(seed).gamma(self.burstiness, 1 / (self.rate * self.burstiness), size=count)
        return [float(time) for time in np.cumsum(gaps)]


def parse_loads(
    concurrency: str | None, rate: str | None, *, burstiness: float, floor: str | None = None
) -> list[Load]:
    """Of comma-separated lists; with a `floor`, N@TOKENS_PER_SECOND, each load without it and with it. Raises
    ValueError naming the number that is none."""
    loads = [Load(concurrency=int(_number(text, int, "concurrency"))) for text in _items(concurrency)]
    loads += [Load(rate=_number(text, float, "rate"), burstiness=burstiness) for text in _items(rate)]
    if floor is not None:
        count, _, value = floor.partition("@")
        num_floors, least = int(_number(count, int, "floor")), _number(value, float, "floor")
        if num_floors < 1 or not 0 < least < math.inf:
            raise ValueError(f"--floor {floor!r} is no floor: give N@TOKENS_PER_SECOND, such as 2@40")
        loads = [new for load in loads for new in (load, replace(load, num_floors=num_floors, floor=least))]
    names = [load.name for load in loads]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"loads named twice: {', '.join(twice)}; name each once")
    return loads


def _items(text: str | None) -> Sequence[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _number(text: str, kind: type, name: str) -> int | float:
    try:
        return kind(text)
    except ValueError:
        form = "N@TOKENS_PER_SECOND, such as 2@40" if name == "floor" else "a list such as 1,2,4,8"
        raise ValueError(f"--{name} {text!r} is no number: give {form}") from None
