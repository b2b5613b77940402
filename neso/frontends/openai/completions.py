"""`POST /v1/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neso.frontends.openai.choices import Answer, AnswerKind, Choice, PromptRecord, finish_name
from neso.frontends.openai.errors import ApiError, invalid, renamed, too_long
from neso.frontends.openai.logprobs import CompletionLogprobs
from neso.frontends.openai.model_resolver import Target, Targets
from neso.frontends.openai.prompt_embeds import read_vectors
from neso.frontends.openai.request_params import (
    MAX_PROMPTS,
    Prompt,
    common_values,
    cut_prompt,
    make_sampling,
    prompt_text,
    refuse_what_cannot_be_honoured,
    wanted_form,
)
from neso.frontends.openai.schemas import CompletionRequest
from neso.frontends.openai_options import OpenAIOptions
from neso.generation import (
    Completion,
    GenerationOutput,
    InvalidParameter,
    PromptTooLong,
    SamplingDefaults,
    SamplingParams,
    TokenizerLike,
)

if TYPE_CHECKING:
    from neso.server.tracing import Trace


def completion_prompts(request: CompletionRequest) -> list[Prompt]:
    """The prompts in the order of their choices: first those that are vectors. Raises `ApiError`."""
    vectors = _vectors(request)
    if request.prompt is None or (vectors and request.prompt in ("", [])):
        if not vectors:
            raise invalid("prompt", "'prompt' is missing.", "missing_required_parameter")
        return vectors
    prompts = [*vectors, *_texts(request.prompt)]
    if len(prompts) > MAX_PROMPTS:
        raise invalid("prompt", f"'prompt' holds {len(prompts)} prompts, at most {MAX_PROMPTS} are allowed.")
    return prompts


def _vectors(request: CompletionRequest) -> list[Prompt]:
    given = request.prompt_embeds
    if not given:
        return []
    for name in ("echo", "prompt_logprobs", "truncate_prompt_tokens"):
        if getattr(request, name):
            raise invalid(name, f"'{name}' is for prompts of tokens, not for 'prompt_embeds'.")
    texts = [given] if isinstance(given, str) else given
    if len(texts) > MAX_PROMPTS:
        raise invalid("prompt_embeds", f"At most {MAX_PROMPTS} prompts are allowed.")
    try:
        return [read_vectors(text) for text in texts]
    except ValueError as error:
        raise invalid("prompt_embeds", f"Invalid 'prompt_embeds': {error}.") from None


def _texts(given: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
    prompts: list[Prompt]
    if isinstance(given, str):
        prompts = [given]
    elif given and isinstance(given[0], int):
        prompts = [given]  # one list of token ids
    else:
        prompts = list(given)  # type: ignore[arg-type]  # texts, or lists of token ids
    if not prompts or any(prompt == [] for prompt in prompts):
        raise invalid("prompt", "'prompt' must not be an empty list.")
    return prompts


def completion_names(request: CompletionRequest) -> dict[str, str]:
    """Fields of the engine as the client of a completion knows them: the echo's `logprobs` are of the prompt."""
    return {"prompt_logprobs": "logprobs"} if request.prompt_logprobs is None else {}


def completion_sampling(
    request: CompletionRequest, defaults: SamplingDefaults, options: OpenAIOptions
) -> SamplingParams:
    """The sampling parameters of a completion; `defaults` are the model's. Raises `ApiError`.

    As in vLLM, their `max_new_tokens` is no default here, but may be a limit.
    `max_tokens` 0 asks for nothing beyond the prompt. One token is generated all the same and thrown away: the
    engine has no request that generates none.
    """
    asked = options.default_max_tokens if request.max_tokens is None else request.max_tokens
    values = common_values(request, defaults)
    values["max_tokens"] = defaults.max_tokens(asked) or 1
    values["logprobs"] = request.logprobs
    values["guided_decoding"] = wanted_form(request)
    if request.echo and request.logprobs is not None:
        most = max(request.logprobs, request.prompt_logprobs or 0)
        values["prompt_logprobs"] = request.logprobs if request.logprobs < 0 else most
    return make_sampling(values, completion_names(request))


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
