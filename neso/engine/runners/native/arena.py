"""Memory for packed weights, in huge pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import neso._native as _native

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64


class Arena:
    """Hands out pieces of large chunks, never taken back.

    Weights are read from end to end in every step. In pages of 4 KB the look-ups of addresses cost a third of the
    bandwidth on a virtual machine, and most matrices by themselves are too small for huge pages.
    """

    def __init__(self) -> None:
        self._chunk = np.empty(0, np.uint8)
        self._used = 0

    def zeros(self, size: int) -> npt.NDArray[np.uint8]:
        """Zeroed uint8[size], at a multiple of 64 bytes."""
        if self._used + size > len(self._chunk):
            # Pages that are never touched take no memory.
            self._chunk = _native.zero_pages(max(size, _CHUNK_BYTES))
            self._used = 0
        piece = self._chunk[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return piece

    def copy(self, array: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """A copy of uint8[size]."""
        target = self.zeros(len(array))
        np.copyto(target, array)
        return target
