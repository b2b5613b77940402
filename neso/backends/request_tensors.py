"""Text-generation tensors: declares them in a configuration and reads their values."""

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
    """One input or output. `data_type` as in config.pbtxt; `dims` are without the batch dimension.

    `optional`: an input that may be left out. Where there is a batch dimension: `scalar` is one element, whose
    dimension the backend does not see (`reshape { shape: [ ] }`); requests of one batch may differ in the extent of
    what is `ragged`.
    """

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    optional: bool = False
    scalar: bool = False
    ragged: bool = False


def add_inputs(config: Any, fields: Iterable[TensorField]) -> None:
    """Add those whose names a `ModelConfig` does not have."""
    for field in _missing(config, fields):
        tensor = _add(config.input, field)
        tensor.optional = field.optional
        if config.max_batch_size:
            tensor.allow_ragged_batch = field.ragged
            if field.scalar:
                tensor.reshape.SetInParent()


def add_outputs(config: Any, fields: Iterable[TensorField]) -> None:
    """The same for outputs."""
    for field in _missing(config, fields):
        _add(config.output, field)


def _missing(config: Any, fields: Iterable[TensorField]) -> list[TensorField]:
    named = {tensor.name for tensor in (*config.input, *config.output)}
    return [field for field in fields if field.name not in named]


def _add(tensors: Any, field: TensorField) -> Any:
    from tritonclient.grpc import model_config_pb2 as pb

    return tensors.add(name=field.name, data_type=pb.DataType.Value(field.data_type), dims=field.dims)


def bool_input(request: InferenceRequest, name: str, *, default: bool) -> bool:
    """An input that is one boolean."""
    tensor = request.inputs.get(name)
    return default if tensor is None else bool(tensor.array.reshape(-1)[0])


def text_input(request: InferenceRequest, name: str) -> str:
    """An input that is one text. Raises `InvalidArgument` if it is not UTF-8."""
    (value,) = request.inputs[name].strings()
    return value


def request_logprobs(values: dict[str, Any], wanted: Container[str]) -> None:
    """Add to sampling parameters what the outputs `wanted` need, unless they say how many log probabilities."""
    if "logprobs" in wanted:
        values.setdefault("logprobs", 1)
    if "cumulative_logprob" in wanted:
        values.setdefault("logprobs", 0)


def json_input(request: InferenceRequest, name: str) -> dict[str, Any]:
    """An input that is the text of a JSON object. Raises `InvalidArgument`."""
    try:
        values = orjson.loads(text_input(request, name))
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"{name}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidArgument(f"{name}: must be a JSON object, got {type(values).__name__}")
    return values


def tensor_error_text(error: InvalidParameter) -> str:
    """What it says, with the name of the tensor where clients of text know another."""
    return f"image: {error.message}" if error.field == "images" else str(error)
