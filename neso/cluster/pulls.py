"""How workers pull requests of a front end: the interface, and its implementation for a front end with own workers."""

from __future__ import annotations

from typing import Protocol

from neso.cluster.work_queue import Job, WorkerState


class PullEvents(Protocol):
    """Receives what concerns requests in the queue."""

    def worker(self, name: str) -> WorkerState | None:
        """Return a connected worker."""

    def pulled(self) -> None:
        """A worker asks for a request."""

    def worker_stopped(self, job: Job, reason: str) -> None:
        """The worker of a request no longer works on it."""

    def rejected(self, job: Job, reason: str) -> None:
        """There is no room for a waiting request in the queue."""


class Pulls(Protocol):
    """Decides which workers may get a request now, beside the room that they have."""

    def attach(self, events: PullEvents) -> None:
        """Begin; called once."""

    def waits(self, job: Job) -> None:
        """A request waits for a worker, for the first time or again."""

    def may_start(self, job: Job, worker: WorkerState) -> bool:
        """Whether a worker may get a request."""

    def granted(self, job: Job, worker: WorkerState) -> str:
        """A worker gets a request. Returns the ticket that it keeps alive; "" if there is none."""

    def ended(self, job: Job) -> None:
        """A request has ended."""

    def settle(self, *, soon: bool) -> None:
        """All that can start now was granted. `soon`: requests wait a moment for the worker that suits them."""

    async def close(self) -> None:
        """Wait until the sockets of the front end are closed."""


class CreditPulls:
    """Workers that only this front end uses: their credits say all."""

    def attach(self, events: PullEvents) -> None:
        pass

    def waits(self, job: Job) -> None:
        pass

    def may_start(self, job: Job, worker: WorkerState) -> bool:
        return True

    def granted(self, job: Job, worker: WorkerState) -> str:
        return ""

    def ended(self, job: Job) -> None:
        pass

    def settle(self, *, soon: bool) -> None:
        pass

    async def close(self) -> None:
        pass
