"""OccurrenceIndex: where the n-grams of some texts occurred, each with the token that followed.
It must never scan a text to answer, trust a hash without comparing the tokens, or keep what was removed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

_SHIFT = 40
_MASK = (1 << _SHIFT) - 1


class OccurrenceIndex:
    """Hash index over n-grams of a few fixed lengths (`orders`) of growing texts.

    A *position* is `text_id << 40 | i` and stands for the n-gram that ends just before token i of the text; it is
    indexed once token i exists, so every occurrence has a continuation and the end of a text never finds itself.
    Appending a token costs one dictionary entry for each order; memory is linear in the indexed tokens. It plays the
    part of the suffix tree of SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975, section 4): the children of a
    matched node and their counts are read off the occurrences when they are asked for, which in Python is cheaper
    than keeping max_depth counts up to date for each token.
    """

    def __init__(self, orders: Sequence[int]) -> None:
        assert orders and list(orders) == sorted(set(orders)) and orders[0] >= 1, orders
        self.orders = tuple(orders)
        self._newest = 0
        self._texts: dict[int, list[int]] = {}
        self._positions: dict[int, dict[int, int | list[int]]] = {order: {} for order in self.orders}

    @property
    def num_entries(self) -> int:
        """Distinct n-grams held, over all orders."""
        return sum(len(table) for table in self._positions.values())

    @property
    def num_tokens(self) -> int:
        """Tokens held, over all texts."""
        return sum(len(text) for text in self._texts.values())

    def text(self, text_id: int) -> Sequence[int]:
        """The tokens held under `text_id`, not to be changed; empty when unknown."""
        return self._texts.get(text_id, ())

    @staticmethod
    def text_id(position: int) -> int:
        """Which text a position is in."""
        return position >> _SHIFT

    def extend(self, text_id: int, tokens: Sequence[int]) -> None:
        """Append `tokens` to the newest text (the highest id so far) or begin it."""
        assert text_id >= self._newest, (text_id, self._newest)
        self._newest = text_id
        text = self._texts.setdefault(text_id, [])
        start = len(text)
        text.extend(tokens)
        base = text_id << _SHIFT
        for order, table in self._positions.items():
            for i in range(max(start, order), len(text)):
                key = hash(tuple(text[i - order : i]))
                held = table.get(key)
                # Most n-grams occur once: a bare integer spares them a list.
                if held is None:
                    table[key] = base | i
                elif isinstance(held, int):
                    table[key] = [held, base | i]
                else:
                    held.append(base | i)

    def remove(self, text_id: int) -> None:
        """Drop a text and every occurrence in it. O(its tokens x orders), plus a bisection for each repeated n-gram."""
        text = self._texts.pop(text_id)
        base = text_id << _SHIFT
        for order, table in self._positions.items():
            for i in range(order, len(text)):
                key = hash(tuple(text[i - order : i]))
                held = table[key]
                if isinstance(held, int):
                    del table[key]
                    continue
                at = bisect_left(held, base | i)
                assert held[at] == base | i, "positions of an n-gram are not in rising order"
                del held[at]
                if len(held) == 1:
                    table[key] = held[0]

    def occurrences(self, tail: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """(order, positions oldest first) of the n-grams that end `tail`, longest order first, where there are any.

        The positions are candidates: equal hashes are not yet equal tokens, see `match_length`.
        """
        for order in reversed(self.orders):
            if order <= len(tail):
                held = self._positions[order].get(hash(tuple(tail[len(tail) - order :])))
                if held is not None:
                    yield order, ((held,) if isinstance(held, int) else held)

    def match_length(self, position: int, tail: Sequence[int]) -> int:
        """How many tokens before `position` equal the end of `tail`, at most all of it."""
        text, i = self._texts[position >> _SHIFT], position & _MASK
        longest, n = min(i, len(tail)), 0
        if text[i - longest : i] == tail[len(tail) - longest :]:
            return longest
        while n < longest and text[i - n - 1] == tail[-n - 1]:
            n += 1
        return n

    def continuation(self, position: int, num_tokens: int, *, periodic: bool = False) -> tuple[int, ...]:
        """The tokens from `position` on, at most `num_tokens`.

        `periodic`: a text that ends too early is read on as if it repeated itself with the distance between the
        position and its end, as a copy in Lempel-Ziv coding does; right for the text that is being continued.
        """
        text, i = self._texts[position >> _SHIFT], position & _MASK
        found = tuple(text[i : i + num_tokens])
        if periodic and len(found) < num_tokens:
            found = (found * (num_tokens // len(found) + 1))[:num_tokens]
        return found
