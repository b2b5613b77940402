"""JSON as models write it."""

from __future__ import annotations

import ast
import json

import orjson


def is_json_object(text: str) -> bool:
    """Whether `text` is an object of JSON."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def literal_json(text: str) -> str | None:
    """JSON text of a value that is written as JSON or as Python; None if it is neither, or JSON has no such value."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = json.dumps(read(text.strip()), ensure_ascii=False, allow_nan=False)
            value.encode()  # half a surrogate pair is no text
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        return value
    return None
