"""From the fields that all requests have to sampling parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

from neso.frontends.openai.errors import renamed
from neso.frontends.openai.requests.schemas import GenerationFields
from neso.generation import InvalidParameter, SamplingDefaults, SamplingParams

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


def common_values(request: GenerationFields, defaults: SamplingDefaults) -> dict[str, Any]:
    """The parameters that completions and chats have in common; `defaults` are the model's."""
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


def make_sampling(values: dict[str, Any], client_names: dict[str, str]) -> SamplingParams:
    """Raises `ApiError` about the field as the client knows it."""
    try:
        return SamplingParams(**values)
    except InvalidParameter as error:
        raise renamed(error, client_names) from None
