"""Synthetic text with an exact number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np

from neso.engine.text.tokenizer import Tokenizer
from neso.engine.text.tokenizer_files import TokenizerError
from neso.engine.weights.hub import TOKENIZER_FILES, ModelNotFound, resolve_model
from neso.perf.errors import PerfError
from neso.perf.inputs.words import FILLERS, WORDS

_MAX_CORRECTIONS = 8


def load_tokenizer(name: str | Path, revision: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model directory, a tokenizer.json or GGUF file, a bundled model, or a hub name.

    Raises `PerfError` if there is none.
    """
    path = Path(name).expanduser()
    try:
        if path.name == "tokenizer.json" and path.is_file():
            return Tokenizer.from_directory(path.parent)
        return Tokenizer.from_model(resolve_model(name, revision, patterns=TOKENIZER_FILES))
    except (ModelNotFound, TokenizerError, OSError) as error:
        raise PerfError(f"--tokenizer {name}: {error}") from None


class SyntheticText:
    """Writes texts of random words. Tokens are counted without special tokens around the text."""

    def __init__(self, tokenizer: Tokenizer, rng: np.random.Generator) -> None:
        self._tokenizer = tokenizer
        self._rng = rng

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def _words(self) -> tuple[list[str], np.ndarray]:
        """Words with a leading space, and the number of tokens of each."""
        words = [f" {word}" for word in dict.fromkeys(WORDS)]
        ids = self._tokenizer.encode_batch(words, add_special_tokens=False)
        return words, np.array([len(one) for one in ids])

    def text(self, tokens: int, *, after: str = "", count: Callable[[str], int] | None = None) -> str:
        """Return a text with exactly `tokens` tokens that starts with `after`.

        `count` replaces the count of tokens, for example by that of a rendered chat template. Raises `PerfError` if
        `after` and the template alone have more tokens, or if the vocabulary cannot represent the number.
        """
        count = count or self.count
        least = count(after)
        if tokens == least:
            return after
        if tokens < least:
            raise PerfError(
                f"a prompt of {tokens} tokens cannot start with {least} tokens of prefix and template"
            )
        words = self._draw(tokens - least)
        return self._corrected(after, words, tokens, count)

    def _draw(self, tokens: int) -> list[str]:
        """Return random words that have about `tokens` tokens together."""
        words, sizes = self._words
        chosen: list[str] = []
        while tokens > 0:
            indexes = self._rng.integers(len(words), size=tokens)
            ends = np.cumsum(sizes[indexes])
            taken = max(1, int(np.searchsorted(ends, tokens, side="right")))
            chosen += [words[i] for i in indexes[:taken]]
            tokens -= int(ends[taken - 1])
        return chosen

    def _corrected(self, after: str, words: list[str], tokens: int, count: Callable[[str], int]) -> str:
        """Drop words and append fillers until the text has exactly `tokens` tokens."""

        def joined() -> str:
            body = "".join(words)
            return after + body if after else body.lstrip(" ")

        for _ in range(_MAX_CORRECTIONS):
            missing = tokens - count(joined())
            if missing == 0:
                return joined()
            if missing < 0:
                del words[missing:]
            else:
                words += self._single_token_words(missing)
        return self._filled(joined(), tokens, count)

    @staticmethod
    def _filled(text: str, tokens: int, count: Callable[[str], int]) -> str:
        """Approach the number one filler at a time, for vocabularies in which words merge with their neighbours."""
        while text and count(text) > tokens:
            text = text[: text.rstrip(" ").rfind(" ") + 1].rstrip(" ")
        for _ in range(tokens + len(FILLERS)):
            if count(text) == tokens:
                return text
            sizes = {filler: count(text + filler) for filler in FILLERS}
            fitting = [filler for filler in sizes if sizes[filler] <= tokens]
            if not fitting:
                break
            text += max(fitting, key=lambda filler: sizes[filler])
        raise PerfError(f"found no text of exactly {tokens} tokens for this tokenizer")

    def _single_token_words(self, number: int) -> list[str]:
        words, sizes = self._words
        single = np.flatnonzero(sizes == 1)
        if not len(single):
            return [FILLERS[int(self._rng.integers(len(FILLERS)))]]
        return [words[int(self._rng.choice(single))] for _ in range(number)]
