"""The text of one sequence: its tokens as text, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from neso.engine.text.detokenizer import Detokenizer
from neso.engine.text.stop_strings import StopChecker, StopResult


class TextDelta(NamedTuple):
    """What tokens added to the text of a sequence.

    `stop_reason` is the stop string that ended the text, else None. `num_tokens_kept` counts the given tokens
    up to and with the one that completed the stop string; the sequence does not have those after it.
    """

    text: str
    stop_reason: str | None
    num_tokens_kept: int


class SequenceText:
    """Turns the tokens of one sequence into the text that the client sees."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """A stop string counts only if it ends in text that comes after the first `min_tokens` tokens."""
        self._detokenizer = detokenizer
        self._checker = StopChecker(stop, include_stop_str_in_output=include_stop_str_in_output)
        self._has_stop = bool(stop)
        self._min_tokens_left = min_tokens

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the text, None while there is none."""
        return self._checker.matched

    def add(self, token_ids: Sequence[int]) -> TextDelta:
        """Text that may be shown now that `token_ids` follow. After a stop string: nothing; no token kept."""
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
        """The rest of the text when no more tokens come: what was held back. Empty after a stop string."""
        if self._checker.matched is not None:
            return ""
        text, _ = self._checker.add(self._detokenizer.finish(), match=self._min_tokens_left <= 0)
        return text + self._checker.flush()

    def _check(self, text: str) -> StopResult:
        """Check the text of one more token."""
        match = self._min_tokens_left <= 0
        self._min_tokens_left -= 1
        return self._checker.add(text, match=match)
