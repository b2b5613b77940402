"""Token ids to text while they are generated: never half a character, and nothing is taken back."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from neso.engine.text.token_pieces import TokenPieces, token_name

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

REPLACEMENT = "\ufffd"
MAX_CHAR_TOKENS = 4
"""Most tokens that one character can be spread over: UTF-8 has at most 4 bytes."""


class Detokenizer(Protocol):
    """Incremental text of one sequence.

    The texts that `add` and `finish` return, joined, equal the decoding of all tokens at once.
    """

    def add(self, token_ids: Sequence[int]) -> str:
        """Text that is final now that `token_ids` follow; empty while a character is incomplete."""

    def finish(self) -> str:
        """What was held back: U+FFFD if the sequence ended within a character, else nothing."""


# Which way is faster (one core of a Xeon; µs a token, tokens added one by one):
#   byte-level: PieceDetokenizer 0.3, WindowDetokenizer 2.2, the library's DecodeStream 0.6;
#   Llama style: 0.3, 3.0, 1.3. WordPiece: WindowDetokenizer 3.5, DecodeStream 2.1.
# DecodeStream is not used: it holds everything back while the text ends in U+FFFD, so a model that emits
# stray bytes makes it quadratic; it raises when such bytes change its window's text; and it has no flush.


class PieceDetokenizer:
    """For tokenizers that decode token by token (byte-level, byte-fallback, Metaspace): joins bytes as UTF-8.

    It differs from the library in one case: in a run of byte-fallback tokens that is not UTF-8, the library
    replaces every byte, also of characters that are complete. They may be out already (and newline is such a
    token in Llama 2, on which a stop string must act at once), so here only the invalid bytes become U+FFFD,
    by the rule of the Unicode standard that byte-level tokenizers follow too.
    """

    def __init__(
        self, pieces: TokenPieces, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """`prompt_token_ids` make the text a continuation: it keeps the space that starts a text of its own.

        A character whose first bytes are in the prompt is returned whole.
        """
        self._pieces = pieces
        self._skip = skip_special_tokens
        self._pending = b""
        self._at_start = True  # no token of the text seen yet
        self._strip_left = pieces.rule.strip_count  # spaces that may still be dropped from the text's start
        if len(prompt_token_ids) > MAX_CHAR_TOKENS:
            # Of a prompt only an incomplete character at its end matters.
            prompt_token_ids = prompt_token_ids[-MAX_CHAR_TOKENS:]
            self._at_start = False
            self._strip_left = 0
        self.add(prompt_token_ids)

    def add(self, token_ids: Sequence[int]) -> str:
        if self._at_start:
            first, taken = self._pieces.first(token_ids, skip_special_tokens=self._skip)
            if not taken:
                return ""
            self._at_start = False
            data = first + self._pieces.join(token_ids[taken:], skip_special_tokens=self._skip)
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
        """Drop what the tokenizer puts before the first word."""
        rest = text.lstrip(self._pieces.rule.strip_char)
        dropped = min(len(text) - len(rest), self._strip_left)
        self._strip_left = 0 if rest else self._strip_left - dropped
        return text[dropped:]


class WindowDetokenizer:
    """For any other decoder (WordPiece and the like): decodes a window of the last few tokens.

    tokens    … a b | c d
                ^prefix ^read: the text of [prefix, read) is out; what [prefix, end) has more is new.

    The tokens before `read` are there because a token's text may depend on its neighbour (spaces, "##").
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_ids: frozenset[int] = frozenset(),
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """`special_ids` are left out of the text. `prompt_token_ids` make the text a continuation."""
        self._backend = backend
        self._special_ids = special_ids
        self._window = self._visible(prompt_token_ids[-2 * MAX_CHAR_TOKENS :])
        self._read = len(self._window)

    def add(self, token_ids: Sequence[int]) -> str:
        # Tokens without text must not start the window: what follows would look like the first of a text.
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
        # A stray byte in the window that another has joined.
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


class DetokenizerWithout:
    """A detokenizer that leaves some tokens out."""

    def __init__(self, detokenizer: Detokenizer, hidden: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._hidden = hidden

    def add(self, token_ids: Sequence[int]) -> str:
        return self._detokenizer.add([token for token in token_ids if token not in self._hidden])

    def finish(self) -> str:
        return self._detokenizer.finish()
