"""Stop strings: text ends where one of them is complete, and no part of it is shown before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """Text that may be shown now, and the stop string that ended it, if one did."""

    text: str
    matched: str | None


class StopChecker:
    """Looks for stop strings in the text of one sequence as it grows.

    The stop string that is complete first wins; of two that are complete at the same character, the longer.
    This is what generation character by character gives, so the result does not depend on how the text is cut
    into tokens and chunks. (Preferring the one that starts first would have to wait for text that may never
    come: with "abcd" and "bc", "abc" would have to go on.)
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
        """The stop string that was found, None while there is none."""
        return self._matched

    def add(self, text: str, *, match: bool = True) -> StopResult:
        """Take in more text; returns what may be shown. After a match nothing more comes.

        With `match=False` a stop string that ends within `text` does not count; one that starts there can.
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
        """The text that was held back, when no more comes. Empty after a match."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str, old: int) -> tuple[int, str] | None:
        """Start and text of the stop string that ends first in `buffer`, beyond its first `old` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = buffer.find(stop, max(0, old + 1 - len(stop)))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else best[1:]

    def _possible_start(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that a stop string starts with, and goes on after."""
        longest = 0
        for stop in self._stop:
            at = max(0, len(buffer) - len(stop) + 1)
            # Only ends that are longer than the best so far matter, and that start with the right character.
            while (at := buffer.find(stop[0], at, len(buffer) - longest)) >= 0:
                if stop.startswith(buffer[at:]):
                    longest = len(buffer) - at
                    break
                at += 1
        return longest
