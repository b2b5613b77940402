"""JSON that holds what a client wrote."""

from __future__ import annotations

import json
from typing import Any

import orjson


def json_text(value: Any) -> bytes:
    """The JSON text of `value`, also with integers of more than 64 bits, as the schemas of tools may have."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False).encode()
