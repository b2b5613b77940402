"""What the text after an option may be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """`parse` raises `ValueError` that says what was expected. A `bare` option stands alone, without a value."""

    metavar: str
    parse: Callable[[str], Any]
    bare: bool = False

    def written(self, value: Any) -> str:
        """A value as one would write it."""
        return str(value).lower() if isinstance(value, bool) else str(value)


def choice(*names: str) -> Kind:
    """One of `names`."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"expected {', '.join(names[:-1])} or {names[-1]}, got '{text}'")
        return text

    return Kind("|".join(names), parse)


def integer(minimum: int | None = None, maximum: int | None = None) -> Kind:
    """A whole number within the bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"expected a whole number, got '{text}'") from None
        _check_bounds(value, minimum, maximum)
        return value

    return Kind("INTEGER", parse)


def number(minimum: float | None = None) -> Kind:
    """A number, with a fraction or without."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"expected a number, got '{text}'") from None
        _check_bounds(value, minimum, None)
        return value

    return Kind("NUMBER", parse)


def _check_bounds(value: float, minimum: float | None, maximum: float | None) -> None:
    if not (minimum is None or value >= minimum):  # so that not-a-number is refused too
        raise ValueError(f"expected at least {minimum}, got {value}")
    if not (maximum is None or value <= maximum):
        raise ValueError(f"expected at most {maximum}, got {value}")


def _boolean(text: str) -> bool:
    lower = text.lower()
    if lower in ("true", "on", "1"):
        return True
    if lower in ("false", "off", "0"):
        return False
    raise ValueError(f"expected true or false, got '{text}'")


def _level(text: str) -> int:
    return int(_boolean(text)) if text.lower() in ("true", "false") else integer(0).parse(text)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got '{text}'")
    return value


TEXT = Kind("TEXT", str)
LOCATION = Kind("PATH|URI", lambda text: text if "://" in text else Path(text))
PATH = Kind("PATH", Path)
INTEGER = integer()
NUMBER = number()
PORT = integer(0, 65535)
BOOLEAN = Kind("true|false", _boolean)
FLAG = Kind("", _boolean, bare=True)
JSON_OBJECT = Kind("JSON", _object)
LEVEL = Kind("LEVEL", _level)
"""A whole number from 0, or true for 1 and false for 0."""
