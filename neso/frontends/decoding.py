"""A thread that decodes large requests, so that the event loop serves others meanwhile.

There is one only: decoding creates Python objects, which needs the interpreter lock for milliseconds at a time. Several
threads would not decode faster, and the event loop would wait for the lock behind all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

LARGE_JSON = 128 << 10
"""Bytes of JSON that are parsed in the thread. Less takes at most 10 ms (measured: lists of one number)."""

_decoder = ThreadPoolExecutor(1, "neso-decode")

P = ParamSpec("P")
T = TypeVar("T")


def decode(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> asyncio.Future[T]:
    """Call a function in the thread."""
    return asyncio.get_running_loop().run_in_executor(_decoder, lambda: function(*arguments, **options))
