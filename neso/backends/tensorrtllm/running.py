"""Requests in flight, by the ids that clients give them: another request with the same id may stop them."""

from __future__ import annotations

import asyncio


class RunningRequest:
    """One that can be stopped: `stopped` is True then, and its task is cancelled once it has begun."""

    def __init__(self) -> None:
        self.stopped = False
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """The current task works on it. Raises `CancelledError` if it is stopped already."""
        self._task = asyncio.current_task()
        if self.stopped:
            raise asyncio.CancelledError

    def stop(self) -> None:
        """A task that has not begun is not cancelled: it would end without a word."""
        self.stopped = True
        if self._task is not None:
            self._task.cancel()


class RunningRequests:
    """Ids need not be unique: those that are alike are stopped together. Without an id a request cannot be."""

    def __init__(self) -> None:
        self._by_id: dict[str, set[RunningRequest]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, id: str, request: RunningRequest) -> None:
        if id:
            self._by_id.setdefault(id, set()).add(request)

    def remove(self, id: str, request: RunningRequest) -> None:
        """It has ended."""
        requests = self._by_id.get(id, set())
        requests.discard(request)
        if not requests:
            self._by_id.pop(id, None)

    def stop(self, id: str) -> None:
        """Stop the requests of this id; there may be none, they may have ended."""
        for request in tuple(self._by_id.get(id, ())):
            request.stop()
