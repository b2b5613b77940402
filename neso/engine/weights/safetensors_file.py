"""Reader and writer of safetensors files.

Format: 8 bytes header length (little-endian), a JSON header {name: {dtype, shape, data_offsets}}, the data. Files are
parsed here because the library `safetensors` has no bfloat16 or float8 views for NumPy.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neso.engine.weights.files import MappedTensors
from neso.engine.weights.source import CheckpointError

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
    """Dtype, shape and byte range of a tensor; `start` and `end` are relative to the end of the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile(MappedTensors[TensorEntry]):
    """A memory-mapped file. Raises `CheckpointError` on opening for any defect, naming the file and the defect."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        assert self._buffer is not None
        self._data_start = _LENGTH_BYTES + self._header_length(self._buffer)
        self._entries = self._parse(self._buffer[_LENGTH_BYTES : self._data_start])
        self._check_layout(len(self._buffer) - self._data_start, gapless=True)

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a read-only view. Raises `CheckpointError` if the tensor does not exist or the file is closed."""
        entry = self.entry(name)
        return self._view(entry, entry.dtype, entry.shape)

    def _check_start(self, file: BinaryIO) -> None:
        size = file.seek(0, 2)
        if size < _LENGTH_BYTES:
            raise CheckpointError(f"{self.path}: {size} bytes are too few for a safetensors file")

    def _header_length(self, buffer: mmap.mmap) -> int:
        length = int.from_bytes(buffer[:_LENGTH_BYTES], "little")
        if length > min(_MAX_HEADER_BYTES, len(buffer) - _LENGTH_BYTES):
            raise CheckpointError(
                f"{self.path}: the header claims {length} bytes, in a file of {len(buffer)} bytes; "
                "it is truncated or not a safetensors file"
            )
        return length

    def _parse(self, header: bytes) -> dict[str, TensorEntry]:
        try:
            fields = json.loads(header.decode(), object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: the header is invalid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise CheckpointError(f"{self.path}: the header is not a JSON object")
        metadata = fields.pop("__metadata__", None)
        self.metadata = metadata if isinstance(metadata, dict) else {}
        return {name: self._parse_entry(name, value) for name, value in fields.items()}

    def _parse_entry(self, name: str, value: Any) -> TensorEntry:
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path}: tensor {name!r}: the header entry is not a JSON object")
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


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate name {next(name for name in names if names.count(name) > 1)!r}")
    return fields


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    """Whether the value is a list of non-negative integers."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


ALIGNMENT = 64
"""Alignment of the data in bytes; tensors whose sizes are multiples of it are all aligned."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsWriter:
    """Writes one tensor at a time, so that they are not all in memory at once. A context manager.

    `header_bytes` are reserved for the header, which is written last. The file gets its final name only when it is
    complete; after an error no file remains. `metadata`: texts that are stored in the header.
    """

    def __init__(self, path: Path, header_bytes: int) -> None:
        self.path = path
        self._partial = path.with_name(path.name + ".partial")
        self._data_start = -(-(_LENGTH_BYTES + header_bytes) // ALIGNMENT) * ALIGNMENT
        self._file = open(self._partial, "wb")  # noqa: SIM115, closed by __exit__
        self._file.seek(self._data_start)
        self._header: dict[str, Any] = {}
        self.metadata: dict[str, str] = {}
        self._end = 0

    def add(self, name: str, array: npt.NDArray[Any]) -> None:
        """Append a tensor."""
        contiguous = np.ascontiguousarray(array)
        self._file.write(contiguous.reshape(-1).view(np.uint8).data)
        end = self._end + contiguous.nbytes
        self._header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [self._end, end],
        }
        self._end = end

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._file.close()
            self._partial.unlink()
            return
        fields = {"__metadata__": self.metadata, **self._header} if self.metadata else self._header
        header = json.dumps(fields, separators=(",", ":")).encode()
        room = self._data_start - _LENGTH_BYTES
        if len(header) > room:
            raise ValueError(
                f"{self.path}: the header takes {len(header)} bytes, but only {room} were reserved"
            )
        self._file.seek(0)
        self._file.write(room.to_bytes(_LENGTH_BYTES, "little") + header.ljust(room))
        self._file.close()
        self._partial.replace(self.path)
