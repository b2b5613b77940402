"""`POST /v1/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neso.frontends.openai.answer import Answer, AnswerKind, Choice, finish_name
from neso.frontends.openai.errors import ApiError, invalid, to_api_error
from neso.frontends.openai.logprobs import CompletionLogprobs
from neso.frontends.openai.options import OpenAIOptions
from neso.frontends.openai.prompts import Prompt, completion_prompts, is_too_long, prompt_text
from neso.frontends.openai.refusals import refuse_what_cannot_be_honoured
from neso.frontends.openai.sampling import COMPLETION_NAMES, completion_sampling, renamed
from neso.frontends.openai.schemas import CompletionRequest
from neso.frontends.openai.targets import Target, Targets
from neso.generation import CompletionDelta, GenerationOutput, InvalidParameter, TextTools, TokenLogprobs

if TYPE_CHECKING:
    from neso.server.tracing import Trace

KIND = AnswerKind(
    id_prefix="cmpl", whole="text_completion", chunk="text_completion", adds_special_tokens=True
)


class CompletionsApi:
    """Completes prompts."""

    def __init__(self, targets: Targets, options: OpenAIOptions) -> None:
        self._targets = targets
        self._options = options

    async def create(self, request: CompletionRequest, trace: Trace | None = None) -> Any:
        """The response, an ASGI application. Raises `ApiError` and what the core raises."""
        refuse_what_cannot_be_honoured(request)
        target = await self._targets.find(request.model)
        prompts = completion_prompts(request)
        sampling = completion_sampling(request, self._options)
        answer = Answer(
            KIND,
            request,
            target,
            self._choices(request, target, prompts),
            lambda error: _explain(error, request, target, prompts),
            count_completion=request.max_tokens != 0,
        )
        return await answer.respond(prompts, sampling, trace)

    def _choices(
        self, request: CompletionRequest, target: Target, prompts: list[Prompt]
    ) -> list[CompletionChoice]:
        n = request.n or 1
        echoes = [_Echo(prompt, target.text) if request.echo else None for prompt in prompts]
        return [
            CompletionChoice(
                number * n + i, echo, with_logprobs=request.logprobs is not None, mute=request.max_tokens == 0
            )
            for number, echo in enumerate(echoes)
            for i in range(n)
        ]


class CompletionChoice(Choice):
    """One choice of a text completion. A mute one shows its echo only, not what was generated."""

    def __init__(self, index: int, echo: _Echo | None, *, with_logprobs: bool, mute: bool) -> None:
        self._index = index
        self._echo = echo
        self._echoed = False
        self._logprobs = CompletionLogprobs() if with_logprobs else None
        self._mute = mute
        self._text: list[str] = []
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None

    def stream(self, output: GenerationOutput, delta: CompletionDelta) -> list[dict[str, Any]]:
        text = self._advance(output, delta)
        if not text and not delta.logprobs and self._finish_reason is None:
            return []  # a part of a character, or of what may become a stop string
        return [self._as_dict(text)]

    def gather(self, output: GenerationOutput, delta: CompletionDelta) -> None:
        self._text.append(self._advance(output, delta))

    def gathered(self) -> dict[str, Any]:
        return self._as_dict("".join(self._text))

    def _advance(self, output: GenerationOutput, delta: CompletionDelta) -> str:
        """Take note of a delta; the text that it adds, after the echo."""
        if delta.finish_reason is not None:
            reason = finish_name(delta.finish_reason)
            self._finish_reason = "length" if self._mute else reason
            self._stop_reason = None if self._mute else delta.stop_reason
        text = "" if self._mute else delta.text
        if self._echo is not None:
            self._echo.note(output)
            if not self._echoed:
                self._echoed = True
                text = self._echo.text + text
                if self._logprobs is not None:
                    self._echo.add_logprobs(self._logprobs)
        if self._logprobs is not None and delta.logprobs and not self._mute:
            self._logprobs.add(delta.logprobs)
        return text

    def _as_dict(self, text: str) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": text,
            "logprobs": None if self._logprobs is None else self._logprobs.take(),
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
        }


class _Echo:
    """A prompt as its choices give it back. Its log probabilities come once, whichever choice is first."""

    def __init__(self, prompt: Prompt, text: TextTools) -> None:
        self.text = prompt_text(prompt, text)
        self._tools = text
        self._first_token = ""
        self._logprobs: list[TokenLogprobs | None] = []

    def note(self, output: GenerationOutput) -> None:
        """Keep what the first output says of the prompt."""
        if output.prompt_logprobs is not None:
            self._logprobs = output.prompt_logprobs
            self._first_token = self._tools.decode(output.prompt_token_ids[:1], skip_special_tokens=False)

    def add_logprobs(self, logprobs: CompletionLogprobs) -> None:
        """Put the prompt's in front."""
        logprobs.add_prompt(self._logprobs, self._first_token, self.text)


def _explain(
    error: InvalidParameter, request: CompletionRequest, target: Target, prompts: list[Prompt]
) -> ApiError:
    limit = target.language_model.max_model_len
    special = request.add_special_tokens is not False
    if error.field == "prompt" and any(
        is_too_long(prompt, target.text, limit, special) for prompt in prompts
    ):
        return invalid(
            "prompt",
            f"This model's maximum context length is {limit} tokens: {error.message}",
            "context_length_exceeded",
        )
    return renamed(error, COMPLETION_NAMES) if error.field in COMPLETION_NAMES else to_api_error(error)
