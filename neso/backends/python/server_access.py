"""The way from a Python model's threads to the server that it runs in."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from neso.backends.python.errors import TritonModelException
from neso.server.errors import ServerError

if TYPE_CHECKING:
    from neso.server.core import Core

Result = TypeVar("Result")

_here = threading.local()


@dataclass(frozen=True, eq=False)
class ServerAccess:
    """The core and its loop; the model's threads are others."""

    core: Core
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run on the core's loop and wait. Raises `TritonModelException` for the server's errors."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop).result()
        except ServerError as error:
            raise TritonModelException(error.message) from None
        except RuntimeError as error:
            work.close()
            raise TritonModelException(f"the server has ended: {error}") from None


_all: weakref.WeakSet[ServerAccess] = weakref.WeakSet()


@contextmanager
def server_access(access: ServerAccess) -> Iterator[None]:
    """This thread runs a model of that server."""
    _all.add(access)
    before = getattr(_here, "access", None)
    _here.access = access
    try:
        yield
    finally:
        _here.access = before


def current_access() -> ServerAccess:
    """The server of the model that this thread runs; in a thread that a model made, the only server there is.

    Raises `TritonModelException` where that is not known.
    """
    access: ServerAccess | None = getattr(_here, "access", None)
    if access is not None:
        return access
    # Servers that have ended linger until the garbage collector comes by.
    cores = {id(known.core): known for known in tuple(_all) if not known.loop.is_closed()}
    if len(cores) == 1:
        return next(iter(cores.values()))
    raise TritonModelException("which server to ask is known in the threads that run the model only")
