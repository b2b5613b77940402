"""Parameters of a request: the protocol's own go to their fields, the others to the model."""

from __future__ import annotations

from typing import Any

from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest

_UINT64_MAX = (1 << 64) - 1


def read_parameter(request: InferenceRequest, name: str, value: Any) -> None:
    """Give `request` a parameter. Raises `InvalidArgument`."""
    if name == "sequence_id":
        request.sequence_id = value if type(value) is str else read_unsigned(name, value)
    elif name == "sequence_start":
        request.sequence_start = read_bool(name, value)
    elif name == "sequence_end":
        request.sequence_end = read_bool(name, value)
    elif name == "priority":
        request.priority = read_unsigned(name, value)
    elif name == "timeout":
        request.timeout_us = read_unsigned(name, value)
    elif name == "headers":
        raise InvalidArgument(
            "parameter key 'headers' is reserved for Triton usage and should not be specified."
        )
    elif name.startswith("triton_"):
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
        )
    elif type(value) not in (str, bool, int, float):
        raise InvalidArgument(
            f"parameter '{name}' has invalid type. It should be either 'int', 'bool', 'double', or 'string'."
        )
    else:
        request.parameters[name] = value


def read_bool(name: str, value: Any) -> bool:
    """A boolean. Raises `InvalidArgument`."""
    if type(value) is not bool:
        raise InvalidArgument(f"Unable to parse '{name}': attempt to access JSON non-boolean as boolean")
    return value


def read_unsigned(name: str, value: Any) -> int:
    """An unsigned integer of 64 bits. Raises `InvalidArgument`."""
    if type(value) is not int or not 0 <= value <= _UINT64_MAX:
        raise InvalidArgument(
            f"Unable to parse '{name}': attempt to access JSON non-unsigned-integer as unsigned-integer"
        )
    return value


def read_string(name: str, value: Any) -> str:
    """A string. Raises `InvalidArgument`."""
    if type(value) is not str:
        raise InvalidArgument(f"Unable to parse '{name}': attempt to access JSON non-string as string")
    return value


def read_object_member(name: str, value: Any) -> dict[str, Any]:
    """An object. Raises `InvalidArgument`."""
    if type(value) is not dict:
        raise InvalidArgument(f"Unable to parse '{name}': attempt to access JSON non-object as object")
    return value


def read_array_member(container: dict[str, Any], name: str) -> list[Any]:
    """A member that must be there and be an array. Raises `InvalidArgument`."""
    if name not in container:
        raise InvalidArgument(
            f"Unable to parse '{name}': attempt to access non-existing object member '{name}'"
        )
    value = container[name]
    if type(value) is not list:
        raise InvalidArgument(f"Unable to parse '{name}': attempt to access JSON non-array as array")
    return value
