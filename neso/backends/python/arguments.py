"""Checks of arguments of pb_utils. As in Triton, arguments of a wrong type raise `TypeError`."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, TypeVar

from neso.backends.python.errors import TritonModelException

Item = TypeVar("Item")


def as_text(value: Any, name: str) -> str:
    """Return a str argument; UTF-8 bytes are accepted too, for example an element of a BYTES tensor."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode()
    raise _wrong_type(value, name, "a str")


def as_integer(value: Any, name: str) -> int:
    """Return an integer argument."""
    try:
        return operator.index(value)
    except TypeError:
        raise _wrong_type(value, name, "an int") from None


def as_list(values: Iterable[Item], item_type: type[Item], name: str) -> list[Item]:
    """Return a list argument. Raises `TritonModelException` if an item is None."""
    if values is None or isinstance(values, str | bytes):
        raise _wrong_type(values, name, "a list")
    items = list(values)
    for item in items:
        if item is None:
            raise TritonModelException(f"{name} must not contain None")
        if not isinstance(item, item_type):
            raise TypeError(
                f"{name} must contain pb_utils.{item_type.__name__} objects, got {type(item).__name__}"
            )
    return items


def _wrong_type(value: Any, name: str, expected: str) -> TypeError:
    return TypeError(f"{name} must be {expected}, got {type(value).__name__}")
