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


def settle_memory() -> None:
    """Let the garbage collector leave alone what there is now: modules and models, which stay.

    For a process that is a server and nothing else. Without it, every so many requests wait some 20 ms while hundreds
    of thousands of objects are looked at in vain.
    """
    gc.collect()
    gc.freeze()


def _find_malloc_trim() -> Any:
    """glibc's; others keep no free pages, or have no way to ask."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


_malloc_trim = _find_malloc_trim()
