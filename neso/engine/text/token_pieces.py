"""The bytes that each token stands for.

Most tokenizers of language models decode token by token: the text is the bytes of the tokens, joined, read as
UTF-8. This file reads the rule for one token from the tokenizer's decoder, where it is of that kind. It makes
decoding a table look-up, exact at every token boundary, where the library can only decode whole lists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

Render = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class PieceRule:
    """How a token's name becomes bytes. The first token of a text, and the start of the text, may differ."""

    render: Render
    render_first: Render
    strip_char: str = " "
    strip_count: int = 0
    """At most this many `strip_char` are dropped from the start of a text."""


class _PieceCache(dict[int, bytes]):
    """Bytes by token id, filled as they are asked for: 200,000 tokens cost nothing at the start."""

    def __init__(self, load: Callable[[int], bytes | None]) -> None:
        super().__init__()
        self._load = load

    def __missing__(self, token_id: int) -> bytes:
        piece = self._load(token_id)
        if piece is None:
            return b""  # Not kept: ids that clients invent must not fill the memory.
        self[token_id] = piece
        return piece


class TokenPieces:
    """Bytes of every token of one tokenizer. Unknown ids stand for no bytes, as in the library."""

    def __init__(self, backend: Backend, rule: PieceRule, special_ids: frozenset[int]) -> None:
        self.rule = rule
        self._backend = backend
        self._special_ids = special_ids
        self._all = _PieceCache(self._load)
        self._visible = _PieceCache(lambda i: b"" if i in special_ids else self._load(i))

    @classmethod
    def of(cls, backend: Backend, special_ids: frozenset[int]) -> TokenPieces | None:
        """The pieces of `backend`, or None if its decoder does not decode token by token."""
        decoder = backend.decoder
        if decoder is None:
            return None
        rule = read_rule(json.loads(decoder.__getstate__()))
        return None if rule is None else cls(backend, rule, special_ids)

    def piece(self, token_id: int) -> bytes:
        """Bytes of one token, special or not, where it is not the first of a text."""
        return self._all[token_id]

    def join(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> bytes:
        """Bytes of `token_ids`, none of them the first of a text."""
        cache = self._visible if skip_special_tokens else self._all
        if len(token_ids) == 1:
            return cache[token_ids[0]]
        return b"".join(map(cache.__getitem__, token_ids))

    def first(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> tuple[bytes, int]:
        """Bytes of the token that a text starts with, and how many of `token_ids` it takes to get there.

        Special tokens that are skipped and unknown ids do not start a text; if there is nothing else, the
        bytes are empty and the count is 0.
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
    """The name of a token in the vocabulary; None for an id that is not in it."""
    try:
        return backend.id_to_token(token_id)
    except OverflowError:  # negative, or more than 32 bits
        return None


def read_rule(decoder: Mapping[str, Any]) -> PieceRule | None:
    """The rule of a decoder as tokenizer.json describes it; None if it does not go token by token."""
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return PieceRule(render=_render_byte_level, render_first=_render_byte_level)
    return _read_steps(steps)


def _read_steps(steps: Sequence[Mapping[str, Any]]) -> PieceRule | None:
    """The rule of SentencePiece-like decoders: replacements and byte tokens, then the start of the text."""
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
    """Characters that stand for bytes in byte-level tokenizers, as GPT-2 chose them.

    The table is for `str.translate`, {code point: byte as a character}. Characters below U+0100 that stand
    for no byte map to U+FFFF, so that encoding to Latin-1 refuses them.
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
        # A token added as plain text ("日本"): it stands for itself, as a whole.
        return name.encode()
