"""What the garbage collector looks at, and memory of models that were unloaded back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any


def release_memory() -> None:
    """Collect what refers to itself, as the modules of Python models do, and give free pages back.

    Blocks, and holds the interpreter for some 10 ms.
    """
    settled = gc.get_freeze_count() > 0
    if settled:
        gc.unfreeze()
    gc.collect()
    if settled:
        gc.freeze()
    if _malloc_trim is not None:
        _malloc_trim(0)


def freeze_gc() -> None:
    """Let the garbage collector leave alone what there is now (modules and models, which stay), keep large buffers.

    For a process that is a server and nothing else. Without it, every so many requests wait some 20 ms while hundreds
    of thousands of objects are looked at in vain.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
    if _mallopt is not None:
        # Else glibc gives the memory of each large tensor back, and has it zeroed again, page by page, for the next.
        _mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        _mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


# New objects before those that are left of them are looked at: requests in flight are more than the usual 700, and were
# looked at again and again.
_YOUNG = 5000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 32 << 20  # bytes; the most that glibc allows
_MOST_KEPT = 256 << 20


def _find(function: str) -> Any:
    """One of glibc's; others keep no free pages, or have no way to ask."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), function, None)


_malloc_trim, _mallopt = _find("malloc_trim"), _find("mallopt")
