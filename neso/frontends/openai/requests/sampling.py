"""From a request's fields to sampling parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

from neso.frontends.openai.chat.message_format import MessageFormat
from neso.frontends.openai.errors import ApiError, invalid
from neso.frontends.openai.options import OpenAIOptions
from neso.frontends.openai.requests.guided import asked_form
from neso.frontends.openai.requests.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields
from neso.generation import GuidedDecoding, InvalidParameter, SamplingDefaults, SamplingParams

_SAME_NAME = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "logit_bias",
    "best_of",
    "no_repeat_ngram_size",
    "prompt_logprobs",
    "top_p_decay",
    "top_p_min",
    "top_p_reset_ids",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "beam_search_diversity_rate",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


def chat_names(request: ChatCompletionRequest) -> dict[str, str]:
    """Fields of the engine as the client of a chat knows them."""
    return {"logprobs": "top_logprobs"} if request.top_logprobs is not None else {}


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
    values = _common(request, defaults)
    values["max_tokens"] = defaults.max_tokens(asked) or 1
    values["logprobs"] = request.logprobs
    values["guided_decoding"] = wanted_form(request)
    if request.echo and request.logprobs is not None:
        most = max(request.logprobs, request.prompt_logprobs or 0)
        values["prompt_logprobs"] = request.logprobs if request.logprobs < 0 else most
    return _make(values, completion_names(request))


def chat_sampling(
    request: ChatCompletionRequest, defaults: SamplingDefaults, message_format: MessageFormat
) -> SamplingParams:
    """The sampling parameters of a chat; `defaults` are the model's. Without a limit it goes on to that of the context.

    Raises `ApiError`.
    """
    limit_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    values = _common(request, defaults)
    values["max_tokens"] = defaults.max_tokens(getattr(request, limit_name))
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
    values["guided_decoding"] = message_format.guided_decoding
    values["shown_special_tokens"] = message_format.shown_special_tokens
    return _make(values, {"max_tokens": limit_name, **chat_names(request)})


def wanted_form(request: GenerationFields) -> GuidedDecoding | None:
    """The form that the answer is to have. Raises `ApiError`."""
    try:
        return asked_form(request)
    except InvalidParameter as error:
        raise renamed(error, {}) from None


def _common(request: GenerationFields, defaults: SamplingDefaults) -> dict[str, Any]:
    has_beams = request.use_beam_search or (request.beam_width or 1) > 1
    values = {} if has_beams else defaults.given()  # the scores of beams are the model's own
    values |= {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    values["stop"] = request.stop_strings
    values["stop_token_ids"] = tuple(request.stop_token_ids or ())
    values["stop_words"] = tuple(map(tuple, request.stop_words or ()))
    values["bad_words"] = tuple(
        word if isinstance(word, str) else tuple(word) for word in request.bad_words or ()
    )
    if request.allowed_token_ids is not None:
        values["allowed_token_ids"] = tuple(request.allowed_token_ids)
    if request.embedding_bias is not None:
        values["embedding_bias"] = np.asarray(request.embedding_bias, np.float32).tobytes()
    if request.best_of == (request.n or 1):
        del values["best_of"]  # which says nothing, and not every model can be told
    if request.use_beam_search:
        values |= _beams(request)
    return values


def _beams(request: GenerationFields) -> dict[str, Any]:
    """vLLM's beam search: as many beams as choices, or `best_of`. One beam takes the likeliest token each time."""
    width = request.beam_width or request.best_of or request.n or 1
    return {"beam_width": width, "best_of": None, **({"temperature": 0.0} if width == 1 else {})}


def _make(values: dict[str, Any], client_names: dict[str, str]) -> SamplingParams:
    try:
        return SamplingParams(**values)
    except InvalidParameter as error:
        raise renamed(error, client_names) from None


def renamed(error: InvalidParameter, client_names: dict[str, str]) -> ApiError:
    """The error, about the field as the client knows it."""
    name = client_names.get(error.field, error.field)
    return invalid(name, f"Invalid '{name}': {error.message}")
