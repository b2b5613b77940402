"""A memory-mapped safetensors file: a checked header, and tensors as views without a copy.

Format: 8 bytes header length (little-endian), a JSON header {name: {dtype, shape, data_offsets}}, the data.
The library `safetensors` gives numpy no bfloat16 or float8 views, hence a reader of our own.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neso.engine.weights.errors import CheckpointError

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `start` and `end` count from the first byte after the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """Opens and checks one file. Every defect raises `CheckpointError` at opening, naming file and defect.

    The tensors are read-only views of the map. `close` drops it; the pages go when the last view does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer: mmap.mmap | None = self._map()
        header_bytes = self._header_length()
        self._data_start = _LENGTH_BYTES + header_bytes
        self._entries = self._parse(self._buffer[_LENGTH_BYTES : self._data_start])
        self._check_layout(len(self._buffer) - self._data_start)

    def names(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> TensorEntry:
        """Raises `CheckpointError` when there is no such tensor."""
        if name not in self._entries:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        return self._entries[name]

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """A read-only view. Raises `CheckpointError` when there is no such tensor or the file is closed."""
        entry = self.entry(name)
        if self._buffer is None:
            raise CheckpointError(f"{self.path}: the file is closed")
        count = math.prod(entry.shape)
        if count == 0:
            return np.empty(entry.shape, entry.dtype)
        flat = np.frombuffer(self._buffer, entry.dtype, count, self._data_start + entry.start)
        return flat.reshape(entry.shape)

    def close(self) -> None:
        self._buffer = None

    def _map(self) -> mmap.mmap:
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, 2)
                if size < _LENGTH_BYTES:
                    raise CheckpointError(f"{self.path}: {size} bytes are too few for a safetensors file")
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _header_length(self) -> int:
        assert self._buffer is not None
        length = int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
        if length > min(_MAX_HEADER_BYTES, len(self._buffer) - _LENGTH_BYTES):
            raise CheckpointError(
                f"{self.path}: the header claims {length} bytes, in a file of {len(self._buffer)} bytes; "
                "it is truncated or no safetensors file"
            )
        return length

    def _parse(self, header: bytes) -> dict[str, TensorEntry]:
        try:
            fields = json.loads(header.decode(), object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: the header is no valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise CheckpointError(f"{self.path}: the header is no JSON object")
        fields.pop("__metadata__", None)
        return {name: self._parse_entry(name, value) for name, value in fields.items()}

    def _parse_entry(self, name: str, value: Any) -> TensorEntry:
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path}: tensor {name!r}: the header entry is no JSON object")
        dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise CheckpointError(f"{self.path}: tensor {name!r}: unknown dtype {dtype!r}")
        if not _are_sizes(shape):
            raise CheckpointError(f"{self.path}: tensor {name!r}: invalid shape {shape!r}")
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise CheckpointError(f"{self.path}: tensor {name!r}: invalid data_offsets {offsets!r}")
        entry = TensorEntry(DTYPES[dtype], tuple(shape), *offsets)
        expected = math.prod(shape) * entry.dtype.itemsize
        if entry.end - entry.start != expected:
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: {dtype} {list(shape)} takes {expected} bytes, "
                f"but data_offsets {offsets} hold {entry.end - entry.start}"
            )
        return entry

    def _check_layout(self, data_bytes: int) -> None:
        """The format has the tensors fill the data without gap or overlap."""
        end = 0
        for name, entry in sorted(self._entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.end > data_bytes:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} ends at byte {entry.end} of {data_bytes} bytes of data; "
                    "the file is truncated"
                )
            if entry.start != end:
                defect = "overlaps the tensor before it" if entry.start < end else "leaves a gap before it"
                raise CheckpointError(f"{self.path}: tensor {name!r} {defect}")
            end = entry.end
        if end != data_bytes:
            raise CheckpointError(
                f"{self.path}: {data_bytes - end} bytes after the last tensor belong to none"
            )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate name {next(name for name in names if names.count(name) > 1)!r}")
    return fields


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    """Whether this is a list of integers that are not negative."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
