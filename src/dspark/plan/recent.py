"""recent: what is learned by name, kept for the names that were used last.
It must never grow beyond MAX_NAMES, however many names pass by once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

MAX_NAMES = 256

Value = TypeVar("Value")


def use(found: dict[str, Value], name: str, make: Callable[[], Value]) -> Value:
    """The value of a name, a new one where there is none, which then takes the place of the least recently used.
    Dictionaries keep the order of insertion: what is used moves to the end."""
    value = found.pop(name, None)
    if value is None:
        value = make()
        while len(found) >= MAX_NAMES:
            del found[next(iter(found))]
    found[name] = value
    return value


def check(found: dict[str, Value], what: str) -> dict[str, Value]:
    """The same. Raises ValueError where there are more names than are ever kept."""
    if len(found) > MAX_NAMES:
        raise ValueError(f"there are {len(found)} {what}, and at most {MAX_NAMES} are ever kept")
    return found
