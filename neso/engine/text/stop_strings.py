"""Stop strings and stop words: the text of a sequence up to the first match."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from neso.engine.text.detokenizer import Detokenizer


class StopResult(NamedTuple):
    """Text that can be output, and the stop string that ended it, if any."""

    text: str
    matched: str | None


class StopChecker:
    """Finds stop strings in the text of one sequence as it grows.

    The stop string that ends first wins; if two end at the same character, the longer one wins. The result equals that
    of generation character by character, so it does not depend on the tokenization of the text. (Preferring the stop
    string that starts first would require waiting: with "abcd" and "bc", "abc" could not stop.)
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        """Raises `ValueError` for an empty stop string."""
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._held = ""  # end of the text so far that may be the start of a stop string
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found, or None."""
        return self._matched

    def add(self, text: str, *, match: bool = True) -> StopResult:
        """Append text and return the part that can be output. After a match it is empty.

        With `match=False`, a stop string that ends within `text` is ignored; one that starts there is not.
        """
        if not self._stop:
            return StopResult(text, None)
        if self._matched is not None or not text:
            return StopResult("", self._matched)
        buffer = self._held + text
        if match and (found := self._find(buffer, len(self._held))) is not None:
            start, self._matched = found
            self._held = ""
            return StopResult(buffer[: start + len(self._matched) if self._include else start], self._matched)
        safe = len(buffer) - self._possible_start(buffer)
        self._held = buffer[safe:]
        return StopResult(buffer[:safe], None)

    def flush(self) -> str:
        """Return the held-back text at the end of the sequence. Empty after a match."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str, old: int) -> tuple[int, str] | None:
        """Return start and text of the stop string that ends first in `buffer`, beyond its first `old` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = buffer.find(stop, max(0, old + 1 - len(stop)))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else best[1:]

    def _possible_start(self, buffer: str) -> int:
        """Return the length of the longest suffix of `buffer` that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stop:
            at = max(0, len(buffer) - len(stop) + 1)
            # Check only suffixes longer than the best so far that start with the right character.
            while (at := buffer.find(stop[0], at, len(buffer) - longest)) >= 0:
                if stop.startswith(buffer[at:]):
                    longest = len(buffer) - at
                    break
                at += 1
        return longest


Word = tuple[int, ...]


class _PartialMatch(NamedTuple):
    """The first `length` tokens of the sorted words [start, end) have occurred; each of these words is longer."""

    length: int
    start: int
    end: int


class StopWords:
    """Stop words (token sequences that end a sequence), sorted so that words with a common prefix are adjacent."""

    def __init__(self, words: Iterable[Word]) -> None:
        self.words = sorted(set(words))
        self._first_tokens = frozenset(word[0] for word in self.words)

    def start(self, token: int) -> _PartialMatch | None:
        """Return the words that start with `token` and are longer."""
        whole = _PartialMatch(0, 0, len(self.words))
        return self.extend(whole, token) if token in self._first_tokens else None

    def extend(self, partial: _PartialMatch, token: int) -> _PartialMatch | None:
        """Return the words of `partial` that continue with `token` and are longer."""
        length, start, end = partial

        def next_token(word: Word) -> int:
            return word[length]

        start = bisect_left(self.words, token, start, end, key=next_token)
        end = bisect_right(self.words, token, start, end, key=next_token)
        if start < end and len(self.words[start]) == length + 1:
            start += 1  # a complete word sorts before longer words with the same prefix
        return _PartialMatch(length + 1, start, end) if start < end else None


class StopWordFilter:
    """Holds back the tokens of one sequence that may become a stop word; the engine core detects complete ones.

    A token costs two binary searches for every position where a stop word may have started.
    """

    def __init__(self, words: StopWords) -> None:
        self._words = words
        self._partial: list[_PartialMatch] = []  # longest first
        self._held: list[int] = []

    @property
    def num_held(self) -> int:
        return len(self._held)

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """Append tokens and return the tokens that can be output."""
        tokens = [*self._held, *token_ids]
        for token in token_ids:
            extended = [self._words.extend(partial, token) for partial in self._partial]
            self._partial = [p for p in (*extended, self._words.start(token)) if p is not None]
        safe = len(tokens) - (self._partial[0].length if self._partial else 0)
        self._held = tokens[safe:]
        return tokens[:safe]

    def finish(self, token_ids: Sequence[int], *, by_word: bool) -> tuple[list[int], Word | None]:
        """Append the last tokens; return the rest of the output, and the stop word removed from its end.

        `by_word`: a stop word ended the sequence.
        """
        tokens, self._held = [*self._held, *token_ids], []
        ends = [word for word in self._words.words if tuple(tokens[-len(word) :]) == word] if by_word else []
        if not ends:
            return tokens, None
        longest = max(ends, key=len)
        return tokens[: -len(longest)], longest


class TextDelta(NamedTuple):
    """Text added by some tokens.

    `stop_reason` is the stop string that ended the text, or None. `num_tokens_kept` counts the tokens up to and
    including the one that completed the stop string; the tokens after it are dropped.
    """

    text: str
    stop_reason: str | None
    num_tokens_kept: int


class SequenceText:
    """Output text of one sequence: incremental detokenization with stop strings."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Stop strings that end within the first `min_tokens` tokens are ignored."""
        self._detokenizer = detokenizer
        self._checker = StopChecker(stop, include_stop_str_in_output=include_stop_str_in_output)
        self._has_stop = bool(stop)
        self._min_tokens_left = min_tokens

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._checker.matched

    def add(self, token_ids: Sequence[int]) -> TextDelta:
        """Append tokens and return the text that can be output. After a stop string all tokens are dropped."""
        if not self._has_stop:
            return TextDelta(self._detokenizer.add(token_ids), None, len(token_ids))
        if self._checker.matched is not None:
            return TextDelta("", self._checker.matched, 0)
        shown = ""
        for kept, token_id in enumerate(token_ids, start=1):
            text, matched = self._check(self._detokenizer.add((token_id,)))
            shown += text
            if matched is not None:
                return TextDelta(shown, matched, kept)
        return TextDelta(shown, None, len(token_ids))

    def finish(self) -> str:
        """Return the held-back text at the end of the sequence. Empty after a stop string."""
        if self._checker.matched is not None:
            return ""
        text, _ = self._checker.add(self._detokenizer.finish(), match=self._min_tokens_left <= 0)
        return text + self._checker.flush()

    def _check(self, text: str) -> StopResult:
        """Check the text of one more token."""
        match = self._min_tokens_left <= 0
        self._min_tokens_left -= 1
        return self._checker.add(text, match=match)
