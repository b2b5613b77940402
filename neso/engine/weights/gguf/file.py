"""A memory-mapped GGUF file with a checked header.

Format (versions 2 and 3): magic, version, counts, metadata as typed key-value pairs, one entry per tensor, then the
data, with each tensor at a multiple of the alignment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neso.engine.weights.files import MappedTensors
from neso.engine.weights.gguf.metadata import HeaderReader, Metadata, Value
from neso.engine.weights.source import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorType:
    """A ggml tensor type: blocks of `block_size` consecutive values of a row take `block_bytes` bytes each.

    `dtype`: dtype of the values; None for quantized types.
    """

    name: str
    block_size: int
    block_bytes: int
    dtype: np.dtype[Any] | None = None


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4, np.dtype(np.float32)),
    1: TensorType("F16", 1, 2, np.dtype(np.float16)),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
}

# Unsupported types, for error messages.
OTHER_TYPES: dict[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4  # ggml's own limit
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Type, shape [..., inputs] and byte range of a tensor, relative to the start of the data."""

    type: TensorType
    shape: tuple[int, ...]
    start: int
    end: int


class GGUFFile(MappedTensors[TensorEntry]):
    """A memory-mapped GGUF file. Raises `CheckpointError` on opening for any defect, naming the file and the defect.

    - metadata: the key-value pairs
    - names(), entry(name), tensor(name): the tensors, by GGUF name
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
        """Return a read-only view of the values, or for quantized types of the blocks, uint8[..., bytes per row].

        Raises `CheckpointError` if the tensor does not exist or the file is closed.
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
            raise CheckpointError(f"{self.path}: not a GGUF file: it does not begin with 'GGUF'")

    def _read_start(self, reader: HeaderReader) -> tuple[int, int]:
        """Return (number of tensors, number of metadata pairs)."""
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
                raise CheckpointError(f"{self.path}: metadata key {key!r} is duplicated")
            pairs[key] = reader.value(f"metadata key {key!r}")
        return pairs

    def _read_entries(self, reader: HeaderReader, count: int, alignment: int) -> dict[str, TensorEntry]:
        entries: dict[str, TensorEntry] = {}
        for index in range(count):
            name = reader.string(f"the name of tensor {index}")
            if name in entries:
                raise CheckpointError(f"{self.path}: tensor {name!r} is duplicated")
            entries[name] = self._read_entry(reader, name, alignment)
        return entries

    def _read_entry(self, reader: HeaderReader, name: str, alignment: int) -> TensorEntry:
        what = f"the entry of tensor {name!r}"
        dimensions = reader.uint32(what)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(f"{self.path}: tensor {name!r}: {dimensions} dimensions, not 1 to 4")
        # ggml lists the innermost dimension first.
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
                f"{self.path}: tensor {name!r}: rows of {shape[-1]} values are not a multiple of {kind.name}'s "
                f"blocks of {kind.block_size}"
            )
        if start % alignment:
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: offset {start} is not aligned to {alignment}"
            )
        return TensorEntry(kind, shape, start, start + math.prod(shape) // kind.block_size * kind.block_bytes)
