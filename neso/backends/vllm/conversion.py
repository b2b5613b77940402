"""Conversion of requests and sampling parameters to vLLM's, and of vLLM's outputs to Neso's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson

from neso.engine.vision.image_files import MAX_PIXELS, open_image
from neso.generation import (
    Completion,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    GuidedDecoding,
    InvalidParameter,
    SamplingParams,
    TokenLogprobs,
    Usage,
)

IMAGES = "multi_modal_data"
"""Key of images in vLLM's `TextPrompt` and `TokensPrompt`."""

_REASONS = {reason.value: reason for reason in FinishReason}
"""vLLM's other finish reasons, such as a detected repetition, are mapped to STOP."""


def reject_unsupported_inputs(request: GenerationRequest) -> None:
    """Raise `InvalidParameter` for inputs that vLLM prompts do not support."""
    for name in ("prompt_embeds", "prompt_embedding_table", "draft"):
        if getattr(request, name) is not None:
            raise InvalidParameter(name, "is not supported by models on vLLM")


def prompt_of(token_ids: list[int], images: Sequence[Any], cache_salt: str) -> dict[str, Any]:
    """Create vLLM's `TokensPrompt`. Blocks if there are images. Raises `InvalidParameter("images", ...)`."""
    prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
    if images:
        prompt[IMAGES] = image_data(images)
    if cache_salt:
        prompt["cache_salt"] = cache_salt
    return prompt


def image_data(images: Sequence[Any]) -> dict[str, list[Any]]:
    """Create vLLM's `multi_modal_data`. Blocks. Raises `InvalidParameter("images", ...)`.

    All images together have at most `MAX_PIXELS` pixels, because vLLM gets them decoded.
    """
    opened: list[Any] = []
    pixels_left = MAX_PIXELS
    for image in images:
        opened.append(open_image(image, pixels_left))
        pixels_left -= opened[-1].width * opened[-1].height
    return {"image": opened}


class OutputConverter:
    """Converts the outputs of one request. vLLM's completions must be deltas."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._num_tokens = 0
        self._first = True

    def of(self, output: Any) -> GenerationOutput:
        """Convert a `RequestOutput`."""
        deltas = [self._delta(completion) for completion in output.outputs]
        self._num_tokens += sum(len(delta.token_ids) for delta in deltas)
        prompt_ids = output.prompt_token_ids or []
        first, self._first = self._first, False
        metrics = output.metrics
        scheduled = getattr(metrics, "scheduled_ts", 0.0) if first and metrics is not None else 0.0
        return GenerationOutput(
            request_id=output.request_id,
            outputs=deltas,
            usage=Usage(len(prompt_ids), self._num_tokens, output.num_cached_tokens or 0),
            finished=output.finished,
            num_sequences=self._sampling.n,
            prompt_token_ids=list(prompt_ids) if first else [],
            prompt_logprobs=_prompt_logprobs(output, self._sampling.prompt_logprobs) if first else None,
            scheduled_ns=int((scheduled or 0.0) * 1e9),
        )

    def _delta(self, completion: Any) -> Completion:
        token_ids = list(completion.token_ids)
        logprobs = None
        if self._sampling.logprobs is not None and completion.logprobs is not None:
            logprobs = [
                token_logprobs(token, position, self._sampling.logprobs)
                for token, position in zip(token_ids, completion.logprobs, strict=False)
            ]
        reason = completion.finish_reason
        return Completion(
            index=completion.index,
            text=completion.text,
            token_ids=token_ids,
            logprobs=logprobs,
            cumulative_logprob=completion.cumulative_logprob if logprobs is not None else None,
            finish_reason=None if reason is None else _REASONS.get(reason, FinishReason.STOP),
            stop_reason=completion.stop_reason,
        )


def token_logprobs(token: int, position: Mapping[int, Any], count: int) -> TokenLogprobs:
    """Return the log probabilities of one position: of the token and of the `count` most likely tokens (-1: all)."""
    own = position[token]
    ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
    top = tuple(
        (other, entry.logprob, entry.decoded_token or "")
        for other, entry in ranked
        if count < 0 or (entry.rank is not None and entry.rank <= count)
    )
    return TokenLogprobs(token, own.decoded_token or "", own.logprob, own.rank or 0, top)


def _prompt_logprobs(output: Any, count: int | None) -> list[TokenLogprobs | None] | None:
    """Return one entry per prompt token; None for the first."""
    if output.prompt_logprobs is None or count is None:
        return None
    return [
        token_logprobs(token, position, count) if position else None
        for token, position in zip(output.prompt_token_ids, output.prompt_logprobs, strict=False)
    ]


_STRUCTURED_OUTPUT_NAMES = ("structured_outputs", "guided_decoding")


def parse_sampling_values(
    values: Mapping[str, Any], types: Mapping[str, Any], structured_fields: frozenset[str]
) -> dict[str, Any]:
    """Convert JSON values or request parameters to vLLM's sampling parameters. Raises `InvalidParameter`.

    Strings are converted to the parameter's type. Lists and objects can be JSON text, because request parameters
    cannot contain them.

    - types: parameter types by name
    - structured_fields: fields of vLLM's structured outputs
    """
    converted = {}
    for name, value in values.items():
        if value is None:
            continue
        if name in _STRUCTURED_OUTPUT_NAMES:
            converted[name] = _parse_structured_outputs(name, value, structured_fields)
        elif name not in types:
            raise InvalidParameter(name, "vLLM has no such sampling parameter")
        else:
            converted[name] = _typed(name, value, types[name])
    return converted


def _typed(name: str, value: Any, kind: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return msgspec.convert(orjson.loads(value), kind, strict=False)
        except (orjson.JSONDecodeError, msgspec.ValidationError):
            pass  # text that starts like JSON, e.g. a stop string
        except TypeError:
            return orjson.loads(value)
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidParameter(name, f"{error}, got {value!r}") from None
    except TypeError:  # a type that only vLLM can create
        return value


def _parse_structured_outputs(name: str, value: Any, fields: frozenset[str]) -> dict[str, Any]:
    """Parse structured outputs, given as an object or its JSON text."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise InvalidParameter(name, f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidParameter(name, f"must be a JSON object, got {type(value).__name__}")
    unknown = sorted(value.keys() - fields)
    if unknown:
        raise InvalidParameter(name, f"has no field '{unknown[0]}', there are {', '.join(sorted(fields))}")
    if isinstance(value.get("structural_tag"), dict):
        value["structural_tag"] = orjson.dumps(value["structural_tag"]).decode()
    return value


_SAME_FIELDS = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
_LIST_FIELDS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")
_CONVERTED_FIELDS = ("logit_bias", "guided_decoding", "best_of", "shown_special_tokens")
_UNSUPPORTED_FIELDS = tuple(
    (field.name, field.default)
    for field in msgspec.structs.fields(SamplingParams)
    if field.name not in (*_SAME_FIELDS, *_LIST_FIELDS, *_CONVERTED_FIELDS)
)
"""Names and defaults of parameters that vLLM does not support."""


def to_vllm_sampling(params: SamplingParams) -> dict[str, Any]:
    """Convert Neso's sampling parameters to vLLM's. Raises `InvalidParameter` for unsupported parameters."""
    _reject_unsupported(params)
    values = {name: getattr(params, name) for name in _SAME_FIELDS}
    for name in _LIST_FIELDS:
        given = getattr(params, name)
        if given:
            values[name] = list(given)
    if params.logit_bias:
        values["logit_bias"] = dict(params.logit_bias)
    if params.shown_special_tokens:
        values["skip_special_tokens"] = (
            False  # vLLM outputs all special tokens or none, and never the token that ends the text
        )
    if params.guided_decoding is not None:
        values["structured_outputs"] = _structured_outputs_of(params.guided_decoding)
    return values


def _reject_unsupported(params: SamplingParams) -> None:
    for name, default in _UNSUPPORTED_FIELDS:
        if getattr(params, name) != default:
            raise InvalidParameter(name, "is not supported by models on vLLM")
    if params.best_of is not None and params.best_of != params.n:
        raise InvalidParameter("best_of", "is not supported by models on vLLM, unless equal to n")
    if not all(isinstance(word, str) for word in params.bad_words):
        raise InvalidParameter("bad_words", "must be texts for models on vLLM")


def _structured_outputs_of(guided: GuidedDecoding) -> dict[str, Any]:
    if guided.kind == "json_object" or guided.json is True:
        fields: dict[str, Any] = {"json_object": True}
    else:
        value = getattr(guided, guided.kind)
        fields = {guided.kind: list(value) if guided.kind == "choice" else value}
    if guided.whitespace_pattern is not None:
        fields["whitespace_pattern"] = guided.whitespace_pattern
    if guided.disable_any_whitespace:
        fields["disable_any_whitespace"] = True
    return fields
