"""From the texts of a model's responses to the text that its client gets."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from neso.engine.text.sequence_text import StopChecker

_PART_OF_CHARACTER = "\ufffd"


class AnswerText:
    """One sequence. A response's text is new, or with `accumulates` all that there is so far.

    The first of `prompts` that the text begins with is left out: how a model that repeats the prompt may write it. A
    text that is no more than the prompt is an answer of its own, of a model that gives back what it is told.
    """

    def __init__(
        self,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        prompts: Sequence[str] = (),
        accumulates: bool = False,
    ) -> None:
        self._stop = StopChecker(stop, include_stop_str_in_output=include_stop)
        self._accumulates = accumulates
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prompts = [prompt for prompt in prompts if prompt]
        self._seen = ""
        self._held = ""

    @property
    def stop_reason(self) -> str | None:
        """The stop string that has ended the text."""
        return self._stop.matched

    def add(self, text: bytes, *, match_stop: bool = True) -> str:
        """What the client gets for a response's text."""
        fresh = self._fresh(text)
        if self._prompts:
            self._held += fresh
            fresh = self._without_prompt()
        return self._stop.add(fresh, match=match_stop).text

    def finish(self) -> str:
        """The rest, when no more responses come."""
        held = self._held + self._decoder.decode(b"", final=True)
        self._held, self._prompts = "", []
        return self._stop.add(held).text + self._stop.flush()

    def _fresh(self, text: bytes) -> str:
        if not self._accumulates:
            return self._decoder.decode(text)
        whole = text.decode("utf-8", "replace").rstrip(_PART_OF_CHARACTER)
        fresh = whole[len(self._seen) :] if whole.startswith(self._seen) else ""
        self._seen += fresh
        return fresh

    def _without_prompt(self) -> str:
        """What is held, once it is known whether the prompt comes first."""
        text = self._held.lstrip()  # detokenizers may lose the space before the first word, or add one
        for prompt in map(str.lstrip, self._prompts):
            if text.startswith(prompt) and len(text) > len(prompt):
                self._held, self._prompts = "", []
                return text[len(prompt) :]
        if any(prompt.lstrip().startswith(text) for prompt in self._prompts):
            return ""
        held, self._held, self._prompts = self._held, "", []
        return held
