"""Tensors of the vLLM backend, with the names and shapes of Triton's backend: signature, requests and responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from neso.backends.request_tensors import (
    TensorField,
    add_inputs,
    add_outputs,
    bool_input,
    json_input,
    request_logprobs,
    text_input,
)
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.tensor import DataType, Tensor

REQUESTABLE_OUTPUTS = (
    "finish_reason",
    "cumulative_logprob",
    "logprobs",
    "num_input_tokens",
    "num_output_tokens",
)
"""Outputs requested with an input `return_<name>`."""

INPUTS = (
    TensorField("text_input", "TYPE_STRING"),
    TensorField("image", "TYPE_STRING", (-1,), optional=True),
    TensorField("stream", "TYPE_BOOL", optional=True),
    TensorField("sampling_parameters", "TYPE_STRING", optional=True),
    TensorField("exclude_input_in_output", "TYPE_BOOL", optional=True),
    *(TensorField(f"return_{name}", "TYPE_BOOL", optional=True) for name in REQUESTABLE_OUTPUTS),
    TensorField("embedding_request", "TYPE_STRING", optional=True),
)
"""`image`: base64-encoded image files."""

OUTPUTS = (
    TensorField("text_output", "TYPE_STRING", (-1,)),
    TensorField("finish_reason", "TYPE_STRING", (-1,)),
    TensorField("cumulative_logprob", "TYPE_FP32", (-1,)),
    TensorField("logprobs", "TYPE_STRING", (-1,)),
    TensorField("num_input_tokens", "TYPE_UINT32"),
    TensorField("num_output_tokens", "TYPE_UINT32", (-1,)),
)
"""Dimension -1 has one element per sequence."""


def complete_config(config: Any) -> None:
    """Add missing inputs and outputs to a `ModelConfig`; make it decoupled, with `max_batch_size` 0."""
    config.model_transaction_policy.decoupled = True
    config.max_batch_size = 0
    add_inputs(config, INPUTS)
    add_outputs(config, OUTPUTS)


STREAM_WITH_PROMPT = "When streaming, `exclude_input_in_output` = False is not allowed."


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text-generation request.

    - prepend_prompt: text_output starts with the prompt
    - requested: names of requested outputs other than text_output
    - values: sampling parameters as sent by the client
    """

    prompt: str
    images: tuple[str, ...]
    stream: bool
    prepend_prompt: bool
    requested: frozenset[str]
    values: dict[str, Any]
    lora: str | None


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """An embedding request. `prompt`: text or token ids."""

    prompt: str | list[int]
    dimensions: int | None
    requested: frozenset[str]


def read_request(request: InferenceRequest) -> TextRequest | EmbeddingRequest:
    """Parse the inputs and parameters of a request. Raises `InvalidArgument`."""
    requested = frozenset(
        name for name in REQUESTABLE_OUTPUTS if bool_input(request, f"return_{name}", default=False)
    )
    if "embedding_request" in request.inputs:
        return _read_embedding_request(request, requested)
    stream = bool_input(request, "stream", default=False)
    prepend_prompt = not bool_input(request, "exclude_input_in_output", default=stream)
    if stream and prepend_prompt:
        raise InvalidArgument(STREAM_WITH_PROMPT)
    values = _sampling_values(request)
    lora = values.pop("lora_name", None)
    if lora is not None and not isinstance(lora, str):
        raise InvalidArgument("lora_name: must be a string")
    request_logprobs(values, requested)
    images = request.inputs.get("image")
    return TextRequest(
        prompt=text_input(request, "text_input"),
        images=() if images is None else tuple(images.strings()),
        stream=stream,
        prepend_prompt=prepend_prompt,
        requested=requested,
        values=values,
        lora=lora,
    )


def _read_embedding_request(request: InferenceRequest, requested: frozenset[str]) -> EmbeddingRequest:
    body = json_input(request, "embedding_request")
    prompt: Any = body.get("input")
    is_ids = isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
    if not is_ids and not isinstance(prompt, str):
        raise InvalidArgument("embedding_request: 'input' must be a string or a list of token ids")
    params = body.get("pooling_params") or {}
    dimensions = params.get("dimensions") if isinstance(params, dict) else None
    if isinstance(dimensions, list) and len(dimensions) == 1:  # sent by Triton's OpenAI frontend
        dimensions = dimensions[0]
    if dimensions is not None and type(dimensions) is not int:
        raise InvalidArgument("embedding_request: 'dimensions' must be an integer")
    return EmbeddingRequest(prompt, dimensions, requested)


def _sampling_values(request: InferenceRequest) -> dict[str, Any]:
    """Return the tensor `sampling_parameters` (a JSON object) if present, otherwise the request's parameters."""
    if "sampling_parameters" in request.inputs:
        return json_input(request, "sampling_parameters")
    return dict(request.parameters)


_MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent. Same value as in vLLM's server."""


class ResponseTensors:
    """Creates the response tensors of one request with `n` sequences; each tensor has one element per sequence.

    In a streamed response, sequences without new tokens have an empty text and no tokens.
    """

    def __init__(self, request: TextRequest, n: int) -> None:
        self._request = request
        self._n = n
        self._finish_reasons: list[str | None] = [None] * n
        self._cumulative = [0.0] * n

    def of(self, output: Any) -> list[Tensor]:
        """Return the tensors of a `RequestOutput`: `text_output` and the requested outputs."""
        requested, n = self._request.requested, self._n
        new = {completion.index: completion for completion in output.outputs}
        prefix = self._request.prompt if self._request.prepend_prompt else ""
        texts = [prefix + new[i].text if i in new else prefix for i in range(n)]
        tensors = [Tensor.from_strings("text_output", texts)]
        if not requested:
            return tensors
        for i, completion in new.items():
            self._finish_reasons[i] = completion.finish_reason or self._finish_reasons[i]
            if completion.cumulative_logprob is not None:
                self._cumulative[i] = completion.cumulative_logprob
        if "finish_reason" in requested:
            # As in Triton, the reason of an unfinished sequence is the text "None".
            tensors.append(Tensor.from_strings("finish_reason", list(map(str, self._finish_reasons))))
        if "cumulative_logprob" in requested:
            values = np.array(self._cumulative, np.float32)
            tensors.append(Tensor("cumulative_logprob", DataType.FP32, values))
        if "logprobs" in requested:
            written = [_as_json(new[i].logprobs if i in new else ()) for i in range(n)]
            tensors.append(Tensor.from_strings("logprobs", written))
        if "num_input_tokens" in requested:
            tensors.append(_counts("num_input_tokens", [len(output.prompt_token_ids or ())]))
        if "num_output_tokens" in requested:
            counts = [len(new[i].token_ids) if i in new else 0 for i in range(n)]
            tensors.append(_counts("num_output_tokens", counts))
        return tensors


def embedding_tensors(values: Sequence[float], num_tokens: int, requested: frozenset[str]) -> list[Tensor]:
    """Return the response tensors of an embedding: JSON text in `text_output`."""
    tensors = [Tensor.from_strings("text_output", [orjson.dumps(list(values)).decode()])]
    if "num_input_tokens" in requested:
        tensors.append(_counts("num_input_tokens", [num_tokens]))
    if "num_output_tokens" in requested:
        tensors.append(_counts("num_output_tokens", [0]))
    return tensors


def _counts(name: str, counts: list[int]) -> Tensor:
    return Tensor(name, DataType.UINT32, np.array(counts, np.uint32))


def _as_json(logprobs: Sequence[Mapping[int, Any]] | None) -> str:
    """Return a JSON array with one object per position: token id -> logprob, rank and text; sampled and top tokens."""
    if logprobs is None:
        return "null"
    positions = [
        {
            str(token): {
                "logprob": max(entry.logprob, _MIN_LOGPROB),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token, entry in position.items()
        }
        for position in logprobs
    ]
    return orjson.dumps(positions).decode()
