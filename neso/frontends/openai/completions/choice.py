"""One choice of a text completion."""

from __future__ import annotations

from typing import Any

from neso.frontends.openai.answers.answer import Choice, finish_name
from neso.frontends.openai.answers.logprobs import CompletionLogprobs
from neso.frontends.openai.answers.prompt_record import PromptRecord
from neso.frontends.openai.requests.schemas import CompletionRequest
from neso.generation import Completion, GenerationOutput, TokenizerLike


class CompletionChoice(Choice):
    """A choice shows its echo, then what was generated; with `max_tokens` 0 not the latter."""

    def __init__(
        self, index: int, request: CompletionRequest, prompt: PromptRecord, text: TokenizerLike
    ) -> None:
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

    @property
    def has_ended(self) -> bool:
        return self._finish_reason is not None

    def stream(self, output: GenerationOutput, delta: Completion) -> list[dict[str, Any]]:
        self.gather(output, delta)
        nothing_new = not any(self._text) and (self._logprobs is None or self._logprobs.is_empty)
        if nothing_new and self._finish_reason is None:
            return []  # a part of a character, or of what may become a stop string
        return [self.gathered()]

    def gather(self, output: GenerationOutput, delta: Completion) -> None:
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
        if self._request.return_token_ids:
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
            choice |= self._prompt.about()
        return choice

    def _begin(self) -> None:
        if not self._request.echo:
            return
        self._text.append(self._prompt.echo)
        if self._logprobs is not None:
            self._logprobs.add_prompt(self._prompt.logprobs, self._prompt.token_ids, self._prompt.echo)
