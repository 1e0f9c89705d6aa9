"""Grammars: which tokens may come next, by JSON schema, regex, choice, Lark or structural tag, compiled by llguidance.
It must never count a drafted token as committed, or lose the state behind the last committed one.

The compiler is behind `GrammarCompiler`; whatever compiles can take its place (benchmarks/grammars.py compares two).
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLong
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.params import StructuredOutputs
from dspark.verify.skeleton import skeletons

MAX_KEPT = 128
"""Compiled grammars that are kept, those used last."""
MAX_SOURCE = 2**20
"""Characters of a grammar."""
COMPILE_SECONDS = 10.0
COMPILE_STACK = 2**29
"""Bytes; memory is taken as far as it is used."""
UNKNOWN_FORMAT = re.compile(r"Unknown format: (\S+)")


class Matcher:
    """Where one answer stands in its grammar. Every question about drafts is answered behind them, and leaves the
    committed state as it is: the tokens `ahead` of it are taken back when the next question or commit needs that."""

    def __init__(self, inner: Any, *, width: int, name: str = "", examples: Sequence[Sequence[int]] = ()) -> None:
        """`inner`: an llguidance matcher of its own. `width`: columns of the logits. `name`, `examples`: as in
        dspark.sampling.Constraint."""
        self.inner = inner
        self.width = width
        self.name = name
        self.examples = examples
        self.ahead: list[int] = []

    def advance(self, token: int) -> None:
        """One token more is committed."""
        if self.ahead and self.ahead[0] == token:
            self.ahead.pop(0)
        else:
            self._go(())
            self.inner.consume_token(token)  # what it cannot follow is its `fault`, which ends this answer alone

    def legal(self, tokens: Sequence[int]) -> int:
        """How many of these may follow the committed ones."""
        return self._go(tokens)

    def allowed(self, drafts: Sequence[int], *, rows: int) -> Tensor:
        """(rows, width) bool: what may come behind the drafts, behind all but the last of them, ...: the last `rows` of
        the K + 1 states, in order. The drafts must be legal, or come behind an end, where the end alone may follow."""
        if self.inner.is_error():
            return torch.ones((rows, self.width), dtype=torch.bool)  # the answer ends with the fault
        words = np.zeros((rows, (self.width + 31) // 32), np.int32)
        first = len(drafts) + 1 - rows
        for row in range(rows):
            count = first + row
            taken = self._go(drafts[:count])
            assert taken == count or self.inner.is_stopped(), "an illegal draft was kept"
            place = words[row]
            self.inner.unsafe_compute_mask_ptr(place.ctypes.data, place.nbytes)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : self.width]
        return torch.from_numpy(bits.view(np.bool_))

    def forced(self, drafts: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that spell what alone can follow the drafts, as the tokenizer would write it. Another
        spelling may be legal, and likelier to the model: they are drafts like any others."""
        if limit <= 0 or self._go(drafts) < len(drafts) or self.inner.is_stopped():
            return []
        found = list(self.inner.compute_ff_tokens())[:limit]
        return found[: self.inner.validate_tokens(found)]

    def over(self, drafts: Sequence[int]) -> bool:
        """Whether nothing can follow these legal drafts."""
        self._go(drafts)
        return bool(self.inner.is_stopped())

    @property
    def ended(self) -> bool:
        """Whether the committed tokens are whole and nothing can follow them."""
        return not self.ahead and bool(self.inner.is_stopped()) and not self.inner.is_error()

    @property
    def fault(self) -> str | None:
        """Why the grammar can no longer be followed, such as a limit of its parser; None while it can."""
        return str(self.inner.get_error()) if self.inner.is_error() else None

    def _go(self, tokens: Sequence[int]) -> int:
        """Stand behind the longest legal prefix of these; returns its length."""
        alike = 0
        while alike < min(len(tokens), len(self.ahead)) and tokens[alike] == self.ahead[alike]:
            alike += 1
        if back := len(self.ahead) - alike:
            self.inner.rollback(back)
            del self.ahead[alike:]
        if rest := list(tokens[alike:]):
            taken = self.inner.try_consume_tokens(rest)
            self.ahead += rest[:taken]
        return len(self.ahead)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A grammar as it is kept: a matcher at its beginning that is only copied, its name and texts of its shape."""

    inner: Any
    name: str
    examples: Sequence[Sequence[int]]


class GrammarCompiler:
    """Compiles for one tokenizer, and keeps what it compiled."""

    def __init__(
        self, tokenizer: Any, *, width: int, eos_token_ids: Sequence[int], token_bytes: Callable[[int], bytes]
    ) -> None:
        """`tokenizer`: transformers' object. `width`: columns of the logits. `eos_token_ids` end an answer.
        `token_bytes` of an id, for tokenizers that are not written as tokenizer.json."""
        self.tokenizer = tokenizer
        self.width = width
        self.eos_token_ids = list(eos_token_ids)
        self.token_bytes = token_bytes
        self.lock, self.making_words = threading.Lock(), threading.Lock()
        self.kept: OrderedDict[str, Compiled] = OrderedDict()
        self._words: Any = None

    def matcher(self, wanted: StructuredOutputs) -> Matcher:
        """A fresh one, at the beginning. Raises ValueError naming what in the grammar cannot be followed."""
        compiled = self.compile(wanted)
        return Matcher(compiled.inner.deep_copy(), width=self.width, name=compiled.name, examples=compiled.examples)

    def compile(self, wanted: StructuredOutputs) -> Compiled:
        """The compiled grammar, from what is kept or by a thread of its own, which others need not wait for."""
        key = wanted.key()
        with self.lock:
            if key in self.kept:
                self.kept.move_to_end(key)
                return self.kept[key]
        job: Future[Compiled] = Future()
        # A daemon: one that never comes back must not keep the process from ending.
        # Alternatives and references that lead from one to the next for thousands of steps are followed on the stack.
        with self.lock:  # the size holds for every thread that is started while it is set
            before = threading.stack_size(COMPILE_STACK)
            try:
                threading.Thread(target=self._run, args=(job, wanted), name="dspark-grammar", daemon=True).start()
            finally:
                threading.stack_size(before)
        try:
            compiled = job.result(timeout=COMPILE_SECONDS)
        except TooLong:
            raise ValueError(
                f"structured_outputs.{wanted.kind} takes more than {COMPILE_SECONDS:g} s to compile: make it simpler, "
                "for example with fewer alternatives or smaller bounds of repetition"
            ) from None
        with self.lock:
            self.kept[key] = compiled
            while len(self.kept) > MAX_KEPT:
                self.kept.popitem(last=False)
        return compiled

    def _run(self, job: Future[Compiled], wanted: StructuredOutputs) -> None:
        try:
            job.set_result(self._compile(wanted))
        except Exception as error:  # whoever waits is told
            job.set_exception(error)

    def _compile(self, wanted: StructuredOutputs) -> Compiled:
        from llguidance import LLMatcher

        source = wanted.source()
        if len(source) > MAX_SOURCE:
            raise ValueError(
                f"structured_outputs.{wanted.kind} has {len(source)} characters, at most {MAX_SOURCE} are read"
            )
        marker = None if wanted.after is None else self._marker(wanted.after)
        unknown: set[str] = set()
        while True:
            found = LLMatcher(self.words, _grammar(wanted, marker, unknown), log_level=0)
            name = UNKNOWN_FORMAT.search(found.get_error()) if found.is_error() else None
            if name is None or name[1] in unknown:
                break
            unknown.add(name[1])  # to those who do not know it a format is a remark (JSON Schema, section 7.2.1)
        if not found.is_error():
            found.compute_bitmask()  # what is too much for the parser shows here, and others need not wait for it later
        if found.is_error():
            raise ValueError(f"structured_outputs.{wanted.kind} cannot be followed: {_first_lines(found.get_error())}")
        shapes = skeletons(wanted.schema()) if wanted.kind == "json" else []
        examples = [self.tokenizer.encode(text, add_special_tokens=False) for text in shapes]
        return Compiled(inner=found, name=wanted.name, examples=examples)

    def _marker(self, text: str) -> str:
        """A rule `free`: anything up to the first such text, or up to that token, where no text spells it."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == 1 and self.words.is_special_token(ids[0]):
            return f"free: TEXT <[{ids[0]}]>\nTEXT: /(.|\\n)*/"
        spelled = re.escape(text).replace("/", "\\/")
        return f"free[lazy]: /(.|\\n)*{spelled}/"

    @property
    def words(self) -> Any:
        """The tokenizer as the compiler knows it; made once, which takes about a second."""
        with self.making_words:
            if self._words is None:
                self._words = self._make_words()
            return self._words

    def _make_words(self) -> Any:
        from llguidance import LLTokenizer
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self.tokenizer, n_vocab=self.width, eos_token=self.eos_token_ids)
        except ValueError:  # no tokenizer.json behind it
            words: Any = _Words(self.tokenizer, self.width, self.eos_token_ids[0], self.token_bytes)
            return LLTokenizer(words, n_vocab=self.width)


class _Words:
    """A tokenizer without a tokenizer.json, in the form that llguidance asks for."""

    def __init__(self, tokenizer: Any, width: int, eos: int, token_bytes: Callable[[int], bytes]) -> None:
        known = len(tokenizer)
        self.eos_token_id = eos
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [token_bytes(i) if i < known else b"" for i in range(width)]
        self.special_token_ids = list(tokenizer.all_special_ids)
        self.tokenizer = tokenizer
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _grammar(wanted: StructuredOutputs, marker: str | None, unknown: Collection[str]) -> str:
    """In llguidance's own form. `marker`: what ends the free text before, in Lark. `unknown`: formats of strings that
    are left out."""
    from llguidance import LLMatcher, StructTag

    if wanted.kind == "structural_tag":
        tags = [
            StructTag(trigger=tag["trigger"], begin=tag["begin"], grammar=_tagged(tag["schema"]), end=tag["end"])
            for tag in wanted.tags()
        ]
        return StructTag.to_grammar(tags, assume_special=False)
    if wanted.kind == "grammar":
        return LLMatcher.grammar_from_lark(_lark(wanted.source()))
    if wanted.kind == "regex":
        if marker is None:
            return LLMatcher.grammar_from_regex(wanted.source())
        # A slash that is escaped already is left alone.
        body = "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", wanted.source()) + "/"
    elif wanted.kind == "choice":
        assert wanted.choice is not None
        # As one terminal: of rules the parser holds two thousand at a time.
        words = " | ".join(json.dumps(word, ensure_ascii=False) for word in wanted.choice)
        body = f"CHOICE\nCHOICE: {words}"
    else:
        schema: Any = wanted.schema() if wanted.kind == "json" else {"type": "object"}
        schema, options = _without_formats(schema, unknown), _json_options(wanted)
        if marker is None:
            return LLMatcher.grammar_from_json_schema(schema, overrides=options)
        if options is not None and isinstance(schema, Mapping):
            schema = {**schema, "x-guidance": options}
        body = f"%json {json.dumps(schema)}"
    if marker is None:
        return LLMatcher.grammar_from_lark(f"start: {body}")
    return LLMatcher.grammar_from_lark(f"start: free answer\n{marker}\nanswer: {body}\n")


def _without_formats(schema: Any, names: Collection[str]) -> Any:
    """The schema without these formats; a property may be called "format" as well."""
    if isinstance(schema, list):
        return [_without_formats(part, names) for part in schema]
    if not isinstance(schema, Mapping) or not names:
        return schema
    return {
        key: _without_formats(part, names)
        for key, part in schema.items()
        if not (key == "format" and isinstance(part, str) and part in names)
    }


def _json_options(wanted: StructuredOutputs) -> Any:
    options: dict[str, Any] = {}
    if wanted.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if wanted.whitespace_pattern is not None:
        options["whitespace_pattern"] = wanted.whitespace_pattern
    return options or None


def _tagged(schema: Any) -> Any:
    """A structural tag's schema, which llguidance wants as a table of its own or a text."""
    return dict(schema) if isinstance(schema, Mapping) else json.dumps(schema)


def _lark(source: str) -> str:
    """A Lark grammar as it is; EBNF in the form of llama.cpp (GBNF, `root ::= ...`) translated."""
    if "::=" not in source:
        return source
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return str(gbnf_to_lark(source))
    except (GbnfToLarkError, RecursionError) as error:
        raise ValueError(f"structured_outputs.grammar cannot be followed: {error}") from None


def _first_lines(text: str, most: int = 600) -> str:
    """Of an error: where it is, not the parser's whole state."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return "; ".join(lines[:4])[:most]
