"""From a chat's fields to sampling parameters."""

from __future__ import annotations

from neso.frontends.openai.chat.message_format import MessageFormat
from neso.frontends.openai.requests.sampling import common_values, make_sampling
from neso.frontends.openai.requests.schemas import ChatCompletionRequest
from neso.generation import SamplingDefaults, SamplingParams


def chat_names(request: ChatCompletionRequest) -> dict[str, str]:
    """Fields of the engine as the client of a chat knows them."""
    return {"logprobs": "top_logprobs"} if request.top_logprobs is not None else {}


def chat_sampling(
    request: ChatCompletionRequest, defaults: SamplingDefaults, message_format: MessageFormat
) -> SamplingParams:
    """The sampling parameters of a chat; `defaults` are the model's. Without a limit it goes on to that of the context.

    Raises `ApiError`.
    """
    limit_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    values = common_values(request, defaults)
    values["max_tokens"] = defaults.max_tokens(getattr(request, limit_name))
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
    values["guided_decoding"] = message_format.guided_decoding
    values["shown_special_tokens"] = message_format.shown_special_tokens
    return make_sampling(values, {"max_tokens": limit_name, **chat_names(request)})
