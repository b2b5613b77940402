"""What an answer tells of its prompt."""

from __future__ import annotations

from typing import Any

from neso.frontends.openai.answers.logprobs import prompt_logprobs
from neso.frontends.openai.requests.schemas import GenerationFields
from neso.generation import GenerationOutput, TokenLogprobs


class PromptRecord:
    """Keeps what the engine tells of a prompt once, with whichever choice is first. `echo` is its text, if wanted."""

    def __init__(self, request: GenerationFields, echo: str = "") -> None:
        self.echo = echo
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self._request = request

    def note(self, output: GenerationOutput) -> None:
        """Keep what the first output says of the prompt."""
        self.token_ids = self.token_ids or output.prompt_token_ids
        self.logprobs = self.logprobs or output.prompt_logprobs or []

    def about(self) -> dict[str, Any]:
        """The fields that the client asked for."""
        request = self._request
        about: dict[str, Any] = {}
        if request.return_token_ids:
            about["prompt_token_ids"] = self.token_ids
        if request.prompt_logprobs is not None:
            about["prompt_logprobs"] = prompt_logprobs(self.logprobs, request.prompt_logprobs)
        return about
