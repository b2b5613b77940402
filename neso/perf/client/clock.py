"""Timers for start times, finer than those of the event loop, whose resolution is a millisecond."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = 0o4000
_TFD_TIMER_ABSTIME = 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class PreciseTimer:
    """Sleeps until a time of the monotonic clock: with a timer descriptor on Linux, with the event loop elsewhere.

    One sleep at a time.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._waiting: asyncio.Future[None] | None = None
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK)
        if self._fd >= 0:
            asyncio.get_running_loop().add_reader(self._fd, self._expired)

    async def sleep_until(self, ns: int) -> None:
        """Return at `ns`, usually within 0.1 ms on an idle machine."""
        left = ns - time.monotonic_ns()
        if left <= 0:
            return
        if self._fd < 0 or self._waiting is not None:
            await asyncio.sleep(left * 1e-9)
            return
        spec = _TimerSpec(_TimeSpec(0, 0), _TimeSpec(*divmod(ns, 1_000_000_000)))
        self._waiting = asyncio.get_running_loop().create_future()
        self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None)
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _expired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
