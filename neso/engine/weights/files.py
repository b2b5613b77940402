"""Checkpoint files: JSON objects and memory-mapped tensor files."""

from __future__ import annotations

import json
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from neso.engine.weights.source import CheckpointError


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises `CheckpointError`."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: invalid JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, which must be an object. Raises `CheckpointError`."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content


class _Extent(Protocol):
    """Byte range of a tensor, relative to the start of the data."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


Entry = TypeVar("Entry", bound=_Extent)


class MappedTensors(ABC, Generic[Entry]):
    """A memory-mapped file of named tensors. Subclasses parse the header into `_entries` and `_data_start`.

    Tensors are read-only views of the mapping. `close` releases it; the file is unmapped when its last view is
    released.
    """

    _entries: dict[str, Entry]
    _data_start: int

    def __init__(self, path: Path) -> None:
        """Map the file. Raises `CheckpointError` if it cannot be read."""
        self.path = path
        self._buffer: mmap.mmap | None = self._map()

    def names(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
        """Return the entry of a tensor. Raises `CheckpointError` if it does not exist."""
        if name not in self._entries:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        return self._entries[name]

    def close(self) -> None:
        self._buffer = None

    @abstractmethod
    def _check_start(self, file: BinaryIO) -> None:
        """Check the format before the file is mapped. Raises `CheckpointError`."""

    def _view(self, entry: Entry, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return a view of a tensor. Raises `CheckpointError` if the file is closed or the shape is impossible."""
        if self._buffer is None:
            raise CheckpointError(f"{self.path}: the file is closed")
        count = math.prod(shape)
        try:
            if count == 0:
                return np.empty(shape, dtype)
            return np.frombuffer(self._buffer, dtype, count, self._data_start + entry.start).reshape(shape)
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: no tensor can have the shape {list(shape)}: {error}"
            ) from None

    def _map(self) -> mmap.mmap:
        try:
            with open(self.path, "rb") as file:
                self._check_start(file)
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _check_layout(self, data_bytes: int, *, gapless: bool) -> None:
        """Check that tensors lie within the file and do not overlap; `gapless`: also that they fill it."""
        end = 0
        for name, entry in sorted(self._entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.end > data_bytes:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} ends at byte {entry.end} of {data_bytes} bytes of data; "
                    "the file is truncated"
                )
            if entry.start < end:
                raise CheckpointError(f"{self.path}: tensor {name!r} overlaps the tensor before it")
            if gapless and entry.start > end:
                raise CheckpointError(f"{self.path}: tensor {name!r} leaves a gap before it")
            end = entry.end
        if gapless and end != data_bytes:
            raise CheckpointError(
                f"{self.path}: {data_bytes - end} bytes after the last tensor belong to none"
            )
