"""`POST /v1/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neso.frontends.openai.answers.answer import Answer, AnswerKind
from neso.frontends.openai.answers.prompt_record import PromptRecord
from neso.frontends.openai.completions.choice import CompletionChoice
from neso.frontends.openai.completions.prompts import completion_prompts
from neso.frontends.openai.completions.sampling import completion_names, completion_sampling
from neso.frontends.openai.errors import ApiError, renamed, too_long
from neso.frontends.openai.models.targets import Target, Targets
from neso.frontends.openai.requests.prompts import Prompt, cut_prompt, prompt_text
from neso.frontends.openai.requests.refusals import refuse_what_cannot_be_honoured
from neso.frontends.openai.requests.schemas import CompletionRequest
from neso.frontends.openai_options import OpenAIOptions
from neso.generation import InvalidParameter, PromptTooLong

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
        sampling = completion_sampling(request, target.language_model.default_sampling, self._options)
        prompts = [
            await cut_prompt(
                prompt,
                target.text,
                request.truncate_prompt_tokens,
                target.language_model.max_model_len,
                add_special_tokens=request.add_special_tokens is not False,
            )
            for prompt in completion_prompts(request)
        ]
        answer = Answer(
            KIND,
            request,
            target,
            self._choices(request, target, prompts),
            lambda error: _explain(error, request),
            count_completion=request.max_tokens != 0,
        )
        return await answer.respond(prompts, sampling, trace)

    def _choices(
        self, request: CompletionRequest, target: Target, prompts: list[Prompt]
    ) -> list[CompletionChoice]:
        n = request.n or 1
        text = target.text
        records = [
            PromptRecord(request, prompt_text(prompt, text) if request.echo else "") for prompt in prompts
        ]
        return [
            CompletionChoice(number * n + i, request, record, text)
            for number, record in enumerate(records)
            for i in range(n)
        ]


def _explain(error: InvalidParameter, request: CompletionRequest) -> ApiError:
    if isinstance(error, PromptTooLong):
        return too_long("prompt", error)
    return renamed(error, completion_names(request))
