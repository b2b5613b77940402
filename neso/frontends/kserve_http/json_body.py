"""JSON bodies, read and written as Triton does: NaN and Infinity are numbers."""

from __future__ import annotations

import json
from typing import Any

import orjson

from neso.server.errors import InvalidArgument


def read_json(body: bytes | memoryview) -> Any:
    """Parse. Raises `InvalidArgument`."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        text = bytes(body)
        if b"NaN" in text or b"Infinity" in text:
            return _read_not_finite(text)
        raise InvalidArgument(_message(error)) from None


def read_object(body: bytes | memoryview) -> dict[str, Any]:
    """Parse an object. Raises `InvalidArgument`."""
    value = read_json(body)
    if type(value) is not dict:
        raise InvalidArgument("failed to parse the request JSON buffer: expected a JSON object")
    return value


def read_optional_object(body: bytes) -> dict[str, Any]:
    """Parse an object that may be left out altogether. Raises `InvalidArgument`."""
    return read_object(body) if body else {}


def write_json(value: Any) -> bytes:
    """Serialize."""
    text = orjson.dumps(value)
    if b"null" in text:  # what the fast writer makes of NaN and infinite numbers
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    return text


def _read_not_finite(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(_message(error)) from None


def _message(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"failed to parse the request JSON buffer: {error.msg} at {error.pos}"
    return f"failed to parse the request JSON buffer: {error}"
