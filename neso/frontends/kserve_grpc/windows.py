"""Which tensors of a request are in shared memory, and where."""

from __future__ import annotations

from typing import Any

from neso.server.errors import InvalidArgument
from neso.server.shared_memory.regions import BYTE_SIZE, OFFSET, REGION, SharedMemory, SharedMemoryWindow


def read_input_windows(message: Any, shared_memory: SharedMemory) -> dict[str, SharedMemoryWindow]:
    """By the inputs' names. Raises `ServerError`, also for one that has `contents` beside."""
    windows: dict[str, SharedMemoryWindow] = {}
    for wire in message.inputs:
        if not wire.parameters or REGION not in wire.parameters:
            continue
        if wire.HasField("contents"):
            raise InvalidArgument(
                f"contents field must not be specified when using shared memory for '{wire.name}' "
                f"for model '{message.model_name}'"
            )
        if wire.name in windows:
            raise InvalidArgument(f"input '{wire.name}' already exists in request")
        windows[wire.name] = _read(wire, shared_memory)
    return windows


def read_output_windows(message: Any, shared_memory: SharedMemory) -> dict[str, SharedMemoryWindow]:
    """By the requested outputs' names. Raises `ServerError`."""
    return {
        wire.name: _read(wire, shared_memory)
        for wire in message.outputs
        if wire.parameters and REGION in wire.parameters
    }


def _read(wire: Any, shared_memory: SharedMemory) -> SharedMemoryWindow:
    shared_memory.check_enabled()
    region = wire.parameters[REGION]
    if region.WhichOneof("parameter_choice") != "string_param":
        raise InvalidArgument(f"invalid value type for '{REGION}' parameter, expected string_param.")
    if BYTE_SIZE not in wire.parameters:
        raise InvalidArgument(f"'{BYTE_SIZE}' is missing, '{wire.name}' is in shared memory")
    offset = _size(OFFSET, wire.parameters[OFFSET]) if OFFSET in wire.parameters else 0
    return shared_memory.window(region.string_param, offset, _size(BYTE_SIZE, wire.parameters[BYTE_SIZE]))


def _size(key: str, parameter: Any) -> int:
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in ("int64_param", "uint64_param"):
        raise InvalidArgument(
            f"invalid value type for '{key}' parameter, expected int64_param or uint64_param."
        )
    value = int(getattr(parameter, kind))
    if value < 0:
        raise InvalidArgument(f"parameter '{key}' must not be negative, got {value}")
    return value
