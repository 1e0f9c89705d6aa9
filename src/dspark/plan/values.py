"""values: numbers, words and lists out of parsed JSON, each checked as it is read.
It must never repair what it reads: what its writer cannot have written is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MOST = 1e15
"""Far beyond any figure of ours; sums and products of such numbers stay finite."""


def parse(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for anything else, nesting that no reader can follow included."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply to be read") from None


def member(holder: object, key: str) -> Any:
    """Whatever is under `key`."""
    if not isinstance(holder, dict):
        raise ValueError(f"{_shown(holder)} stands where an object with {key!r} belongs")
    if key not in holder:
        raise ValueError(f"there is no {key!r}")
    return holder[key]


def table(holder: object, key: str) -> Mapping[str, Any]:
    """The object under `key`."""
    value = member(holder, key)
    if not isinstance(value, dict):
        raise ValueError(f"{key}={_shown(value)} is not an object")
    return value


def sequence(holder: object, key: str) -> Sequence[Any]:
    """The list under `key`; a tuple of ours as well."""
    value = member(holder, key)
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{key}={_shown(value)} is not a list")
    return value


def word(holder: object, key: str) -> str:
    """The string under `key`."""
    return _word(key, member(holder, key))


def words(holder: object, key: str) -> list[str]:
    """The list of strings under `key`."""
    return [_word(key, value) for value in sequence(holder, key)]


def number(holder: object, key: str, *, least: float = -MOST, most: float = MOST) -> float:
    """The number under `key`, finite and within the bounds."""
    return _number(key, member(holder, key), least, most)


def whole(holder: object, key: str, *, least: int = 0, most: float = MOST) -> int:
    """The whole number under `key`, within the bounds."""
    value = member(holder, key)
    if not isinstance(value, int):
        raise ValueError(f"{key}={_shown(value)} is not a whole number")
    return int(_number(key, value, least, most))


def numbers(
    holder: object, key: str, *, count: int | None = None, least: float = -MOST, most: float = MOST
) -> list[float]:
    """The list of numbers under `key`, `count` of them where that is given."""
    return as_numbers(key, member(holder, key), count=count, least=least, most=most)


def as_numbers(
    name: str, value: object, *, count: int | None = None, least: float = -MOST, most: float = MOST
) -> list[float]:
    """A value that was a list's, with the list's name."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name}={_shown(value)} is not a list of numbers")
    if count is not None and len(value) != count:
        raise ValueError(f"{name} holds {len(value)} numbers, not {count}")
    return [_number(name, item, least, most) for item in value]


def _word(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}={_shown(value)} is not a string")
    return value


def _number(name: str, value: object, least: float, most: float) -> float:
    # A NaN fails every comparison, and whole numbers of any size compare with floats.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"{name}={_shown(value)} is not a number from {least:g} to {most:g}")
    return float(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
