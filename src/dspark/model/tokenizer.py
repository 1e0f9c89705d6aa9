"""The tokenizer: text to ids, ids to text, ids to raw bytes, and a stream that turns ids into text one by one.

It must never re-decode a whole text for one more token, nor emit a character of which some bytes are still to come.

A token stands for bytes, not for characters, so a stream holds back what may still change. Three kinds of vocabulary:
byte-level (every token is a byte string; UTF-8 is decoded incrementally), pieces with byte fallback (SentencePiece:
a run of byte tokens is decoded when it ends, all of it or, if it is not UTF-8, one U+FFFD a byte), and anything else
(decoded over a window of recent tokens). For the first two the pieces of a stream join to exactly `decode(ids)`.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

from dspark.model.gguf_file import first_line

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROMPT_TAIL = 64  # tokens of the prompt that can still matter to the first character of the answer
_REPLACEMENT = "\ufffd"
_TEMPLATE_FAULTS = (TypeError, ValueError, ArithmeticError, RecursionError, AttributeError, LookupError)
"""Of what a template does with values that it was not written for."""


class TokenStream(Protocol):
    """Text that becomes final token by token; one object serves one sequence."""

    def push(self, token_id: int) -> str:
        """The text that became final with this token ('' while a character is incomplete)."""

    def flush(self) -> str:
        """The rest at the end of the sequence, U+FFFD where a character stayed incomplete."""


class Tokenizer:
    """A model's tokenizer, loaded from its folder without network access.

    `eos_token_ids` are those that the tokenizer itself knows of; a model's full set is in `load.LoadedModel`.
    `num_tokens` is the highest known id plus one: rows of the model at or above it are padding.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises ValueError when `folder` holds no tokenizer that transformers can load."""
        from transformers import AutoTokenizer

        try:
            hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, ImportError, RecursionError) as error:
            raise ValueError(
                f"no usable tokenizer in {folder} ({first_line(error)}): copy the model's tokenizer.json into it"
            ) from error
        self._set_up(hf, name=Path(folder).name)

    @classmethod
    def of(cls, hf: Any) -> Tokenizer:
        """Around a tokenizer of transformers that somebody has loaded."""
        made = object.__new__(cls)
        made._set_up(hf, name=Path(getattr(hf, "name_or_path", None) or type(hf).__name__).name)
        return made

    def _set_up(self, hf: Any, *, name: str) -> None:
        self.hf: Any = hf
        self.name = name
        added = self.hf.added_tokens_decoder
        self._added = {index: token.content for index, token in added.items()}
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.bos_token_id: int | None = self.hf.bos_token_id
        eos = self.hf.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        self.num_tokens: int = max(self.hf.get_vocab().values()) + 1
        self._decoder = _read_decoder(self.hf)
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[int, _Piece] = {}

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    @property
    def chat_template(self) -> str:
        """The template's text; of several, all of them one after another."""
        template = self.hf.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: no text of more than so many times n characters fits into n tokens."""
        return max(len(self.token_bytes(index)) for index in range(self.num_tokens))

    def vocabulary(self) -> dict[str, int]:
        """Every token as the vocabulary writes it, with its id; padding rows are not in it."""
        return dict(self.hf.get_vocab())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised. ValueError for what is no text."""
        try:
            return list(self.hf(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
        except (TypeError, UnicodeError) as error:
            raise ValueError(f"the text cannot be encoded (a lone surrogate is no character): {error}") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, exactly as stored: no tidying of spaces. Ids that no token has (padding rows) give nothing."""
        return self.hf.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation as the model was trained to read it; `kwargs` go to the template.

        Raises ValueError when the model has no template or the template refuses the messages.
        """
        from jinja2.exceptions import TemplateError

        if not (self.has_chat_template or kwargs.get("chat_template")):
            raise ValueError(
                f"{self.name} has no chat template (a base model): send a plain prompt, or choose an instruct model"
            )
        try:
            return list(
                self.hf.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=None if tools is None else [dict(tool) for tool in tools],
                    add_generation_prompt=add_generation_prompt,
                    tokenize=True,
                    return_dict=False,
                    **kwargs,
                )
            )
        except _TEMPLATE_FAULTS as error:
            raise ValueError(f"the chat template of {self.name} refuses these messages: {first_line(error)}") from error
        except TemplateError as error:
            raise ValueError(f"the chat template of {self.name} refuses these messages: {error}") from error

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token inside a text (a special token: its written form; an unknown id: nothing)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def stream(self, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> TokenStream:
        """A fresh stream; with `prompt_ids` its text goes on where the prompt ends (a leading space is kept)."""
        stream: TokenStream
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if isinstance(self._decoder, _ByteLevel):
            stream = _ByteStream(self.token_bytes, skipped)
        elif isinstance(self._decoder, _Pieces):
            stream = _PieceStream(self._piece, skipped, self._decoder, is_first=len(prompt_ids) <= _PROMPT_TAIL)
        else:
            stream = _WindowStream(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens))
        for token_id in prompt_ids[-_PROMPT_TAIL:]:
            stream.push(token_id)
        return stream

    def _token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.num_tokens:
            return None
        return self._added.get(token_id) or self.hf.convert_ids_to_tokens(token_id)

    def _make_bytes(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if isinstance(self._decoder, _ByteLevel):
            return _byte_level_bytes(token)
        if isinstance(self._decoder, _Pieces):
            piece = self._piece(token_id)
            return bytes([piece]) if isinstance(piece, int) else (piece or "").encode("utf-8", "surrogatepass")
        return token.encode("utf-8", "surrogatepass")

    def _piece(self, token_id: int) -> _Piece:
        assert isinstance(self._decoder, _Pieces)
        if token_id in self._pieces:
            return self._pieces[token_id]
        token = self._token(token_id)
        piece: _Piece = token if token is None else self._decoder.piece(token)
        self._pieces[token_id] = piece
        return piece


class NoTokenizer(Tokenizer):
    """Stands where a model is used by token ids alone: no token has a text."""

    def __init__(self) -> None:
        self.name = "none"
        self.num_tokens = 0

    def vocabulary(self) -> dict[str, int]:
        return {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise ValueError("a text cannot be read without a tokenizer: give token ids, or the tokenizer")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def stream(self, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> TokenStream:
        return _WindowStream(self.decode)


_Piece = str | int | None  # text, one byte, or no token of that id


class _ByteLevel:
    """A vocabulary of byte strings, written in the printable alphabet of GPT-2."""


class _Pieces:
    """A vocabulary of text pieces: replacements in each, byte tokens if `byte_fallback`, `strip` at the very start."""

    def __init__(self, replaces: Sequence[tuple[str, str]], *, byte_fallback: bool, strip: tuple[str, int]) -> None:
        self._replaces = tuple(replaces)
        self._byte_fallback = byte_fallback
        self.strip_char, self.max_strip = strip

    def piece(self, token: str) -> str | int:
        for old, new in self._replaces:
            token = token.replace(old, new)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return int(match[1], 16)
        return token


class _ByteStream:
    """Incremental UTF-8 over the bytes of byte-level tokens: at most three bytes are held back."""

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decode(b"", True)


class _PieceStream:
    """Pieces as they come; a run of byte tokens is held back until it ends, because its end decides how it reads."""

    def __init__(
        self, piece: Callable[[int], _Piece], skipped: frozenset[int], decoder: _Pieces, *, is_first: bool
    ) -> None:
        self._piece = piece
        self._skipped = skipped
        self._run = bytearray()
        self._strip_char = decoder.strip_char
        self._to_strip = decoder.max_strip if is_first else 0

    def push(self, token_id: int) -> str:
        piece = None if token_id in self._skipped else self._piece(token_id)
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        return self._strip(self._end_run() + piece)

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._strip_char):
                self._to_strip = 0
                break
            text = text[len(self._strip_char) :]
            self._to_strip -= 1
        return text


class _WindowStream:
    """Any other decoder: decode a short window with and without its newest tokens and emit the difference.

    The window starts anew after each emission, so its cost does not grow; text that ends in U+FFFD waits, for at most
    `_MAX_WAIT` tokens (a vocabulary may hold tokens that never become characters).
    """

    _MAX_WAIT = 16

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._num_read = 0  # ids of the window whose text is already out
        self._out = ""  # their text

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        waiting = len(self._ids) - self._num_read
        if (text.endswith(_REPLACEMENT) and waiting < self._MAX_WAIT) or len(text) <= len(self._out):
            return ""
        new = text[len(self._out) :]
        self._ids = self._ids[self._num_read :]
        self._num_read = len(self._ids)
        self._out = self._decode(self._ids)
        return new

    def flush(self) -> str:
        new = self._decode(self._ids)[len(self._out) :]
        self._ids, self._num_read, self._out = [], 0, ""
        return new


def _read_decoder(hf: Any) -> _ByteLevel | _Pieces | None:
    """Which of the exact decoders describes this tokenizer's own; None when neither does."""
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    spec = json.loads(backend.decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _ByteLevel()
    return _read_pieces(steps)


def _read_pieces(steps: Iterable[Mapping[str, Any]]) -> _Pieces | None:
    """Replace* ByteFallback? Fuse (Strip at the start)?: the decoders of SentencePiece vocabularies."""
    replaces: list[tuple[str, str]] = []
    byte_fallback = False
    strip = (" ", 0)
    seen: list[str] = []
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and not seen and "String" in step["pattern"]:
            replaces.append((step["pattern"]["String"], step["content"]))
            continue
        if kind == "ByteFallback" and not seen:
            byte_fallback = True
        elif kind == "Strip" and seen and seen[-1] == "Fuse" and step["stop"] == 0:
            strip = (step["content"], step["start"])
        elif kind != "Fuse" or "Fuse" in seen:
            return None
        seen.append(kind)
    return _Pieces(replaces, byte_fallback=byte_fallback, strip=strip) if "Fuse" in seen else None


@lru_cache(maxsize=1)
def _byte_alphabet() -> Mapping[str, int]:
    """Character to byte: printable Latin-1 stands for itself, the other 68 bytes for U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(0x100 + offset): byte for offset, byte in enumerate(rest)}


def _byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; one with a character outside the alphabet (an added token) is plain text."""
    alphabet = _byte_alphabet()
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:
        return token.encode("utf-8", "surrogatepass")
