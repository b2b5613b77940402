"""Reads a request for text out of tensors and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from neso.backends.llm import signature
from neso.backends.llm.adapter_request import requested_adapter
from neso.backends.llm.draft_request import DRAFT_NAMES, read_draft
from neso.backends.request_values import flag, json_object, text, want_logprobs
from neso.generation import DraftTokens, GenerationRequest, InvalidParameter, SamplingParams
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """What a client of the tensor protocols asks for."""

    generation: GenerationRequest
    prompt: str
    stream: bool
    exclude_input: bool
    wanted: frozenset[str]
    """Outputs beside text_output."""


def parse(request: InferenceRequest) -> TensorRequest:
    """Raises `InvalidArgument` that names what is wrong."""
    prompt = text(request, "text_input")
    stream = flag(request, "stream", default=False)
    wanted = {
        name.removeprefix("return_")
        for name in request.inputs
        if name.startswith("return_") and flag(request, name, default=False)
    }
    values = _sampling_values(request)
    lora = requested_adapter(request, values)
    draft = _draft(request, values)
    want_logprobs(values, wanted)
    for name in wanted & {"context_logits", "generation_logits"}:
        values[f"return_{name}"] = True
    try:
        sampling = SamplingParams.from_mapping(values)
    except InvalidParameter as error:
        raise InvalidArgument(str(error)) from None
    return TensorRequest(
        # The id in the protocol is the client's own business and need not be unique; the engine takes another.
        generation=GenerationRequest(
            prompt,
            sampling,
            priority=request.priority,
            queue_timeout_ms=request.timeout_us / 1000 if request.timeout_us else None,
            lora=lora,
            draft=draft,
            **_vectors(request),
        ),
        prompt=prompt,
        stream=stream,
        exclude_input=flag(request, "exclude_input_in_output", default=True),
        wanted=frozenset(wanted),
    )


def _vectors(request: InferenceRequest) -> dict[str, Any]:
    """What stands in place of tokens: see `GenerationRequest`."""
    fields: dict[str, Any] = {
        name: request.inputs[name].array for name in signature.VECTORS if name in request.inputs
    }
    size = request.inputs.get("prompt_vocab_size")
    if size is not None:
        fields["prompt_vocab_size"] = int(size.array.reshape(-1)[0])
    if signature.IMAGE in request.inputs:
        fields["images"] = tuple(request.inputs[signature.IMAGE].strings())
    return fields


_NOT_SCALAR = frozenset(
    {
        "draft_input_ids",
        "stop",
        "stop_token_ids",
        "stop_words",
        "bad_words",
        "allowed_token_ids",
        "logit_bias",
        "embedding_bias",
    }
)


def _draft(request: InferenceRequest, values: dict[str, Any]) -> DraftTokens | None:
    """Guessed tokens, from the tensors that TensorRT-LLM's backend has for them or, but for logits, from `values`."""
    given = {name: values.pop(name, None) for name in ("draft_input_ids", "draft_acceptance_threshold")}
    for name in DRAFT_NAMES:
        tensor = request.inputs.get(name)
        if tensor is not None:
            given[name] = tensor.array
    return read_draft(*(given.get(name) for name in DRAFT_NAMES))


def _sampling_values(request: InferenceRequest) -> dict[str, Any]:
    """The `sampling_parameters` tensor (a JSON object) if there is one, else the request's parameters."""
    if "sampling_parameters" in request.inputs:
        return json_object(request, "sampling_parameters")
    return {name: _from_json(name, value) for name, value in request.parameters.items()}


def _from_json(name: str, value: object) -> Any:
    """A request parameter has no lists or objects: those come as JSON text, as in `"stop": "[\\"a\\", \\"b\\"]"`."""
    if isinstance(value, str) and value[:1] in ("[", "{") and name in _NOT_SCALAR:
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value
