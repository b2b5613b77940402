"""Measures the memory of the torch allocator."""

from __future__ import annotations

from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """Measures the memory of a device that some work needs."""

    def begin(self) -> None:
        """Start a measurement."""

    def peak(self) -> int:
        """Return the maximum of the bytes in use since `begin`, less those in use now."""

    def taken(self) -> int:
        """Return the bytes in use now, less those in use at `begin`."""


class CudaMemory:
    """`DeviceMemory` of a GPU.

    Memory that the allocator has reserved counts as in use, because its fragments are not free for others.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free = 0

    def begin(self) -> None:
        self._free = self._release()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_reserved(self._device)
        self._release()
        return max(0, peak - torch.cuda.memory_reserved(self._device))

    def taken(self) -> int:
        return max(0, self._free - self._release())

    def _release(self) -> int:
        """Return unused memory to the device, and the bytes that are free then."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)
