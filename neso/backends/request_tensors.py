"""Text-generation tensors: declaration in a configuration, and reading of values."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from neso.generation import InvalidParameter
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest


@dataclass(frozen=True, slots=True)
class TensorField:
    """One input or output. `data_type` as in config.pbtxt; `dims` without the batch dimension.

    - optional: the input can be omitted
    - scalar: with a batch dimension, the backend gets one element without its dimension (`reshape { shape: [ ] }`)
    - ragged: with a batch dimension, requests of one batch can differ in shape (`allow_ragged_batch`)
    """

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    optional: bool = False
    scalar: bool = False
    ragged: bool = False


def add_inputs(config: Any, fields: Iterable[TensorField]) -> None:
    """Add the missing inputs to a `ModelConfig`."""
    for field in _missing(config, fields):
        tensor = _add(config.input, field)
        tensor.optional = field.optional
        if config.max_batch_size:
            tensor.allow_ragged_batch = field.ragged
            if field.scalar:
                tensor.reshape.SetInParent()


def add_outputs(config: Any, fields: Iterable[TensorField]) -> None:
    """Add the missing outputs to a `ModelConfig`."""
    for field in _missing(config, fields):
        _add(config.output, field)


def _missing(config: Any, fields: Iterable[TensorField]) -> list[TensorField]:
    named = {tensor.name for tensor in (*config.input, *config.output)}
    return [field for field in fields if field.name not in named]


def _add(tensors: Any, field: TensorField) -> Any:
    from tritonclient.grpc import model_config_pb2 as pb

    return tensors.add(name=field.name, data_type=pb.DataType.Value(field.data_type), dims=field.dims)


def bool_input(request: InferenceRequest, name: str, *, default: bool) -> bool:
    """Return the value of a boolean input with one element."""
    tensor = request.inputs.get(name)
    return default if tensor is None else bool(tensor.array.reshape(-1)[0])


def text_input(request: InferenceRequest, name: str) -> str:
    """Return the value of a string input with one element. Raises `InvalidArgument` if it is not UTF-8."""
    (value,) = request.inputs[name].strings()
    return value


def request_logprobs(values: dict[str, Any], requested: Container[str]) -> None:
    """Set `logprobs` in sampling parameters to the value that the outputs `requested` require, unless it is set."""
    if "logprobs" in requested:
        values.setdefault("logprobs", 1)
    if "cumulative_logprob" in requested:
        values.setdefault("logprobs", 0)


def json_input(request: InferenceRequest, name: str) -> dict[str, Any]:
    """Read an input that contains a JSON object as text. Raises `InvalidArgument`."""
    return json_object(name, text_input(request, name))


def json_object(name: str, text: str) -> dict[str, Any]:
    """Parse `text`, the JSON object in input `name`. Raises `InvalidArgument`."""
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"{name}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidArgument(f"{name}: must be a JSON object, got {type(values).__name__}")
    return values


def tensor_error_text(error: InvalidParameter) -> str:
    """Return the message of an error, with the name of the tensor instead of the field if they differ."""
    return f"image: {error.message}" if error.field == "images" else str(error)
