"""Conversion of fields shared by all generation requests to the engine's request: prompt, sampling, output format."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.frontends.openai.errors import invalid, invalid_parameter, to_api_error
from neso.frontends.openai.schemas import GenerationFields
from neso.generation import (
    GenerationRequest,
    GuidedDecoding,
    InvalidParameter,
    LoraRequest,
    SamplingDefaults,
    SamplingParams,
    TokenizerLike,
    cut_text,
)
from neso.generation.guided_decoding import NAMES, read_guided_decoding

logger = logging.getLogger(__name__)

MAX_PROMPTS = 2048
"""Maximum number of prompts per request, the same as at OpenAI."""

Embeddings = npt.NDArray[Any]
Prompt = str | list[int] | Embeddings
"""Text, token ids, or prompt embeddings float[tokens, hidden_size]."""

_SAMPLING_FIELDS = (
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
    "logits_processor",
)
"""Request fields with the same name and meaning in `SamplingParams`."""

_UNSUPPORTED_SAMPLER = "unsupported sampler"
_UNSUPPORTED = {
    "chat_template": "the model's own chat template is used",
    "functions": "use 'tools' instead",
    "function_call": "use 'tool_choice' instead",
    "audio": "models of this server generate text only",
    "web_search_options": "the server does not search the web",
    "logits_processors": "use 'logits_processor' with the name of one that is registered with the model",
    "kv_transfer_params": "the KV cache is not transferred to other servers",
    "vllm_xargs": "it is specific to vLLM",
    "return_context_logits": "use the KServe protocol",
    "return_generation_logits": "use the KServe protocol",
    # Names that other servers use for supported parameters.
    "max_new_tokens": "use 'max_tokens'",
    "num_predict": "use 'max_tokens'",
    "max_length": "use 'max_tokens'",
    "n_predict": "use 'max_tokens'",
    "num_beams": "use 'use_beam_search' with 'n'",
    "num_return_sequences": "use 'n'",
    "repeat_penalty": "use 'repetition_penalty'",
    "stop_sequences": "use 'stop'",
    "random_seed": "use 'seed'",
    "logits_post_processor_name": "use 'logits_processor'",
    "bad_words_ids": "use 'bad_words'",
    "regex": "use 'guided_regex'",
    "ebnf": "use 'guided_grammar'",
    "json_schema": "use 'response_format' or 'guided_json'",
    "grammar": "use 'guided_grammar'",
    "top_a": _UNSUPPORTED_SAMPLER,
    "tfs_z": _UNSUPPORTED_SAMPLER,
    "typical_p": _UNSUPPORTED_SAMPLER,
    "mirostat": _UNSUPPORTED_SAMPLER,
    "mirostat_mode": _UNSUPPORTED_SAMPLER,
    "dry_multiplier": _UNSUPPORTED_SAMPLER,
    "xtc_probability": _UNSUPPORTED_SAMPLER,
    "dynatemp_range": _UNSUPPORTED_SAMPLER,
}
_logged_fields: set[str] = set()


def reject_unsupported(request: GenerationFields) -> None:
    """Raise `ApiError` for the first field that is unsupported, and for invalid combinations of shared fields."""
    for name, value in (request.model_extra or {}).items():
        if name in _UNSUPPORTED and value:
            raise invalid(name, f"'{name}' is not supported: {_UNSUPPORTED[name]}.", "unsupported_parameter")
        if name not in _logged_fields and len(_logged_fields) < 1000 and len(name) < 100:
            _logged_fields.add(name)
            logger.debug("ignoring the unknown request field %r", name)
    if request.stream and request.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "'prompt_logprobs' is not available in a stream.")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "'stream_options' is only allowed when 'stream' is true.")


def guided_decoding_of(request: GenerationFields) -> GuidedDecoding | None:
    """Return the output format set by `response_format`, `structured_outputs` or `guided_*`. Raises `ApiError`."""
    fields = {name: value for name, value in (request.model_extra or {}).items() if name in NAMES}
    if request.response_format is not None:
        fields["response_format"] = request.response_format.model_dump(exclude_unset=True)
    if not fields:
        return None
    try:
        return read_guided_decoding(fields)
    except InvalidParameter as error:
        raise to_api_error(error) from None


def sampling_values(request: GenerationFields, defaults: SamplingDefaults) -> dict[str, Any]:
    """Return sampling parameters from the shared fields; `defaults` are the model's."""
    uses_beams = request.use_beam_search or (request.beam_width or 1) > 1
    values = {} if uses_beams else defaults.given()  # beams are scored by unmodified logits
    for name in _SAMPLING_FIELDS:
        if (value := getattr(request, name)) is not None:
            values[name] = value
    values["stop"] = request.stop_strings
    values["stop_token_ids"] = tuple(request.stop_token_ids or ())
    values["stop_words"] = tuple(map(tuple, request.stop_words or ()))
    if request.bad_words:
        values["bad_words"] = tuple(
            word if isinstance(word, str) else tuple(word) for word in request.bad_words
        )
    if request.allowed_token_ids is not None:
        values["allowed_token_ids"] = tuple(request.allowed_token_ids)
    if request.embedding_bias is not None:
        values["embedding_bias"] = np.asarray(request.embedding_bias, np.float32).tobytes()
    if request.best_of == (request.n or 1):
        del values["best_of"]  # no effect, and not every model supports it
    if request.use_beam_search:
        # vLLM's beam search: `best_of` or `n` beams; one beam is greedy decoding.
        width = request.beam_width or request.best_of or request.n or 1
        values |= {"beam_width": width, "best_of": None}
        if width == 1:
            values["temperature"] = 0.0
    return values


def make_sampling(values: dict[str, Any], client_names: dict[str, str]) -> SamplingParams:
    """Create `SamplingParams` from `values`. Raises `ApiError`; `client_names`: see `invalid_parameter`."""
    try:
        return SamplingParams(**values)
    except InvalidParameter as error:
        raise invalid_parameter(error, client_names) from None


async def truncate_prompt(
    prompt: Prompt,
    tokenizer: TokenizerLike,
    num_tokens: int | None,
    max_model_len: int,
    *,
    add_special_tokens: bool,
) -> Prompt:
    """Return the last `num_tokens` of the prompt. -1 leaves room for one output token; None keeps all tokens.

    Raises `ApiError`.
    """
    if num_tokens is None or isinstance(prompt, np.ndarray):
        return prompt
    if num_tokens == 0 or num_tokens >= max_model_len:
        raise invalid(
            "truncate_prompt_tokens",
            f"'truncate_prompt_tokens' must be -1 or from 1 to {max_model_len - 1}, got {num_tokens}.",
        )
    kept = max_model_len - 1 if num_tokens < 0 else num_tokens
    if not isinstance(prompt, str):
        return prompt[-kept:]

    def encode_end() -> list[int]:
        text, _ = cut_text(tokenizer, prompt, kept, from_end=True)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)[-kept:]

    return await asyncio.to_thread(encode_end)


def generation_request(
    request: GenerationFields,
    prompt: Prompt,
    sampling: SamplingParams,
    request_id: str,
    *,
    lora_name: str,
    add_special_tokens: bool,
    images: tuple[Any, ...] = (),
) -> GenerationRequest:
    """Create the engine's request for one prompt. `add_special_tokens` applies if the client does not set it."""
    special = request.add_special_tokens
    is_embeddings = isinstance(prompt, np.ndarray)
    return GenerationRequest(
        prompt=[] if is_embeddings else prompt,  # type: ignore[arg-type]
        prompt_embeds=prompt if is_embeddings else None,  # type: ignore[arg-type]
        sampling=sampling,
        request_id=request_id,
        priority=request.priority or 0,
        add_special_tokens=add_special_tokens if special is None else special,
        cache_salt=request.cache_salt or "",
        images=images,
        stream=bool(request.stream),
        lora=LoraRequest(name=lora_name) if lora_name else None,
    )
