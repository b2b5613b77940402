"""A KV cache in memory that other processes of the same host can map."""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Memory layout of a KV cache: the bytes of a block are `part_bytes` bytes in each of `num_parts` arrays.

    A part is a layer, or one of the heads of a layer.
    """

    num_parts: int
    num_blocks: int
    part_bytes: int

    @property
    def cache_bytes(self) -> int:
        return self.num_parts * self.num_blocks * self.part_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_parts * self.part_bytes


class CacheFormat(NamedTuple):
    """Order of the values within a block, their dtype, and the keys and values of a token.

    layout: "native", "heads" or "tokens", see `neso/engine/kv_transfer/conversion.py`
    """

    layout: str
    dtype: str
    num_layers: int
    kv_heads: int
    head_dim: int


class SharedCache:
    """The memory of a KV cache, and the epochs of its blocks.

    A reader in another process copies a block and then compares its epoch: a block whose epoch has not changed was not
    given to another sequence in the meantime. The memory stays valid for a reader when its owner has ended.

    - fd: file descriptor of the memory; it is closed with this object
    - blocks: uint8[num_parts, num_blocks, part_bytes]
    - epochs: uint64[num_blocks], see `BlockPool.epochs`
    """

    def __init__(self, fd: int, shape: CacheShape, *, writable: bool) -> None:
        self.fd = fd
        self.shape = shape
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        memory = mmap.mmap(fd, _file_bytes(shape), flags=mmap.MAP_SHARED, prot=access)
        with contextlib.suppress(OSError):  # kernels without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        data = np.frombuffer(memory, np.uint8)
        self.blocks: npt.NDArray[np.uint8] = data[: shape.cache_bytes].reshape(
            shape.num_parts, shape.num_blocks, shape.part_bytes
        )
        start = _epochs_start(shape)
        self.epochs: npt.NDArray[np.uint64] = data[start : start + 8 * shape.num_blocks].view(np.uint64)

    @classmethod
    def create(cls, shape: CacheShape) -> SharedCache:
        """Create zeroed memory, which the system allocates when it is written. Raises `OSError`."""
        fd = os.memfd_create("neso-kv-cache")
        try:
            os.ftruncate(fd, _file_bytes(shape))
            return cls(fd, shape, writable=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, path: str, shape: CacheShape) -> SharedCache:
        """Map the memory of another process for reading. Raises `OSError`; `ValueError` if its size is different."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != _file_bytes(shape):
                raise ValueError(f"{path} has {os.fstat(fd).st_size} bytes, expected {_file_bytes(shape)}")
            return cls(fd, shape, writable=False)
        except BaseException:
            os.close(fd)
            raise

    def __del__(self) -> None:
        # The mapping stays until the last array that uses it is gone.
        if hasattr(self, "epochs"):
            os.close(self.fd)


def block_runs(blocks: list[int], targets: list[int]) -> list[tuple[int, int, int]]:
    """Return the first block, first target and length of each run in which both are consecutive."""
    runs, start = [], 0
    for i in range(1, len(blocks) + 1):
        if (
            i == len(blocks)
            or blocks[i] != blocks[start] + i - start
            or targets[i] != targets[start] + i - start
        ):
            runs.append((blocks[start], targets[start], i - start))
            start = i
    return runs


def _epochs_start(shape: CacheShape) -> int:
    return -(-shape.cache_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _file_bytes(shape: CacheShape) -> int:
    return _epochs_start(shape) + 8 * shape.num_blocks
