"""Turns of threads that import packages while models load.

A thread that imports a package while another thread imports it can fail. `transformers` replaces itself in
`sys.modules` at the end of its import, and a thread that has waited for this import gets the module before the
replacement. With interdependent modules Python gives up locks to avoid deadlocks, and one thread gets an
unfinished module. Therefore model files are imported, and models are initialized, one at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

IMPORT_SECONDS = 120.0
INITIALIZE_SECONDS = 10.0
"""Time after which other threads no longer wait for an import, or for the initialization of a model.

A model can load weights for minutes, or wait for another model; most of its imports come first.
"""


class ImportTurn:
    """A lock that its holder loses after some time. Not reentrant."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: object | None = None
        self._until = 0.0
        self._local = threading.local()

    @contextmanager
    def held(self, seconds: float) -> Iterator[None]:
        """Wait for the turn and hold it for at most `seconds`."""
        token = object()
        with self._changed:
            while self._holder is not None and (left := self._until - time.monotonic()) > 0:
                self._changed.wait(left)
            self._holder, self._until = token, time.monotonic() + seconds
        self._local.token = token
        try:
            yield
        finally:
            self.give_up()

    def give_up(self) -> None:
        """End the turn of this thread early, because it waits for another thread that may need the turn."""
        token = getattr(self._local, "token", None)
        self._local.token = None
        with self._changed:
            if token is not None and self._holder is token:
                self._holder = None
                self._changed.notify_all()


import_turn = ImportTurn()
"""The turn of this process."""
