"""The tasks in which a backend answers its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from neso.server.errors import Cancelled
from neso.server.inference_response import ResponseStream


class RequestTasks:
    """A task for each request: it ends with a client that cancels, and all of them with the model."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, stream: ResponseStream, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do `work`, which sends the responses, errors too. A task that is cancelled is answered here, not there:
        none of its code may have run.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                stream.fail(Cancelled("the request was cancelled"))

        def cancel() -> None:
            task.cancel()

        task.add_done_callback(ended)
        stream.request.on_cancel(cancel)
        return task

    async def end(self) -> None:
        """Cancel what has not ended, and wait until it has."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
