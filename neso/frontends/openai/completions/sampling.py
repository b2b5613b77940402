"""From a completion's fields to sampling parameters."""

from __future__ import annotations

from neso.frontends.openai.requests.guided import wanted_form
from neso.frontends.openai.requests.sampling import common_values, make_sampling
from neso.frontends.openai.requests.schemas import CompletionRequest
from neso.frontends.openai_options import OpenAIOptions
from neso.generation import SamplingDefaults, SamplingParams


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
