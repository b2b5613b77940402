"""Incremental detokenization: converts token ids to text while they are generated.

Most tokenizers of language models decode token by token: the text is the concatenated bytes of the tokens, decoded as
UTF-8. For these, the bytes of each token are cached (`TokenPieces`); for others, the library decodes a window of
tokens.

Time per token, one at a time, on one Xeon core: byte-level: PieceDetokenizer 0.3 µs, WindowDetokenizer 2.2, the
library's DecodeStream 0.6; Llama style: 0.3, 3.0, 1.3; WordPiece: WindowDetokenizer 3.5, DecodeStream 2.1. DecodeStream
is not used, because it buffers while the text ends in U+FFFD, so stray bytes make it quadratic; it raises when such
bytes change the text of its window; and it has no flush.
"""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tokenizers import Tokenizer as Backend

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


REPLACEMENT = "\ufffd"
MAX_CHAR_TOKENS = 4
"""Maximum number of tokens of one character: UTF-8 uses at most 4 bytes."""


class Detokenizer(Protocol):
    """Incremental text of one sequence.

    The concatenated results of `add` and `finish` equal the decoding of all tokens at once.
    """

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text completed by `token_ids`; empty while a character is incomplete."""

    def finish(self) -> str:
        """Return the remaining text: U+FFFD if the sequence ended within a character, otherwise ""."""


class PieceDetokenizer:
    """For tokenizers that decode token by token (byte-level, byte-fallback, Metaspace): joins bytes as UTF-8.

    It differs from the library in one case: in a run of byte-fallback tokens that is not UTF-8, the library replaces
    every byte, including those of complete characters. Complete characters may have been sent already (newline is such
    a token in Llama 2, and a stop string on it must match at once), so only the invalid bytes become U+FFFD, as in
    byte-level tokenizers.
    """

    def __init__(
        self, pieces: TokenPieces, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """With `prompt_token_ids`, the text is a continuation: it keeps the leading space of its first word.

        A character whose first bytes are in the prompt is returned as a whole.
        """
        self._pieces = pieces
        self._skip = skip_special_tokens
        self._pending = b""
        self._at_start = True  # before the first token of the text
        self._strip_left = pieces.rule.strip_count  # number of leading spaces still to be removed
        if len(prompt_token_ids) > MAX_CHAR_TOKENS:
            # Only an incomplete character at the end of the prompt affects the text.
            prompt_token_ids = prompt_token_ids[-MAX_CHAR_TOKENS:]
            self._at_start = False
            self._strip_left = 0
        self.add(prompt_token_ids)

    def add(self, token_ids: Sequence[int]) -> str:
        if self._at_start:
            first, consumed = self._pieces.first(token_ids, skip_special_tokens=self._skip)
            if not consumed:
                return ""
            self._at_start = False
            data = first + self._pieces.join(token_ids[consumed:], skip_special_tokens=self._skip)
        else:
            data = self._pieces.join(token_ids, skip_special_tokens=self._skip)
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return self._strip(text) if self._strip_left and text else text

    def finish(self) -> str:
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text

    def _strip(self, text: str) -> str:
        """Remove the spaces that the tokenizer adds before the first word."""
        rest = text.lstrip(self._pieces.rule.strip_char)
        dropped = min(len(text) - len(rest), self._strip_left)
        self._strip_left = 0 if rest else self._strip_left - dropped
        return text[dropped:]


class WindowDetokenizer:
    """For all other decoders (such as WordPiece): decodes a window of the last tokens.

        tokens    … a b | c d
                    ^prefix ^read: the text of [prefix, read) is returned already; the rest of [prefix, end) is new.

    The window includes tokens before `read` because a token's text can depend on its neighbour (spaces, "##").
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_ids: frozenset[int] = frozenset(),
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """`special_ids` are omitted from the text. With `prompt_token_ids` the text is a continuation."""
        self._backend = backend
        self._special_ids = special_ids
        self._window = self._visible(prompt_token_ids[-2 * MAX_CHAR_TOKENS :])
        self._read = len(self._window)

    def add(self, token_ids: Sequence[int]) -> str:
        # Tokens without text must not start the window, because the next token would be decoded as the first of a text.
        return "".join(map(self._add_one, self._visible(token_ids)))

    def _add_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._window) - self._read < MAX_CHAR_TOKENS:
            return ""
        self._advance()
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._advance()
        return text

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._read])
        text = self._decode(self._window)
        if text.startswith(before):
            return text[len(before) :]
        # A stray byte in the window was completed by a later one.
        same = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(text))
        return text[same:]

    def _advance(self) -> None:
        self._window = self._window[self._read :]
        self._read = len(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _visible(self, token_ids: Sequence[int]) -> list[int]:
        return [
            i for i in token_ids if i not in self._special_ids and token_name(self._backend, i) is not None
        ]


class FilteredDetokenizer:
    """A detokenizer that omits some tokens."""

    def __init__(self, detokenizer: Detokenizer, hidden: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._hidden = hidden

    def add(self, token_ids: Sequence[int]) -> str:
        return self._detokenizer.add([token for token in token_ids if token not in self._hidden])

    def finish(self) -> str:
        return self._detokenizer.finish()


Render = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class PieceRule:
    """Conversion of a token's name to bytes; the first token of a text can differ."""

    render: Render
    render_first: Render
    strip_char: str = " "
    strip_count: int = 0
    """Maximum number of `strip_char` removed from the start of a text."""


class _PieceCache(dict[int, bytes]):
    """Bytes by token id, filled lazily, because converting 200,000 tokens would delay the start."""

    def __init__(self, load: Callable[[int], bytes | None]) -> None:
        super().__init__()
        self._load = load

    def __missing__(self, token_id: int) -> bytes:
        piece = self._load(token_id)
        if piece is None:
            return b""  # not cached, because arbitrary ids from clients must not fill the memory
        self[token_id] = piece
        return piece


class TokenPieces:
    """Bytes of every token of one tokenizer. Unknown ids have no bytes, as in the library."""

    def __init__(self, backend: Backend, rule: PieceRule, special_ids: frozenset[int]) -> None:
        self.rule = rule
        self._backend = backend
        self._special_ids = special_ids
        self._all = _PieceCache(self._load)
        self._visible = _PieceCache(lambda i: b"" if i in special_ids else self._load(i))

    @classmethod
    def of(cls, backend: Backend, special_ids: frozenset[int]) -> TokenPieces | None:
        """Create the table; None if the decoder of `backend` does not decode token by token."""
        decoder = backend.decoder
        if decoder is None:
            return None
        rule = read_rule(json.loads(decoder.__getstate__()))
        return None if rule is None else cls(backend, rule, special_ids)

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of one token, special or not, at any position except the first of a text."""
        return self._all[token_id]

    def join(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> bytes:
        """Return the bytes of `token_ids` at any position except the first of a text."""
        cache = self._visible if skip_special_tokens else self._all
        if len(token_ids) == 1:
            return cache[token_ids[0]]
        return b"".join(map(cache.__getitem__, token_ids))

    def first(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> tuple[bytes, int]:
        """Return the bytes of the first token of a text, and the number of `token_ids` up to and including it.

        Skipped special tokens and unknown ids do not start a text; if there are no other tokens, returns (b"", 0).
        """
        for position, token_id in enumerate(token_ids):
            if skip_special_tokens and token_id in self._special_ids:
                continue
            name = token_name(self._backend, token_id)
            if name is not None:
                return self.rule.render_first(name), position + 1
        return b"", 0

    def _load(self, token_id: int) -> bytes | None:
        name = token_name(self._backend, token_id)
        return None if name is None else self.rule.render(name)


def token_name(backend: Backend, token_id: int) -> str | None:
    """Return the name of a token in the vocabulary; None for an unknown id."""
    try:
        return backend.id_to_token(token_id)
    except OverflowError:  # negative, or more than 32 bits
        return None


def read_rule(decoder: Mapping[str, Any]) -> PieceRule | None:
    """Return the rule of a decoder in tokenizer.json; None if it does not decode token by token."""
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return PieceRule(render=_render_byte_level, render_first=_render_byte_level)
    return _read_steps(steps)


def _read_steps(steps: Sequence[Mapping[str, Any]]) -> PieceRule | None:
    """Return the rule of SentencePiece-like decoders: replacements and byte tokens, then stripping at the start."""
    replaced: list[tuple[str, str]] = []
    replaced_first: list[tuple[str, str]] = []
    byte_fallback = fused = False
    strip_char, strip_count = " ", 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if old and not fused:
                replaced.append((old, new))
                replaced_first.append((old, new))
            case {"type": "Metaspace", "replacement": space} if not fused:
                replaced.append((space, " "))
                replaced_first.append((space, " " if step.get("prepend_scheme") == "never" else ""))
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": char, "start": count, "stop": 0} if fused and not strip_count:
                strip_char, strip_count = char, count
            case _:
                return None
    return PieceRule(
        render=_renderer(replaced, byte_fallback),
        render_first=_renderer(replaced_first, byte_fallback),
        strip_char=strip_char,
        strip_count=strip_count,
    )


def _renderer(replacements: Sequence[tuple[str, str]], byte_fallback: bool) -> Render:
    def render(name: str) -> bytes:
        if byte_fallback and (match := _BYTE_TOKEN.fullmatch(name)):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            name = name.replace(old, new)
        return name.encode()

    return render


def _byte_level_alphabet() -> dict[int, str]:
    """Return GPT-2's mapping of characters to bytes, used by byte-level tokenizers.

    A table for `str.translate`: {code point: byte as a character}. Characters below U+0100 that represent no byte map
    to U+FFFF, so that encoding to Latin-1 fails.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = dict.fromkeys(range(0x100), "\uffff")
    table.update({byte: chr(byte) for byte in printable})
    others = [byte for byte in range(0x100) if byte not in printable]
    table.update({0x100 + n: chr(byte) for n, byte in enumerate(others)})
    return table


_BYTE_LEVEL = _byte_level_alphabet()


def _render_byte_level(name: str) -> bytes:
    try:
        return name.translate(_BYTE_LEVEL).encode("latin-1")
    except UnicodeEncodeError:
        # A token that was added as plain text ("日本").
        return name.encode()
