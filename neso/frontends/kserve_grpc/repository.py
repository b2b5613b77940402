"""The arguments of the model repository extension."""

from __future__ import annotations

from typing import Any

from neso.server.errors import InvalidArgument, Unsupported


def refuse_repository_name(message: Any) -> None:
    """Triton has no names for its repositories either. Raises `Unsupported`."""
    if message.repository_name:
        raise Unsupported("'repository_name' specification is not supported")


def read_load_parameters(message: Any) -> tuple[str | None, dict[str, bytes]]:
    """The configuration and the files (by path in the model's directory) that a load request brings."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, parameter in message.parameters.items():
        if key == "config":
            config = _typed(key, parameter, "string_param")
        elif key.startswith("file:"):
            files[key.removeprefix("file:")] = _typed(key, parameter, "bytes_param")
        else:
            raise InvalidArgument(f"unrecognized load parameter '{key}', expected 'config' or 'file:<path>'")
    return config, files


def read_unload_dependents(message: Any) -> bool:
    """Whether the models that only this one needs are to go with it."""
    unload_dependents = False
    for key, parameter in message.parameters.items():
        if key != "unload_dependents":
            raise InvalidArgument(f"unrecognized unload parameter '{key}', expected 'unload_dependents'")
        unload_dependents = _typed(key, parameter, "bool_param")
    return unload_dependents


def _typed(key: str, parameter: Any, expected: str) -> Any:
    if parameter.WhichOneof("parameter_choice") != expected:
        raise InvalidArgument(f"invalid value type for '{key}' parameter, expected {expected}.")
    return getattr(parameter, expected)
