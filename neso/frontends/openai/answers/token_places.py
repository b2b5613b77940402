"""Where in a text its tokens are."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from neso.generation import TokenizerLike, TokenLogprobs
from neso.generation.language_model import TokenBytes

_LOOK_AHEAD = 16
"""Bytes of the text that may be none of its tokens', as where a tokenizer normalizes."""


class PlacedToken(NamedTuple):
    """A token, its log probabilities (None for the first of a prompt), and the character that it begins with."""

    text: str
    token_id: int
    logprobs: TokenLogprobs | None
    offset: int


class TokenPlaces:
    """Finds the tokens of a text in it while it grows.

    A token is placed when the text has it. Tokens whose text is held back, because it may become a stop string or is a
    part of a character, wait for it. Special tokens, which the text does not show, are placed where they would be.
    """

    def __init__(self, tools: TokenizerLike, offset: int = 0) -> None:
        """`offset`: characters before this text."""
        self._tools = tools
        self._offset = offset
        self._text = b""  # as far as it is known and not dropped
        self._position = 0  # in it, behind the tokens placed
        self._waiting: deque[tuple[str, int, TokenLogprobs | None]] = deque()

    def add_text(self, text: str) -> None:
        """More of the text."""
        self._text = self._text[self._position :] + text.encode("utf-8", "surrogatepass")
        self._position = 0

    def add_token(self, text: str, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """One more token; `text` is how it is shown by itself."""
        self._waiting.append((text, token_id, logprobs))

    def placed(self, *, final: bool) -> list[PlacedToken]:
        """The tokens that have found their place since the last call; all that are left if the text is `final`."""
        found = []
        while self._waiting:
            text, token_id, logprobs = self._waiting[0]
            before, length = self._match(self._bytes(text, token_id), final=final)
            if length < 0:
                break
            self._pass(before)
            found.append(PlacedToken(text, token_id, logprobs, self._here()))
            self._pass(length)
            self._waiting.popleft()
        return found

    @property
    def is_exact(self) -> bool:
        """Whether the tokens placed make up the text."""
        return self._position == len(self._text)

    def _match(self, token: bytes, *, final: bool) -> tuple[int, int]:
        """Bytes to pass over and bytes of the token that come then; (0, -1) where that cannot be told yet."""
        start = self._position
        for shown in (token, token.lstrip(b" ")):  # the space before a text's first word may be left out
            here = self._text[start : start + len(shown)]
            if here == shown:
                return 0, len(shown)
            if shown.startswith(here):  # the text ends within the token
                return (0, len(here)) if final else (0, -1)
        found = self._text.find(token, start, start + len(token) + _LOOK_AHEAD)
        return (found - start, len(token)) if found > start else (0, 0)

    def _pass(self, length: int) -> None:
        start, self._position = self._position, self._position + length
        self._offset += sum(byte & 0xC0 != 0x80 for byte in self._text[start : self._position])

    def _here(self) -> int:
        """The character at this place: within one, that one."""
        inside = not self.is_exact and self._text[self._position] & 0xC0 == 0x80
        return self._offset - inside

    def _bytes(self, text: str, token_id: int) -> bytes:
        return token_bytes(self._tools, text, token_id) or text.encode("utf-8", "surrogatepass")


def token_bytes(tools: TokenizerLike, text: str, token_id: int) -> bytes | None:
    """Bytes of a token that is shown as `text`. None if it is a part of a character, and nothing says which."""
    if "\ufffd" not in text:
        return text.encode("utf-8", "surrogatepass")
    return tools.token_bytes(token_id) if isinstance(tools, TokenBytes) else None
