"""Log probabilities in the formats of the OpenAI API, and the alignment of tokens with text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from neso.generation import TokenizerLike, TokenLogprobs
from neso.generation.language_model import TokenBytes

_MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent; the same value as in other servers."""
_LOOK_AHEAD = 16
"""Maximum bytes of text between two tokens, for example because of normalization by the tokenizer."""


class AlignedToken(NamedTuple):
    """A token with its log probabilities (None for the first of a prompt) and its character offset in the text."""

    text: str
    token_id: int
    logprobs: TokenLogprobs | None
    offset: int


class TokenAligner:
    """Finds the character offset of each token while text is appended.

    A token is aligned once its text is known. Tokens whose text is held back, as part of a character or of a possible
    stop string, stay pending. Special tokens have no text; their offset is the current position.
    """

    def __init__(self, tokenizer: TokenizerLike, offset: int = 0) -> None:
        """`offset`: characters before this text."""
        self._tokenizer = tokenizer
        self._offset = offset
        self._text = b""  # text that is not dropped yet
        self._position = 0  # index in `_text` after the last aligned token
        self._pending: deque[tuple[str, int, TokenLogprobs | None]] = deque()

    def add_text(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._position :] + text.encode("utf-8", "surrogatepass")
        self._position = 0

    def add_token(self, text: str, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Append a token. `text`: the token decoded alone."""
        self._pending.append((text, token_id, logprobs))

    def take(self, *, final: bool) -> list[AlignedToken]:
        """Return the tokens that can be aligned now, or all pending tokens if the text is `final`."""
        aligned = []
        while self._pending:
            text, token_id, logprobs = self._pending[0]
            encoded = token_bytes(self._tokenizer, text, token_id) or text.encode("utf-8", "surrogatepass")
            skipped, length = self._match(encoded, final=final)
            if length < 0:
                break
            self._advance(skipped)
            aligned.append(AlignedToken(text, token_id, logprobs, self._character()))
            self._advance(length)
            self._pending.popleft()
        return aligned

    @property
    def is_exact(self) -> bool:
        """Whether the aligned tokens cover the text exactly."""
        return self._position == len(self._text)

    def _match(self, token: bytes, *, final: bool) -> tuple[int, int]:
        """Return the bytes to skip before the token and the bytes of the token; (0, -1) if more text is needed."""
        start = self._position
        for shown in (token, token.lstrip(b" ")):  # decoding may drop the space before the first word
            here = self._text[start : start + len(shown)]
            if here == shown:
                return 0, len(shown)
            if shown.startswith(here):  # the text ends within the token
                return (0, len(here)) if final else (0, -1)
        found = self._text.find(token, start, start + len(token) + _LOOK_AHEAD)
        return (found - start, len(token)) if found > start else (0, 0)

    def _advance(self, length: int) -> None:
        start, self._position = self._position, self._position + length
        self._offset += sum(byte & 0xC0 != 0x80 for byte in self._text[start : self._position])

    def _character(self) -> int:
        """Return the offset of the character at the current position."""
        inside = not self.is_exact and self._text[self._position] & 0xC0 == 0x80
        return self._offset - inside


def token_bytes(tokenizer: TokenizerLike, text: str, token_id: int) -> bytes | None:
    """Return the bytes of a token that decodes to `text`; None for an unknown part of a character."""
    if "\ufffd" not in text:
        return text.encode("utf-8", "surrogatepass")
    return tokenizer.token_bytes(token_id) if isinstance(tokenizer, TokenBytes) else None


class CompletionLogprobs:
    """The `logprobs` object of a text completion, built incrementally.

    `text_offset` counts characters of the choice's whole text, including the echoed prompt, across chunks. A token is
    reported in the same chunk as its text.
    """

    def __init__(self, tokenizer: TokenizerLike, top: int, *, as_ids: bool) -> None:
        """`top`: entries per token, -1 for all; `as_ids`: name tokens `token_id:N`."""
        self._tokenizer = tokenizer
        self._num_top = top
        self._as_ids = as_ids
        self._aligner = TokenAligner(tokenizer)
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(
        self, logprobs: Sequence[TokenLogprobs | None], token_ids: Sequence[int], text: str
    ) -> None:
        """Add the echoed prompt, whose first token has no log probability."""
        for token in self._align_prompt(logprobs, token_ids, text):
            self._append(token)
        self._aligner = TokenAligner(self._tokenizer, len(text))

    def add(self, logprobs: Sequence[TokenLogprobs], text: str, *, final: bool) -> None:
        """Add generated tokens and text."""
        for entry in logprobs:
            self._aligner.add_token(entry.token, entry.token_id, entry)
        self._aligner.add_text(text)
        for token in self._aligner.take(final=final):
            self._append(token)

    def take(self) -> dict[str, Any]:
        """Return the object for the tokens added since the last call."""
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
        """Whether no token was added since the last `take`."""
        return not self._tokens

    def _align_prompt(
        self, logprobs: Sequence[TokenLogprobs | None], token_ids: Sequence[int], text: str
    ) -> list[AlignedToken]:
        aligner = TokenAligner(self._tokenizer)
        for entry, token_id in zip(logprobs, token_ids, strict=False):  # some models do not report token ids
            shown = (
                self._tokenizer.decode([token_id], skip_special_tokens=False)
                if entry is None
                else entry.token
            )
            aligner.add_token(shown, token_id, entry)
        aligner.add_text(text)
        tokens = aligner.take(final=True)
        if aligner.is_exact:
            return tokens
        # The text differs from the tokens' text: count the characters of the tokens.
        offsets = accumulate((len(token.text) for token in tokens), initial=0)
        return [token._replace(offset=offset) for token, offset in zip(tokens, offsets, strict=False)]

    def _append(self, token: AlignedToken) -> None:
        name = f"token_id:{token.token_id}" if self._as_ids else token.text
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
        likeliest = entry.top if self._num_top < 0 else entry.top[: self._num_top]
        for token_id, logprob, text in likeliest:  # keep the most likely of several tokens with the same text
            top.setdefault(f"token_id:{token_id}" if self._as_ids else text, _finite(logprob))
        top.setdefault(name, own)
        self._top.append(top)


def prompt_logprobs(logprobs: Sequence[TokenLogprobs | None], top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per prompt token, entries of it and of the `top` most likely tokens, by token id."""
    return [None if entry is None else _by_token_id(entry, top) for entry in logprobs]


def _by_token_id(entry: TokenLogprobs, top: int) -> dict[str, Any]:
    ranked = [(entry.token_id, entry.logprob, entry.token, entry.rank)]
    ranked += [(*likely, rank) for rank, likely in enumerate(entry.top[:top], start=1)]
    found: dict[str, Any] = {}
    for token_id, logprob, text, rank in ranked:
        found.setdefault(str(token_id), {"logprob": _finite(logprob), "rank": rank, "decoded_token": text})
    return found


def chat_logprobs(
    logprobs: Sequence[TokenLogprobs], tokenizer: TokenizerLike, *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """Return the entries of a chat completion's `logprobs.content`."""

    def entry(token_id: int, logprob: float, text: str) -> dict[str, Any]:
        encoded = token_bytes(tokenizer, text, token_id)
        return {
            "token": f"token_id:{token_id}" if as_ids else text,
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
    return max(logprob, _MIN_LOGPROB)
