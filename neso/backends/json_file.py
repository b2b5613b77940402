"""Files beside a model that hold a JSON object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from neso.server.errors import InvalidArgument


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file. Raises `InvalidArgument`."""
    if not path.is_file():
        return {}
    try:
        content = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"{path.name}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidArgument(f"{path.name}: must hold a JSON object")
    return content
