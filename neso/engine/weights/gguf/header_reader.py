"""Reads the header of a GGUF file from its start: little-endian numbers, strings, arrays and typed values."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.weights.errors import CheckpointError

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
    """A position in the file that only moves forward. `what` is what an error says cannot be read."""

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
            raise CheckpointError(f"{self._path}: {what} is no valid UTF-8: {error}") from None

    def value(self, what: str) -> Value:
        """A value with its type before it. Arrays of numbers are read-only views, arrays of strings lists."""
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
        """A loop of its own: a vocabulary with its merges has half a million of them."""
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
            raise CheckpointError(f"{self._path}: {what} holds no valid UTF-8: {error}") from None

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
            f"{self._path}: {what} reaches beyond the end of the file ({len(self._buffer)} bytes); "
            "it is truncated or corrupt"
        )
