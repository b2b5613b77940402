"""One choice of a text completion."""

from __future__ import annotations

from typing import Any

from neso.frontends.openai.answer import Choice, finish_name
from neso.frontends.openai.logprobs import CompletionLogprobs, prompt_logprobs
from neso.frontends.openai.prompts import Prompt, prompt_text
from neso.frontends.openai.schemas import CompletionRequest
from neso.generation import CompletionDelta, GenerationOutput, TextTools, TokenLogprobs


class PromptRecord:
    """What the choices of one prompt tell of it. The engine tells it once, whichever choice is first."""

    def __init__(self, request: CompletionRequest, prompt: Prompt, text: TextTools) -> None:
        self.echo = prompt_text(prompt, text) if request.echo else ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []

    def note(self, output: GenerationOutput) -> None:
        """Keep what the first output says of the prompt."""
        self.token_ids = self.token_ids or output.prompt_token_ids
        self.logprobs = self.logprobs or output.prompt_logprobs or []


class CompletionChoice(Choice):
    """A choice shows its echo, then what was generated; with `max_tokens` 0 not the latter."""

    def __init__(self, index: int, request: CompletionRequest, prompt: PromptRecord, text: TextTools) -> None:
        self._index = index
        self._request = request
        self._prompt = prompt
        self._mute = request.max_tokens == 0
        self._logprobs: CompletionLogprobs | None = None
        if request.logprobs is not None:
            by_number = bool(request.return_tokens_as_token_ids)
            self._logprobs = CompletionLogprobs(text, request.logprobs, by_number=by_number)
        self._begun = False
        self._told_prompt = False
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None

    def stream(self, output: GenerationOutput, delta: CompletionDelta) -> list[dict[str, Any]]:
        self.gather(output, delta)
        nothing_new = not any(self._text) and (self._logprobs is None or self._logprobs.is_empty)
        if nothing_new and self._finish_reason is None:
            return []  # a part of a character, or of what may become a stop string
        return [self.gathered()]

    def gather(self, output: GenerationOutput, delta: CompletionDelta) -> None:
        self._prompt.note(output)
        if not self._begun:
            self._begun = True
            self._begin()
        if delta.finish_reason is not None:
            reason = finish_name(delta.finish_reason)
            self._finish_reason = "length" if self._mute else reason
            self._stop_reason = None if self._mute else delta.stop_reason
        if self._mute:
            return
        self._text.append(delta.text)
        self._token_ids += delta.token_ids
        if self._logprobs is not None:
            self._logprobs.add(delta.logprobs or [], delta.text, final=delta.finish_reason is not None)

    def gathered(self) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": self._index,
            "text": "".join(self._text),
            "logprobs": None if self._logprobs is None else self._logprobs.take(),
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
        }
        self._text.clear()
        if self._request.return_token_ids:
            choice["token_ids"], self._token_ids = self._token_ids, []
        if not self._told_prompt:
            self._told_prompt = True
            choice |= self._about_prompt()
        return choice

    def _begin(self) -> None:
        if not self._request.echo:
            return
        self._text.append(self._prompt.echo)
        if self._logprobs is not None:
            self._logprobs.add_prompt(self._prompt.logprobs, self._prompt.token_ids, self._prompt.echo)

    def _about_prompt(self) -> dict[str, Any]:
        request = self._request
        about: dict[str, Any] = {}
        if request.return_token_ids:
            about["prompt_token_ids"] = self._prompt.token_ids
        if request.prompt_logprobs is not None:
            about["prompt_logprobs"] = prompt_logprobs(self._prompt.logprobs, request.prompt_logprobs)
        return about
