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


def as_list(values: Iterable[Item] | None, item_type: type[Item], name: str) -> list[Item]:
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


def as_parameters(values: dict[str, Any] | None) -> dict[str, Any]:
    """Return a copy of the parameters of a request or response. Raises `TritonModelException` for invalid ones.

    Values are str, int, float or bool; Triton does not accept float.
    """
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise TritonModelException(f"Expect a dict of parameters, got {type(values)}")
    for key, value in values.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, str | int | float):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
    return dict(values)


def _wrong_type(value: Any, name: str, expected: str) -> TypeError:
    return TypeError(f"{name} must be {expected}, got {type(value).__name__}")
