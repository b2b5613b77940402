"""A worker process: `python -m neso.cluster.worker_process OPTIONS_JSON`, started by the server.

Standard input is a pipe whose write end the server holds; the process exits when it is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from neso.cluster.local_worker import NamedOptions
from neso.cluster.worker import Worker, WorkerOptions
from neso.engine.errors import EngineError

logger = logging.getLogger(__name__)

O = TypeVar("O", bound=NamedOptions)  # noqa: E741


class Agent(Protocol):
    """A worker: an engine, or a model of a stage."""

    def stop(self) -> None: ...
    async def run(self) -> None: ...


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


if __name__ == "__main__":
    sys.exit(run_child(sys.argv[1], WorkerOptions, Worker))
