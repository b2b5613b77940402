"""Garbage-collector settings of a server process, and memory release after unloading models."""

from __future__ import annotations

import ctypes
import gc
import sys
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
_MMAP_THRESHOLD = 32 << 20  # bytes; maximum that glibc allows
_TRIM_THRESHOLD = 256 << 20


def _find(function: str) -> Any:
    """Return a glibc function; None on systems without glibc."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), function, None)


_malloc_trim, _mallopt = _find("malloc_trim"), _find("mallopt")
