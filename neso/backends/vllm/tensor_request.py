"""Reads what a client of the tensor protocols wants of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neso.backends.request_tensors import bool_input, json_input, request_logprobs, text_input
from neso.backends.vllm.signature import WANTED
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest

STREAM_WITH_PROMPT = "When streaming, `exclude_input_in_output` = False is not allowed."


@dataclass(frozen=True, slots=True)
class TextRequest:
    """`values`: sampling parameters as the client wrote them. `wanted`: outputs beside text_output."""

    prompt: str
    images: tuple[str, ...]
    stream: bool
    prepend_prompt: bool
    wanted: frozenset[str]
    values: dict[str, Any]
    lora: str | None


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A text, or its token ids."""

    prompt: str | list[int]
    dimensions: int | None
    wanted: frozenset[str]


def read_request(request: InferenceRequest) -> TextRequest | EmbeddingRequest:
    """Raises `InvalidArgument` that names what is wrong."""
    wanted = frozenset(name for name in WANTED if bool_input(request, f"return_{name}", default=False))
    if "embedding_request" in request.inputs:
        return _embedding(request, wanted)
    stream = bool_input(request, "stream", default=False)
    prepend_prompt = not bool_input(request, "exclude_input_in_output", default=stream)
    if stream and prepend_prompt:
        raise InvalidArgument(STREAM_WITH_PROMPT)
    values = _sampling_values(request)
    lora = values.pop("lora_name", None)
    if lora is not None and not isinstance(lora, str):
        raise InvalidArgument("lora_name: must be a string")
    request_logprobs(values, wanted)
    images = request.inputs.get("image")
    return TextRequest(
        prompt=text_input(request, "text_input"),
        images=() if images is None else tuple(images.strings()),
        stream=stream,
        prepend_prompt=prepend_prompt,
        wanted=wanted,
        values=values,
        lora=lora,
    )


def _embedding(request: InferenceRequest, wanted: frozenset[str]) -> EmbeddingRequest:
    body = json_input(request, "embedding_request")
    prompt: Any = body.get("input")
    is_ids = isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
    if not is_ids and not isinstance(prompt, str):
        raise InvalidArgument("embedding_request: 'input' must be a string or a list of token ids")
    params = body.get("pooling_params") or {}
    dimensions = params.get("dimensions") if isinstance(params, dict) else None
    if isinstance(dimensions, list) and len(dimensions) == 1:  # as Triton's OpenAI front end writes it
        dimensions = dimensions[0]
    if dimensions is not None and type(dimensions) is not int:
        raise InvalidArgument("embedding_request: 'dimensions' must be an integer")
    return EmbeddingRequest(prompt, dimensions, wanted)


def _sampling_values(request: InferenceRequest) -> dict[str, Any]:
    """The `sampling_parameters` tensor (a JSON object) if there is one, else the request's parameters."""
    if "sampling_parameters" in request.inputs:
        return json_input(request, "sampling_parameters")
    return dict(request.parameters)
