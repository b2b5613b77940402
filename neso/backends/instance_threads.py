"""Instance threads, for backends that run each instance of a model in a thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class StoppableThread(Protocol):
    """A thread that executes items of `work` until it receives None. `ended` is resolved when the thread ends."""

    work: SimpleQueue[Any]
    ended: Future[None]
    alive: bool


async def stop_threads(threads: Iterable[StoppableThread], model: str, timeout: float) -> None:
    """End the threads after their queued work; wait up to `timeout` seconds. Hanging threads are logged."""
    running = [thread for thread in threads if thread.alive]
    for thread in running:
        thread.work.put(None)
    if not running:
        return
    ended = [asyncio.wrap_future(thread.ended) for thread in running]
    try:
        await asyncio.wait(ended, timeout=timeout)
    finally:
        stuck = sum(not future.done() for future in ended)
        if stuck:
            logger.error("%d instances of model '%s' do not end", stuck, model)
