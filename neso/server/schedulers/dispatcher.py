"""When a scheduler looks at its queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable


class Dispatcher:
    """Calls `dispatch` when it is woken, and when a time passes; nothing polls. Belongs to the core's event loop."""

    def __init__(self, dispatch: Callable[[], None]) -> None:
        self._dispatch = dispatch
        self._timer: asyncio.TimerHandle | None = None
        self._woken = False
        self._stopped = False

    def wake(self) -> None:
        """Dispatch once all that is ready to run has run: requests that come together are batched."""
        if not self._woken and not self._stopped:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._run)

    def wake_at(self, times: Iterable[int | None]) -> None:
        """Dispatch at the first of these times too, in ns of the monotonic clock; those set before are forgotten."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        known = [at for at in times if at is not None]
        if known and not self._stopped:
            seconds = max(min(known) - time.monotonic_ns(), 0) * 1e-9
            self._timer = asyncio.get_running_loop().call_later(seconds, self._run)

    def stop(self) -> None:
        """Dispatch no more."""
        self._stopped = True
        self.wake_at(())

    def _run(self) -> None:
        self._woken = False
        if not self._stopped:
            self._dispatch()
