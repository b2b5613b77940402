"""The key-value pairs of a GGUF file, by key and kind of value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.weights.errors import CheckpointError
from neso.engine.weights.gguf.header_reader import Value


class Metadata:
    """Each method gives the value of a key, or `default` where the key is not there.

    Raises `CheckpointError`, naming the key, for a value of another kind, and for a missing key without default.
    """

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer; one for each layer if they are all the same."""
        value = self._value(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if (value != value[0]).any():
                raise self.error(key, "differs between layers, which is not supported")
            return int(value[0])
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, not {_shown(value)}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """An integer above zero."""
        value = self.integer(key, default)
        if value < 1:
            raise self.error(key, f"must be positive, not {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise self.error(key, f"must be a number, not {_shown(value)}")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {_shown(value)}")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {_shown(value)}")
        return value

    def strings(self, key: str, default: list[str] | None = None) -> list[str]:
        value = self._value(key, default)
        if not isinstance(value, list):
            raise self.error(key, f"must be an array of strings, not {_shown(value)}")
        return value

    def numbers(self, key: str, count: int) -> npt.NDArray[Any] | None:
        """An array of `count` numbers; None where the key is not there."""
        if key not in self._values:
            return None
        value = self._values[key]
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self.error(key, f"must be an array of {count} numbers, not {_shown(value)}")
        return value

    def error(self, key: str, defect: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: metadata key {key!r} {defect}")

    def _value(self, key: str, default: Value | None) -> Value:
        value = self._values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: metadata key {key!r} is missing")
        return value


def _shown(value: Value) -> str:
    if isinstance(value, list | np.ndarray):
        return f"an array of {len(value)}"
    return repr(value)[:80]
