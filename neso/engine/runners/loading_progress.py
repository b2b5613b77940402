"""Progress of loading a large model, shown on the terminal of the engine process."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds after which a load is shown: small models are loaded before."""
_INTERVAL = 0.2
_WIDTH = 30
_CLEAR_LINE = "\r\x1b[K"


def show_progress(items: Iterable[T], total: int, label: str, out: TextIO | None = None) -> Iterator[T]:
    """Yield the items, and draw a bar on a terminal, by default standard error, if they take longer than `PATIENCE`.

    `total`: number of items; `label`: text before the bar. The line is cleared at the end.
    """
    out = sys.stderr if out is None else out
    if not out.isatty():
        yield from items
        return
    started = time.monotonic()
    due = started + PATIENCE
    shown = False
    try:
        for done, item in enumerate(items, 1):
            yield item
            now = time.monotonic()
            if now >= due:
                due, shown = now + _INTERVAL, True
                out.write(_CLEAR_LINE + _bar(label, done, total, now - started))
                out.flush()
    finally:
        if shown:
            out.write(_CLEAR_LINE)
            out.flush()


def _bar(label: str, done: int, total: int, seconds: float) -> str:
    filled = _WIDTH * done // total
    left = seconds / done * (total - done)
    return f"{label} {'█' * filled}{'░' * (_WIDTH - filled)} {done / total:4.0%}, about {left:.0f} s left"
