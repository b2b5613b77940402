"""Fields that would change the answer and that the server cannot honour: better refused than ignored."""

from __future__ import annotations

import logging

from neso.frontends.openai.errors import invalid
from neso.frontends.openai.requests.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields

logger = logging.getLogger(__name__)

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
