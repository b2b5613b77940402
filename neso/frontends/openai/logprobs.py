"""Log probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neso.generation import TokenLogprobs

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say; the same number as in other servers."""


class CompletionLogprobs:
    """The `logprobs` object of a text completion, gathered over any number of deltas.

    `text_offset` counts characters of the choice's whole text, its echoed prompt included, so in a stream it
    goes on from chunk to chunk.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(self, logprobs: Sequence[TokenLogprobs | None], first_token: str, text: str) -> None:
        """Begin with the echoed prompt, whose first token has no probability."""
        for position, entry in enumerate(logprobs):
            token = first_token if entry is None else entry.token
            self._append(token, entry)
            if position == 0 and not text.startswith(token):
                self._offset = 0  # a token that the tokenizer put in front, and that `text` does not hold

    def add(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add generated tokens."""
        for entry in logprobs:
            self._append(entry.token, entry)

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

    def _append(self, token: str, entry: TokenLogprobs | None) -> None:
        self._tokens.append(token)
        self._offsets.append(self._offset)
        self._offset += len(token)
        if entry is None:
            self._token_logprobs.append(None)
            self._top.append(None)
            return
        own = _finite(entry.logprob)
        self._token_logprobs.append(own)
        top: dict[str, float] = {}
        for _, logprob, text in entry.top:  # of tokens with the same text the likeliest counts
            top.setdefault(text, _finite(logprob))
        top.setdefault(entry.token, own)
        self._top.append(top)


def chat_logprobs(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """The entries of `logprobs.content` of a chat."""
    return [
        {
            **_chat_token(entry.token, entry.logprob),
            "top_logprobs": [_chat_token(text, logprob) for _, logprob, text in entry.top],
        }
        for entry in logprobs
    ]


def _chat_token(token: str, logprob: float) -> dict[str, Any]:
    # A token that is a part of a character has no text of its own, and its bytes are not known here.
    known = "\ufffd" not in token
    return {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode()) if known else None}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
