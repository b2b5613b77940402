"""Log probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

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


_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say; the same number as in other servers."""


class CompletionLogprobs:
    """The `logprobs` object of a text completion, gathered over any number of deltas.

    `text_offset` counts characters of the choice's whole text, its echoed prompt included, so in a stream it
    goes on from chunk to chunk. A token comes with the chunk that has its text.
    """

    def __init__(self, tools: TokenizerLike, top: int, *, by_number: bool) -> None:
        """`top` entries a token, -1 for all there are; `by_number` tells tokens by their ids."""
        self._tools = tools
        self._top_number = top
        self._by_number = by_number
        self._places = TokenPlaces(tools)
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(
        self, logprobs: Sequence[TokenLogprobs | None], token_ids: Sequence[int], text: str
    ) -> None:
        """Begin with the echoed prompt, whose first token has no probability."""
        placed = self._placed_prompt(logprobs, token_ids, text)
        for token in placed:
            self._append(token)
        self._places = TokenPlaces(self._tools, len(text))

    def add(self, logprobs: Sequence[TokenLogprobs], text: str, *, final: bool) -> None:
        """Add generated tokens, and the text that has become known with them."""
        for entry in logprobs:
            self._places.add_token(entry.token, entry.token_id, entry)
        self._places.add_text(text)
        for token in self._places.placed(final=final):
            self._append(token)

    def take(self) -> dict[str, Any]:
        """What was gathered since the last call."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._clear()
        return taken

    @property
    def is_empty(self) -> bool:
        """Whether nothing was gathered since the last `take`."""
        return not self._tokens

    def _placed_prompt(
        self, logprobs: Sequence[TokenLogprobs | None], token_ids: Sequence[int], text: str
    ) -> list[PlacedToken]:
        places = TokenPlaces(self._tools)
        for entry, token_id in zip(logprobs, token_ids, strict=False):  # not every model tells them
            shown = (
                self._tools.decode([token_id], skip_special_tokens=False) if entry is None else entry.token
            )
            places.add_token(shown, token_id, entry)
        places.add_text(text)
        placed = places.placed(final=True)
        if places.is_exact:
            return placed
        offsets = accumulate(
            (len(token.text) for token in placed), initial=0
        )  # the text is not that of the tokens
        return [token._replace(offset=offset) for token, offset in zip(placed, offsets, strict=False)]

    def _append(self, token: PlacedToken) -> None:
        name = f"token_id:{token.token_id}" if self._by_number else token.text
        self._tokens.append(name)
        self._offsets.append(token.offset)
        entry = token.logprobs
        if entry is None:
            self._token_logprobs.append(None)
            self._top.append(None)
            return
        own = _finite(entry.logprob)
        self._token_logprobs.append(own)
        top: dict[str, float] = {}
        likeliest = entry.top if self._top_number < 0 else entry.top[: self._top_number]
        for token_id, logprob, text in likeliest:  # of tokens with the same text the likeliest counts
            top.setdefault(f"token_id:{token_id}" if self._by_number else text, _finite(logprob))
        top.setdefault(name, own)
        self._top.append(top)


def prompt_logprobs(logprobs: Sequence[TokenLogprobs | None], top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token those of it and of the `top` most likely, by their ids."""
    return [None if entry is None else _by_id(entry, top) for entry in logprobs]


def _by_id(entry: TokenLogprobs, top: int) -> dict[str, Any]:
    ranked = [(entry.token_id, entry.logprob, entry.token, entry.rank)]
    ranked += [(*likely, rank) for rank, likely in enumerate(entry.top[:top], start=1)]
    found: dict[str, Any] = {}
    for token_id, logprob, text, rank in ranked:
        found.setdefault(str(token_id), {"logprob": _finite(logprob), "rank": rank, "decoded_token": text})
    return found


def chat_logprobs(
    logprobs: Sequence[TokenLogprobs], tools: TokenizerLike, *, by_number: bool = False
) -> list[dict[str, Any]]:
    """The entries of `logprobs.content` of a chat. `tools` know the bytes of tokens that are parts of characters."""

    def entry(token_id: int, logprob: float, text: str) -> dict[str, Any]:
        encoded = token_bytes(tools, text, token_id)
        return {
            "token": f"token_id:{token_id}" if by_number else text,
            "logprob": _finite(logprob),
            "bytes": None if encoded is None else list(encoded),
        }

    return [
        {
            **entry(one.token_id, one.logprob, one.token),
            "top_logprobs": [entry(*likely) for likely in one.top],
        }
        for one in logprobs
    ]


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
