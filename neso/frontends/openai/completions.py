"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from neso.frontends.openai.choices import (
    Choice,
    ChoicesResponse,
    PromptRecord,
    ResponseKind,
    finish_reason_name,
)
from neso.frontends.openai.errors import ApiError, invalid, invalid_parameter, prompt_too_long
from neso.frontends.openai.logprobs import CompletionLogprobs
from neso.frontends.openai.model_resolver import ModelResolver
from neso.frontends.openai.prompt_embeds import decode_embeddings
from neso.frontends.openai.request_params import (
    MAX_PROMPTS,
    Prompt,
    guided_decoding_of,
    make_sampling,
    reject_unsupported,
    sampling_values,
    truncate_prompt,
)
from neso.frontends.openai.routing import RequestContext, operation
from neso.frontends.openai.schemas import (
    FailFastList,
    GenerationFields,
    Integer,
    PromptLogprobs,
    ReturnedTimings,
    ReturnedTokenIds,
    StopReason,
    TokenIds,
    UsageInfo,
    open_object,
)
from neso.frontends.openai_options import OpenAIOptions
from neso.generation import (
    Completion,
    InvalidParameter,
    PromptTooLong,
    SamplingDefaults,
    SamplingParams,
    TokenizerLike,
)

KIND = ResponseKind(
    id_prefix="cmpl",
    object="text_completion",
    chunk_object="text_completion",
    add_special_tokens=True,
    prompt_fields_in_choices=True,
)


class CompletionRequest(GenerationFields):
    """The body of `POST /v1/completions`."""

    prompt: (
        Annotated[
            str | TokenIds | FailFastList[str] | FailFastList[TokenIds],
            Field(union_mode="left_to_right", description="One or several prompts, as text or token ids."),
        ]
        | None
    ) = None
    prompt_embeds: str | FailFastList[str] | None = Field(
        None,
        description="Extension: prompt embeddings, each a tensor saved by `torch.save` or `numpy.save`, in base64.",
    )
    echo: bool | None = None
    logprobs: Annotated[Integer, Field(ge=-1)] | None = None
    suffix: str | None = Field(None, description="Rejected: fill-in-the-middle is not supported.")


@open_object
class CompletionLogprobsObject(TypedDict):
    """Log probabilities of a choice's tokens; lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@open_object
class CompletionResponseChoice(TypedDict):
    """A completion of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobsObject | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: StopReason
    token_ids: NotRequired[ReturnedTokenIds]
    prompt_token_ids: NotRequired[ReturnedTokenIds]
    prompt_logprobs: NotRequired[PromptLogprobs]


@open_object
class CompletionStreamResponse(TypedDict):
    """A chunk of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionResponseChoice]
    usage: NotRequired[UsageInfo | None]
    timings: NotRequired[ReturnedTimings]


@open_object
class CompletionResponse(TypedDict):
    """The response of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionResponseChoice]
    usage: UsageInfo
    timings: NotRequired[ReturnedTimings]


class CompletionsApi:
    """Text completions."""

    def __init__(self, resolver: ModelResolver, options: OpenAIOptions) -> None:
        self._resolver = resolver
        self._options = options

    @operation(
        "POST",
        "/v1/completions",
        tag="Generation",
        request=CompletionRequest,
        response=CompletionResponse,
        events=CompletionStreamResponse,
        examples={"prompt": {"model": "neso-pilot", "prompt": "What is TTFT?", "max_tokens": 16}},
        cancellable=True,
    )
    async def create(self, request: CompletionRequest, context: RequestContext) -> Any:
        """Create a completion."""
        reject_unsupported(request)
        if request.suffix:
            raise invalid("suffix", "'suffix' is not supported.", "unsupported_parameter")
        if request.max_tokens == 0 and request.min_tokens:
            raise invalid("min_tokens", "'min_tokens' is more than 'max_tokens'.")
        model = await self._resolver.find(request.model)
        tokenizer = model.tokenizer
        sampling = _sampling(request, model.language_model.default_sampling, self._options)
        given = await _read_prompts(request)
        model.model.admission.reserve(len(given) * sampling.num_sequences)
        prompts = [
            await truncate_prompt(
                prompt,
                tokenizer,
                request.truncate_prompt_tokens,
                model.language_model.max_model_len,
                add_special_tokens=request.add_special_tokens is not False,
            )
            for prompt in given
        ]
        records = [
            PromptRecord(request, _prompt_text(prompt, tokenizer) if request.echo else "")
            for prompt in prompts
        ]
        n = request.n or 1
        choices = [
            CompletionChoice(number * n + i, request, record, tokenizer)
            for number, record in enumerate(records)
            for i in range(n)
        ]
        response = ChoicesResponse(
            KIND,
            request,
            model,
            records,
            choices,
            lambda error: _client_error(error, request),
            count_completion=request.max_tokens != 0,
        )
        return await response.generate(prompts, sampling, context.trace)


class CompletionChoice(Choice):
    """A completion: the prompt with `echo`, then the generated text unless `max_tokens` is 0."""

    def __init__(
        self, index: int, request: CompletionRequest, prompt: PromptRecord, tokenizer: TokenizerLike
    ) -> None:
        self._index = index
        self._request = request
        self._prompt = prompt
        self._prompt_only = request.max_tokens == 0
        self._logprobs: CompletionLogprobs | None = None
        if request.logprobs is not None:
            as_ids = bool(request.return_tokens_as_token_ids)
            self._logprobs = CompletionLogprobs(tokenizer, request.logprobs, as_ids=as_ids)
        self._started = False
        self._prompt_fields_sent = False
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._stop_reason: str | int | None = None

    def stream(self, completion: Completion) -> list[dict[str, Any]]:
        self.add(completion)
        has_logprobs = self._logprobs is not None and not self._logprobs.is_empty
        if not (completion.token_ids or any(self._text) or has_logprobs or self.finish_reason is not None):
            return []
        # Also sent without text, which is held back while it can be part of a character or of a stop string: clients
        # measure the times between tokens.
        return [self.whole()]

    def add(self, completion: Completion) -> None:
        if not self._started:
            self._started = True
            if self._request.echo:
                self._text.append(self._prompt.echo)
                if self._logprobs is not None:
                    prompt = self._prompt
                    self._logprobs.add_prompt(prompt.logprobs, prompt.token_ids, prompt.echo)
        if completion.finish_reason is not None:
            reason = finish_reason_name(completion.finish_reason)
            self.finish_reason = "length" if self._prompt_only else reason
            self._stop_reason = None if self._prompt_only else completion.stop_reason
        if self._prompt_only:
            return
        self._text.append(completion.text)
        if self._request.return_token_ids:
            self._token_ids += completion.token_ids
        if self._logprobs is not None:
            final = completion.finish_reason is not None
            self._logprobs.add(completion.logprobs or [], completion.text, final=final)

    def whole(self) -> dict[str, Any]:
        """Return the text and fields added since the last call."""
        choice: dict[str, Any] = {
            "index": self._index,
            "text": "".join(self._text),
            "logprobs": None if self._logprobs is None else self._logprobs.take(),
            "finish_reason": self.finish_reason,
            "stop_reason": self._stop_reason,
        }
        self._text.clear()
        if self._request.return_token_ids:
            choice["token_ids"], self._token_ids = self._token_ids, []
        if not self._prompt_fields_sent:
            self._prompt_fields_sent = True
            choice |= self._prompt.fields()
        return choice


async def _read_prompts(request: CompletionRequest) -> list[Prompt]:
    """Like `_prompts`, but decodes prompt embeddings in a thread to keep the event loop responsive."""
    return await asyncio.to_thread(_prompts, request) if request.prompt_embeds else _prompts(request)


def _prompts(request: CompletionRequest) -> list[Prompt]:
    """Return the prompts in the order of their choices, prompt embeddings first. Raises `ApiError`."""
    embeddings = _prompt_embeddings(request)
    if request.prompt is None or (embeddings and request.prompt in ("", [])):
        if not embeddings:
            raise invalid("prompt", "'prompt' is missing.", "missing_required_parameter")
        return embeddings
    prompts = [*embeddings, *_text_prompts(request.prompt)]
    if len(prompts) > MAX_PROMPTS:
        raise invalid("prompt", f"'prompt' holds {len(prompts)} prompts, at most {MAX_PROMPTS} are allowed.")
    return prompts


def _prompt_embeddings(request: CompletionRequest) -> list[Prompt]:
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
        return [decode_embeddings(text) for text in texts]
    except ValueError as error:
        raise invalid("prompt_embeds", f"Invalid 'prompt_embeds': {error}.") from None


def _text_prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
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


def _prompt_text(prompt: Prompt, tokenizer: TokenizerLike) -> str:
    """Return the text for `echo`."""
    if isinstance(prompt, str):
        return prompt
    return "" if isinstance(prompt, np.ndarray) else tokenizer.decode(prompt, skip_special_tokens=False)


def _sampling(
    request: CompletionRequest, defaults: SamplingDefaults, options: OpenAIOptions
) -> SamplingParams:
    """Return the sampling parameters of a completion; `defaults` are the model's. Raises `ApiError`.

    As in vLLM, the model's `max_new_tokens` is an upper limit, not a default. With `max_tokens` 0 one token is
    generated and discarded, because the engine always generates at least one.
    """
    max_tokens = options.default_max_tokens if request.max_tokens is None else request.max_tokens
    values = sampling_values(request, defaults)
    values["max_tokens"] = defaults.max_tokens(max_tokens) or 1
    values["logprobs"] = request.logprobs
    values["guided_decoding"] = guided_decoding_of(request)
    if request.echo and request.logprobs is not None:
        top = max(request.logprobs, request.prompt_logprobs or 0)
        values["prompt_logprobs"] = request.logprobs if request.logprobs < 0 else top
    return make_sampling(values, _client_names(request))


def _client_names(request: CompletionRequest) -> dict[str, str]:
    """Map engine fields to request fields; with `echo`, `logprobs` also sets `prompt_logprobs`."""
    return {"prompt_logprobs": "logprobs"} if request.prompt_logprobs is None else {}


def _client_error(error: InvalidParameter, request: CompletionRequest) -> ApiError:
    if isinstance(error, PromptTooLong):
        return prompt_too_long("prompt", error)
    return invalid_parameter(error, _client_names(request))
