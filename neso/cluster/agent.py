"""What all worker processes have in common: how they start, what they do until they end, and how they are stopped.

A worker process that the server has started reads its options from the command line. Its standard input is a pipe
whose write end the server holds; the process exits when it is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec

from neso.cluster.local_worker import NamedOptions
from neso.cluster.messages import Leave
from neso.engine.errors import EngineError

logger = logging.getLogger(__name__)

O = TypeVar("O", bound=NamedOptions)  # noqa: E741


class Agent(Protocol):
    """A worker: an engine, or a model of a stage."""

    def stop(self) -> None: ...
    async def run(self) -> None: ...


async def run_together(*work: Coroutine[Any, Any, Any]) -> None:
    """Run coroutines until the first one ends, and cancel the others. Raises its error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def leaving(send: Callable[[Leave], object]) -> Iterator[None]:
    """Send a `Leave` at the end of the block, with the `EngineError` that has ended it."""
    reason = "it was stopped"
    try:
        yield
    except EngineError as error:
        reason = str(error)
        raise
    finally:
        send(Leave(reason))


async def run_agent(make: Callable[[O], Agent], options: O) -> None:
    """Serve until SIGTERM or, outside of a server, SIGINT. Raises `EngineError`."""
    if options.verbose:
        logging.getLogger("neso.cluster").setLevel(logging.DEBUG)
    agent = make(options)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, agent.stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGINT, agent.stop)
    await agent.run()


def run_child(options_json: str, options_type: type[O], make: Callable[[O], Agent]) -> int:
    """Run a worker that the server has started; returns the exit status."""
    # Ctrl-C is sent to the whole process group; the server decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = msgspec.json.decode(options_json, type=options_type)
    logging.basicConfig(level=logging.WARNING, format=f"{options.name}: %(message)s")
    threading.Thread(target=_exit_with_parent, daemon=True, name="parent-watch").start()
    try:
        asyncio.run(run_agent(make, options))
    except EngineError as error:
        logger.error("%s", error)
        return 1
    return 0


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)
