"""Memory of models that were unloaded, back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any


def release_memory() -> None:
    """Collect what refers to itself, as the modules of Python models do, and give free pages back.

    Blocks, and holds the interpreter for some 10 ms.
    """
    gc.collect()
    if _malloc_trim is not None:
        _malloc_trim(0)


def _find_malloc_trim() -> Any:
    """glibc's; others keep no free pages, or have no way to ask."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


_malloc_trim = _find_malloc_trim()
