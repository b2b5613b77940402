"""Writes a safetensors file tensor by tensor, so that none must stay in memory."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.weights.safetensors_file import DTYPES

ALIGNMENT = 64
"""Bytes that the data begins at a multiple of: tensors whose sizes are multiples of it all lie aligned."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8


class SafetensorsWriter:
    """A context manager. The header has room for `header_bytes`, kept free at the start and padded with spaces.

    The file appears under its name only when all is written; after an error nothing is left of it.
    """

    def __init__(self, path: Path, header_bytes: int) -> None:
        self.path = path
        self._partial = path.with_name(path.name + ".partial")
        self._data_start = -(-(_LENGTH_BYTES + header_bytes) // ALIGNMENT) * ALIGNMENT
        self._file = open(self._partial, "wb")  # noqa: SIM115, closed by __exit__
        self._file.seek(self._data_start)
        self._header: dict[str, Any] = {}
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._file.close()
            self._partial.unlink()
            return
        header = json.dumps(self._header, separators=(",", ":")).encode()
        room = self._data_start - _LENGTH_BYTES
        if len(header) > room:
            raise ValueError(f"{self.path}: the header takes {len(header)} bytes, room was kept for {room}")
        self._file.seek(0)
        self._file.write(room.to_bytes(_LENGTH_BYTES, "little") + header.ljust(room))
        self._file.close()
        self._partial.replace(self.path)
