"""From a request's fields to sampling parameters."""

from __future__ import annotations

from typing import Any

from neso.frontends.openai.errors import ApiError, invalid
from neso.frontends.openai.guided import asked_form
from neso.frontends.openai.message_format import MessageFormat
from neso.frontends.openai.options import OpenAIOptions
from neso.frontends.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields
from neso.generation import GuidedDecoding, InvalidParameter, SamplingParams

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
    "include_stop_str_in_output",
    "skip_special_tokens",
)

COMPLETION_NAMES = {"prompt_logprobs": "logprobs"}
CHAT_NAMES = {"logprobs": "top_logprobs"}
"""Fields of the engine as clients of each route know them."""


def completion_sampling(request: CompletionRequest, options: OpenAIOptions) -> SamplingParams:
    """The sampling parameters of a completion. Raises `ApiError`.

    `max_tokens` 0 asks for the echo alone. One token is generated all the same and thrown away: the engine
    has no request that generates none.
    """
    max_tokens = options.default_max_tokens if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and not request.echo:
        raise invalid("max_tokens", "'max_tokens' may be 0 only with 'echo'.")
    values = _common(request)
    values["max_tokens"] = max(max_tokens, 1)
    values["logprobs"] = request.logprobs
    values["guided_decoding"] = wanted_form(request)
    if request.echo:
        values["prompt_logprobs"] = request.logprobs
    return _make(values, COMPLETION_NAMES)


def chat_sampling(request: ChatCompletionRequest, message_format: MessageFormat) -> SamplingParams:
    """The sampling parameters of a chat; without a limit it goes on to the model's. Raises `ApiError`."""
    limit_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    values = _common(request)
    values["max_tokens"] = getattr(request, limit_name)
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
    values["guided_decoding"] = message_format.guided_decoding
    values["shown_special_tokens"] = message_format.shown_special_tokens
    return _make(values, {"max_tokens": limit_name, **CHAT_NAMES})


def wanted_form(request: GenerationFields) -> GuidedDecoding | None:
    """The form that the answer is to have. Raises `ApiError`."""
    try:
        return asked_form(request)
    except InvalidParameter as error:
        raise renamed(error, {}) from None


def _common(request: GenerationFields) -> dict[str, Any]:
    values = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    values["stop"] = request.stop_strings
    values["stop_token_ids"] = tuple(request.stop_token_ids or ())
    return values


def _make(values: dict[str, Any], client_names: dict[str, str]) -> SamplingParams:
    try:
        return SamplingParams(**values)
    except InvalidParameter as error:
        raise renamed(error, client_names) from None


def renamed(error: InvalidParameter, client_names: dict[str, str]) -> ApiError:
    """The error, about the field as the client knows it."""
    name = client_names.get(error.field, error.field)
    return invalid(name, f"Invalid '{name}': {error.message}")
