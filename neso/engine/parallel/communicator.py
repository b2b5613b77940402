"""Communication between the ranks of a model during steps."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import neso._native as _native
from neso.engine.parallel.layout import RankLayout

Float32Array = npt.NDArray[np.float32]

SEGMENT_ALIGNMENT = 64
"""Alignment in bytes of the memory of a rank for `SharedAllReduce`."""


def aligned_segment(memory: Any, size: int) -> npt.NDArray[np.uint8]:
    """Return aligned `size` bytes of a buffer that is larger by `SEGMENT_ALIGNMENT`.

    Windows of Open MPI 4 begin at any multiple of 8 bytes. Processes that map a window at multiples of the page size
    find the same bytes.
    """
    found = np.frombuffer(memory, np.uint8)
    return found[-found.ctypes.data % SEGMENT_ALIGNMENT :][:size]


class Communicator(Protocol):
    """Connects this rank to the others. Every rank calls the same operations in the same order.

    An operation blocks until the other ranks take part. It never returns if one of them hangs: the supervisor ends all
    ranks in this case (`neso.engine.parallel.supervisor`).
    """

    layout: RankLayout
    native_all_reduce: _native.AllReduce | None
    """`all_reduce` for the step of the native runner; None without tensor parallelism."""

    def all_reduce(self, values: Float32Array) -> None:
        """Replace contiguous `values` by their sum over the tensor-parallel group; bitwise equal on its ranks."""

    def gather(self, values: Float32Array) -> list[Float32Array] | None:
        """Collect float32[rows, columns] of the tensor-parallel group on its first rank; None elsewhere.

        Each rank has as many columns in every call.
        """

    def send(self, values: Float32Array, rank: int) -> None:
        """Send contiguous activations to a rank."""

    def receive(self, values: Float32Array, rank: int) -> None:
        """Fill `values` with the activations sent by a rank."""

    def barrier(self) -> None:
        """Wait for all ranks."""
