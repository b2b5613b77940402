"""Garbage-collector settings of a server process, and release of memory after models were unloaded."""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any


def release_memory() -> None:
    """Collect reference cycles (such as modules of Python models) and return free pages to the system.

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


def freeze_gc() -> None:
    """Exclude existing objects (modules, models) from garbage collection, and keep freed large buffers in the heap.

    For server processes only. Otherwise a full collection of some 100,000 long-lived objects delays requests by about
    20 ms from time to time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    if _mallopt is not None:
        # By default glibc unmaps each freed large tensor, and the next one is zeroed page by page again.
        _mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        _mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)


# Threshold of the youngest generation; the default of 700 is below the number of objects of requests in flight.
_GC_THRESHOLD = 5000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD = 32 << 20  # bytes; maximum that glibc allows
_TRIM_THRESHOLD = 256 << 20


def _find(function: str) -> Any:
    """A glibc function; None on other systems."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), function, None)


_malloc_trim, _mallopt = _find("malloc_trim"), _find("mallopt")
