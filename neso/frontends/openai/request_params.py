"""Fields that would change the answer and that the server cannot honour: better refused than ignored."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.frontends.openai.errors import invalid, renamed, to_api_error
from neso.frontends.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields
from neso.generation import (
    GuidedDecoding,
    InvalidParameter,
    SamplingDefaults,
    SamplingParams,
    TokenizerLike,
    encode_text,
)
from neso.generation.guided_decoding import NAMES, read_guided_decoding

logger = logging.getLogger(__name__)


def wanted_form(request: GenerationFields) -> GuidedDecoding | None:
    """What `response_format`, `structured_outputs` and `guided_*` ask for. Raises `ApiError`."""
    fields = {name: value for name, value in (request.model_extra or {}).items() if name in NAMES}
    if request.response_format is not None:
        fields["response_format"] = request.response_format.model_dump(exclude_unset=True)
    try:
        return read_guided_decoding(fields)
    except InvalidParameter as error:
        raise to_api_error(error) from None


MAX_PROMPTS = 2048
"""As with OpenAI. Each prompt is a request to the engine, so one body must not bring any number of them."""

Vectors = npt.NDArray[Any]
Prompt = str | list[int] | Vectors
"""Text, token ids, or vectors float[tokens, hidden_size]."""


async def cut_prompt(
    prompt: Prompt, text: TokenizerLike, keep: int | None, max_model_len: int, *, add_special_tokens: bool
) -> Prompt:
    """The prompt, or its last `keep` tokens; of -1, as many as leave room for one more. Raises `ApiError`."""
    if keep is None or isinstance(prompt, np.ndarray):
        return prompt
    if keep == 0 or keep >= max_model_len:
        raise invalid(
            "truncate_prompt_tokens",
            f"'truncate_prompt_tokens' must be -1 or from 1 to {max_model_len - 1}, got {keep}.",
        )
    ids = prompt
    if isinstance(prompt, str):
        ids = await encode_text(text, prompt, add_special_tokens=add_special_tokens)
    return ids[-(max_model_len - 1 if keep < 0 else keep) :]


def prompt_text(prompt: Prompt, text: TokenizerLike) -> str:
    """The prompt as `echo` gives it back."""
    if isinstance(prompt, str):
        return prompt
    return "" if isinstance(prompt, np.ndarray) else text.decode(prompt, skip_special_tokens=False)


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


_NOT_HONOURED = {
    "chat_template": "the model's own chat template is used",
    "functions": "use 'tools' instead",
    "function_call": "use 'tool_choice' instead",
    "audio": "the models of this server answer with text only",
    "web_search_options": "the server does not search the web",
    "logits_processors": "use 'logit_bias', 'allowed_token_ids' or guided decoding",
    "kv_transfer_params": "caches are not sent to other servers",
    "vllm_xargs": "it is vLLM's own",
    "return_context_logits": "ask for it over the tensor protocols",
    "return_generation_logits": "ask for it over the tensor protocols",
    # What other servers call what there is, and ways to sample that there are not.
    "max_new_tokens": "use 'max_tokens'",
    "num_predict": "use 'max_tokens'",
    "max_length": "use 'max_tokens'",
    "n_predict": "use 'max_tokens'",
    "num_beams": "use 'use_beam_search' with 'n'",
    "num_return_sequences": "use 'n'",
    "repeat_penalty": "use 'repetition_penalty'",
    "stop_sequences": "use 'stop'",
    "random_seed": "use 'seed'",
    "bad_words_ids": "use 'bad_words'",
    "regex": "use 'guided_regex'",
    "ebnf": "use 'guided_grammar'",
    "json_schema": "use 'response_format' or 'guided_json'",
    "grammar": "use 'guided_grammar'",
    "top_a": "it is no way to sample here",
    "tfs_z": "it is no way to sample here",
    "typical_p": "it is no way to sample here",
    "mirostat": "it is no way to sample here",
    "mirostat_mode": "it is no way to sample here",
    "dry_multiplier": "it is no way to sample here",
    "xtc_probability": "it is no way to sample here",
    "dynatemp_range": "it is no way to sample here",
}
_ignored_before: set[str] = set()


def refuse_what_cannot_be_honoured(request: GenerationFields) -> None:
    """Raise `ApiError` for the first field that asks for what is not there."""
    for name, value in (request.model_extra or {}).items():
        if name in _NOT_HONOURED and value:
            raise invalid(name, f"'{name}' is not supported: {_NOT_HONOURED[name]}.", "unsupported_parameter")
        if name not in _ignored_before and len(_ignored_before) < 1000 and len(name) < 100:
            _ignored_before.add(name)
            logger.debug("requests have a field %r, which is ignored", name)
    if request.stream and request.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "'prompt_logprobs' is not available in a stream.")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "'stream_options' is only allowed when 'stream' is true.")
    if isinstance(request, CompletionRequest):
        _refuse_in_completion(request)
    elif isinstance(request, ChatCompletionRequest):
        _refuse_in_chat(request)


def _refuse_in_completion(request: CompletionRequest) -> None:
    if request.suffix:
        raise invalid("suffix", "'suffix' is not supported.", "unsupported_parameter")
    if request.max_tokens == 0 and request.min_tokens:
        raise invalid("min_tokens", "'min_tokens' is more than 'max_tokens'.")


def _refuse_in_chat(request: ChatCompletionRequest) -> None:
    _refuse_media(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    if (request.model_extra or {}).get("echo"):
        raise invalid("echo", "'echo' is for completions.", "unsupported_parameter")
    if request.tool_choice not in (None, "none") and not request.tools:
        raise invalid("tool_choice", "'tool_choice' is only allowed when 'tools' are given.")


_MEDIA = {
    "input_audio": "sound",
    "audio": "sound",
    "audio_url": "sound",
    "video": "video",
    "video_url": "video",
    "file": "files",
    "input_file": "files",
}


def _refuse_media(request: ChatCompletionRequest) -> None:
    """Parts of messages, and of the answer, that are neither text nor images."""
    modalities = (request.model_extra or {}).get("modalities")
    if modalities and modalities != ["text"]:
        raise invalid(
            "modalities",
            "'modalities' may hold 'text' only: the models of this server answer with text.",
            "unsupported_parameter",
        )
    for index, message in enumerate(request.messages):
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            what = _MEDIA.get(str(part.get("type")))
            if what is not None:
                raise invalid(
                    f"messages[{index}].content[{number}]",
                    f"Invalid 'messages[{index}].content[{number}]': {what} of type '{part['type']}' cannot be read, "
                    "only text and images.",
                    "unsupported_value",
                )
