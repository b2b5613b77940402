"""Parameters on the wire, and the fields of a request that travel among them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from neso.server.errors import InvalidArgument
from neso.server.inference_request import ParameterValue
from neso.server.shared_memory.regions import SharedMemoryWindow

EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
FINAL_RESPONSE = "triton_final_response"

_INT64_MAX = 2**63 - 1
_KINDS = {bool: ("bool_param",), int: ("int64_param", "uint64_param"), str: ("string_param",)}


@dataclass(slots=True)
class RequestParameters:
    """The parameters of a request, the protocol's own apart from the client's (`custom`).

    `output_windows`: where in shared memory outputs go, by their names.
    """

    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    timeout_us: int = 0
    empty_final_response: bool = False
    custom: dict[str, ParameterValue] = field(default_factory=dict)
    output_windows: dict[str, SharedMemoryWindow] = field(default_factory=dict)


def read_parameters(parameters: Mapping[str, Any]) -> RequestParameters:
    """From the `InferParameter` messages of a request. Raises `InvalidArgument`."""
    read = RequestParameters()
    if not parameters:  # which is quick to tell, unlike to iterate over nothing
        return read
    for key, parameter in parameters.items():
        if key == "sequence_id":
            read.sequence_id = _typed(key, parameter, int, str)
        elif key == "sequence_start":
            read.sequence_start = _typed(key, parameter, bool)
        elif key == "sequence_end":
            read.sequence_end = _typed(key, parameter, bool)
        elif key == "priority":
            read.priority = _not_negative(key, _typed(key, parameter, int))
        elif key == "timeout":
            read.timeout_us = _not_negative(key, _typed(key, parameter, int))
        elif key == EMPTY_FINAL_RESPONSE:
            read.empty_final_response = _typed(key, parameter, bool)
        elif key.startswith("triton_"):
            raise InvalidArgument(
                f"parameter '{key}': keys starting with 'triton_' are reserved, "
                f"only '{EMPTY_FINAL_RESPONSE}' is allowed"
            )
        else:
            read.custom[key] = _value(key, parameter)
    return read


def write_parameters(target: MutableMapping[str, Any], parameters: Mapping[str, ParameterValue]) -> None:
    """Into the `parameters` map of a message."""
    for key, value in parameters.items():
        if isinstance(value, bool):  # before int, of which it is one
            target[key].bool_param = value
        elif isinstance(value, int):
            if value > _INT64_MAX:
                target[key].uint64_param = value
            else:
                target[key].int64_param = value
        elif isinstance(value, float):
            target[key].double_param = value
        else:
            target[key].string_param = value


def _value(key: str, parameter: Any) -> ParameterValue:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidArgument(
            f"invalid value type for '{key}' parameter, expected bool_param, int64_param, uint64_param, "
            "double_param or string_param."
        )
    return getattr(parameter, kind)  # type: ignore[no-any-return]


def _typed(key: str, parameter: Any, *types: type) -> Any:
    expected = [kind for each in types for kind in _KINDS[each]]
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in expected:
        raise InvalidArgument(f"invalid value type for '{key}' parameter, expected {' or '.join(expected)}.")
    return getattr(parameter, kind)


def _not_negative(key: str, value: int) -> int:
    if value < 0:
        raise InvalidArgument(f"parameter '{key}' must not be negative, got {value}")
    return value
