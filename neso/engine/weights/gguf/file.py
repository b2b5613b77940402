"""A memory-mapped GGUF file: a checked header, and tensors as views without a copy.

Format (versions 2 and 3): magic, version, counts, metadata as typed key-value pairs, an entry for each tensor,
then the data, each tensor at a multiple of the alignment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from neso.engine.weights.errors import CheckpointError
from neso.engine.weights.gguf.header_reader import HeaderReader, Value
from neso.engine.weights.gguf.metadata import Metadata
from neso.engine.weights.gguf.tensor_types import OTHER_TYPES, TENSOR_TYPES, TensorType
from neso.engine.weights.mapped_tensors import MappedTensors

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4  # ggml's own limit
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `start` and `end` count from the first byte of the data. The shape is [..., inputs]."""

    type: TensorType
    shape: tuple[int, ...]
    start: int
    end: int


class GGUFFile(MappedTensors[TensorEntry]):
    """Opens and checks one file. Every defect raises `CheckpointError` at opening, naming file and defect.

    - metadata: the key-value pairs
    - names(), entry(name), tensor(name): the tensors, by the names of the file
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        assert self._buffer is not None
        reader = HeaderReader(path, self._buffer)
        num_tensors, num_pairs = self._read_start(reader)
        self.metadata = Metadata(path, self._read_pairs(reader, num_pairs))
        alignment = self.metadata.integer("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment < 1 or alignment % 8:
            raise CheckpointError(f"{path}: 'general.alignment' must be a multiple of 8, not {alignment}")
        self._entries = self._read_entries(reader, num_tensors, alignment)
        self._data_start = -(-reader.position // alignment) * alignment
        self._check_layout(max(0, len(self._buffer) - self._data_start), gapless=False)

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """A read-only view: the values, or of a quantized type the blocks, uint8[..., bytes of a row].

        Raises `CheckpointError` when there is no such tensor or the file is closed.
        """
        entry = self.entry(name)
        kind, shape = entry.type, entry.shape
        if kind.dtype is None:
            shape = (*shape[:-1], shape[-1] // kind.block_size * kind.block_bytes)
        return self._view(entry, kind.dtype or np.dtype(np.uint8), shape)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_start(self, file: BinaryIO) -> None:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise CheckpointError(f"{self.path}: no GGUF file: it does not begin with 'GGUF'")

    def _read_start(self, reader: HeaderReader) -> tuple[int, int]:
        """Counts of tensors and of metadata pairs."""
        reader.uint32("the magic")
        version = reader.uint32("the version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            defect = "is big-endian" if swapped in _VERSIONS else f"has the GGUF version {version}"
            raise CheckpointError(f"{self.path}: {defect}; supported are versions 2 and 3, little-endian")
        return reader.uint64("the number of tensors"), reader.uint64("the number of metadata pairs")

    def _read_pairs(self, reader: HeaderReader, count: int) -> dict[str, Value]:
        pairs: dict[str, Value] = {}
        for index in range(count):
            key = reader.string(f"key {index} of the metadata")
            if key in pairs:
                raise CheckpointError(f"{self.path}: metadata key {key!r} is there twice")
            pairs[key] = reader.value(f"metadata key {key!r}")
        return pairs

    def _read_entries(self, reader: HeaderReader, count: int, alignment: int) -> dict[str, TensorEntry]:
        entries: dict[str, TensorEntry] = {}
        for index in range(count):
            name = reader.string(f"the name of tensor {index}")
            if name in entries:
                raise CheckpointError(f"{self.path}: tensor {name!r} is there twice")
            entries[name] = self._read_entry(reader, name, alignment)
        return entries

    def _read_entry(self, reader: HeaderReader, name: str, alignment: int) -> TensorEntry:
        what = f"the entry of tensor {name!r}"
        dimensions = reader.uint32(what)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(f"{self.path}: tensor {name!r}: {dimensions} dimensions, not 1 to 4")
        # ggml names the innermost dimension first.
        shape = tuple(reader.uint64(what) for _ in range(dimensions))[::-1]
        number, start = reader.uint32(what), reader.uint64(what)
        if number not in TENSOR_TYPES:
            found = OTHER_TYPES.get(number, f"number {number}")
            known = ", ".join(kind.name for kind in TENSOR_TYPES.values())
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has the type {found}, which is not supported; supported are {known}"
            )
        kind = TENSOR_TYPES[number]
        if shape[-1] % kind.block_size:
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: rows of {shape[-1]} values are no multiple of {kind.name}'s "
                f"blocks of {kind.block_size}"
            )
        if start % alignment:
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: offset {start} is not aligned to {alignment}"
            )
        return TensorEntry(kind, shape, start, start + math.prod(shape) // kind.block_size * kind.block_bytes)
