"""Garbage-collector settings of a server process, and memory release after unloading models."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
import sys
from collections.abc import Callable
from typing import Any


def release_memory() -> None:
    """Collect reference cycles (such as modules of Python models) and return free pages to the operating system.

    Blocks and holds the GIL for about 10 ms.
    """
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
    if _malloc_trim is not None:
        _malloc_trim(0)


async def trim_when_idle(busy: Callable[[], bool], interval: float = 10.0) -> None:
    """Return free pages to the operating system when memory has grown and no request is in flight, until cancelled.

    `busy`: whether requests are in flight. glibc keeps the pages of large requests for the next ones (`freeze_gc`),
    which is right under load only.
    """
    if _malloc_trim is None:
        return
    least = resident_memory()
    while True:
        await asyncio.sleep(interval)
        resident = resident_memory()
        if resident - least > _WORTH_TRIMMING and not busy():
            await asyncio.to_thread(_malloc_trim, 0)
            least = resident_memory()
        least = min(least, resident)


def resident_memory() -> int:
    """Return the resident memory of this process in bytes (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def freeze_gc() -> None:
    """Exclude existing objects (modules, models) from garbage collection, and keep freed large buffers in the heap.

    For server processes only. Without it, occasional full collections of about 100,000 long-lived objects delay
    requests by about 20 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    if _mallopt is not None:
        # By default glibc unmaps each large tensor when it is freed; the pages of the next one must be zeroed again.
        _mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        _mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)


# Threshold of the youngest generation; requests in flight have more objects than the default of 700.
_GC_THRESHOLD = 5000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_WORTH_TRIMMING = 16 << 20  # bytes
_MMAP_THRESHOLD = 32 << 20  # bytes; maximum that glibc allows
_TRIM_THRESHOLD = 256 << 20


def _find(function: str) -> Any:
    """Return a glibc function; None on systems without glibc."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), function, None)


_malloc_trim, _mallopt = _find("malloc_trim"), _find("mallopt")
