"""Values in the inputs of a request for text."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import orjson

from neso.generation import InvalidParameter
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest


def flag(request: InferenceRequest, name: str, *, default: bool) -> bool:
    """An input that is one boolean."""
    tensor = request.inputs.get(name)
    return default if tensor is None else bool(tensor.array.reshape(-1)[0])


def text(request: InferenceRequest, name: str) -> str:
    """An input that is one text. Raises `InvalidArgument` if it is not UTF-8."""
    (value,) = request.inputs[name].strings()
    return value


def want_logprobs(values: dict[str, Any], wanted: Container[str]) -> None:
    """Add to sampling parameters what the outputs `wanted` need, unless they say how many log probabilities."""
    if "logprobs" in wanted:
        values.setdefault("logprobs", 1)
    if "cumulative_logprob" in wanted:
        values.setdefault("logprobs", 0)


def json_object(request: InferenceRequest, name: str) -> dict[str, Any]:
    """An input that is the text of a JSON object. Raises `InvalidArgument`."""
    try:
        values = orjson.loads(text(request, name))
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"{name}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidArgument(f"{name}: must be a JSON object, got {type(values).__name__}")
    return values


def in_tensors_words(error: InvalidParameter) -> str:
    """What it says, with the name of the tensor where clients of text know another."""
    return f"image: {error.message}" if error.field == "images" else str(error)
