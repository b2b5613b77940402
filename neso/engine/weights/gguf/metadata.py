"""Metadata of a GGUF file: parsing the header, and typed access to its key-value pairs."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.weights.source import CheckpointError

Value = int | float | bool | str | list[str] | npt.NDArray[Any]

_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype(np.bool_),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9
_UINT64 = struct.Struct("<Q")


class HeaderReader:
    """Reads little-endian numbers, strings, arrays and typed values from the start of a GGUF file.

    `what` names the value in error messages. All methods raise `CheckpointError` for a truncated or invalid file.
    """

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.position = 0
        self._path = path
        self._buffer = buffer

    def uint32(self, what: str) -> int:
        return int.from_bytes(self._take(4, what), "little")

    def uint64(self, what: str) -> int:
        return int.from_bytes(self._take(8, what), "little")

    def string(self, what: str) -> str:
        content = self._take(self.uint64(what), what)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {what} is not valid UTF-8: {error}") from None

    def value(self, what: str) -> Value:
        """Read a value preceded by its type. Arrays of numbers are read-only views, arrays of strings are lists."""
        kind = self.uint32(what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        dtype = self._number(kind, what)
        number: Value = np.frombuffer(self._take(dtype.itemsize, what), dtype)[0].item()
        return number

    def _array(self, what: str) -> Value:
        kind, count = self.uint32(what), self.uint64(what)
        if kind == _STRING:
            return self._strings(count, what)
        if kind == _ARRAY:
            raise CheckpointError(f"{self._path}: {what} is an array of arrays, which is not supported")
        dtype = self._number(kind, what)
        return np.frombuffer(self._take(count * dtype.itemsize, what), dtype)

    def _strings(self, count: int, what: str) -> list[str]:
        """Read strings. Separate from `string` for speed: a vocabulary and its merges are half a million strings."""
        buffer, position, end = self._buffer, self.position, len(self._buffer)
        strings = []
        for _ in range(count):
            start = position + 8
            if start > end or (position := start + _UINT64.unpack_from(buffer, position)[0]) > end:
                raise self._truncated(what)
            strings.append(buffer[start:position])
        self.position = position
        try:
            return [item.decode() for item in strings]
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {what} contains invalid UTF-8: {error}") from None

    def _number(self, kind: int, what: str) -> np.dtype[Any]:
        if kind not in _NUMBERS:
            raise CheckpointError(f"{self._path}: {what} has the unknown type {kind}")
        return _NUMBERS[kind]

    def _take(self, count: int, what: str) -> bytes:
        end = self.position + count
        if end > len(self._buffer):
            raise self._truncated(what)
        taken = self._buffer[self.position : end]
        self.position = end
        return taken

    def _truncated(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {what} extends beyond the end of the file ({len(self._buffer)} bytes); "
            "it is truncated or corrupt"
        )


class Metadata:
    """Typed access to key-value pairs; a missing key returns the default.

    Raises `CheckpointError`, naming the key, for a value of another type and for a missing key without default.
    """

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer, or the value of an array with equal integers for all layers."""
        value = self._value(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if (value != value[0]).any():
                raise self.error(key, "differs between layers, which is not supported")
            return int(value[0])
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, not {_shown(value)}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
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
        """Return an array of `count` numbers; None if the key is missing."""
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
