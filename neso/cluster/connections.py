"""The connected workers of a front end: how they join, and how the front end finds that one is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from neso.cluster.messages import (
    PROTOCOL_VERSION,
    Cancel,
    EngineEvent,
    FromWorker,
    Goodbye,
    Grant,
    Hello,
    Introduce,
    Leave,
    Ping,
    Refused,
    Report,
    Tell,
    Welcome,
    from_worker,
)
from neso.cluster.sockets import FrontEndSocket
from neso.cluster.work_queue import WorkerState
from neso.engine.cluster_config import MIXED
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import EngineInfo, ExtendLease

logger = logging.getLogger(__name__)

_NUM_CHECKS = 4
"""Number of consecutive checks without a message after which a worker is given up. Checks are counted instead of the
time, which also passes while this process is stopped."""
LEASE_SECONDS = 30.0
"""Time for which a worker holds the blocks of a prompt; extended while a request waits for them."""


class WorkerFailed(Exception):
    """A worker could not be started, or was refused."""


class WorkerEvents(Protocol):
    """Receives what happens to the connected workers."""

    def worker_joined(self, worker: WorkerState) -> None:
        """A worker has joined and was welcomed."""

    def worker_reported(self, worker: WorkerState, report: Report) -> None:
        """A worker has new credits, and outputs of requests."""

    def worker_event(self, worker: WorkerState, message: EngineEvent) -> None:
        """The engine of a worker has made an event that belongs to no request."""

    def worker_lost(self, worker: WorkerState, reason: str) -> None:
        """A worker is no longer connected; it still has its requests."""


@dataclass(slots=True)
class _Connection:
    """A worker that has said hello. `socket`: where it is connected."""

    state: WorkerState
    hello: Hello
    socket: FrontEndSocket
    silent_checks: int = 0


class WorkerConnections:
    """Welcomes workers that fit the model, pings them, and gives up those that are silent or disconnected.

    - model: digest that workers must have; silence: seconds without a message after which one is given up, 0: never
    - events: receives joining and lost workers and their messages
    """

    def __init__(
        self, model: str, silence: float, sockets: Sequence[FrontEndSocket], events: WorkerEvents
    ) -> None:
        self._model, self._silence, self._events = model, silence, events
        self._sockets = tuple(sockets)
        self._loop = asyncio.get_running_loop()
        self._connections: dict[str, _Connection] = {}
        self._joining: dict[str, asyncio.Future[EngineInfo]] = {}
        self._first_joined: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._on_change: list[Callable[[], None]] = []
        self._past = EngineStats()  # counters of workers that were lost
        self._tasks = [asyncio.create_task(self._receive(socket)) for socket in sockets]
        self._tasks.append(asyncio.create_task(self._watch()))

    @property
    def workers(self) -> list[WorkerState]:
        """The connected workers."""
        return [connection.state for connection in self._connections.values()]

    @property
    def first_info(self) -> EngineInfo:
        """Properties of the engine of the first worker that has joined."""
        return self._first_joined.result()

    @property
    def stats(self) -> EngineStats:
        """The statistics of all workers, including lost ones."""
        return EngineStats.sum([worker.stats for worker in self.workers] or [EngineStats()]).after(self._past)

    def knows(self, name: str) -> bool:
        """Whether a worker is connected."""
        return name in self._connections

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback()` when a worker has joined, was lost, or has other roles."""
        self._on_change.append(callback)

    def changed(self) -> None:
        """Run the callbacks of `on_change`."""
        for callback in self._on_change:
            callback()

    def send(self, name: str, message: Grant | Cancel | Tell) -> None:
        """Send a message to a worker, if it is connected."""
        connection = self._connections.get(name)
        if connection is not None:
            connection.socket.send(name, message)

    async def close(self) -> None:
        """Tell all workers that the front end ends, and close the sockets."""
        for connection in self._connections.values():
            connection.socket.send(connection.state.name, Goodbye())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for socket in self._sockets:
            socket.close()

    # -- joining ------------------------------------------------------------------------------------------------

    async def first_worker(self) -> EngineInfo:
        """Wait until a worker has joined."""
        return await asyncio.shield(self._first_joined)

    async def joined(self, name: str) -> EngineInfo:
        """Wait until the worker `name` has joined; call `lost` to end this with an error."""
        if name in self._connections:
            return self._connections[name].state.info
        waiting: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._joining[name] = waiting
        try:
            return await waiting
        finally:
            self._joining.pop(name, None)

    def _join(self, socket: FrontEndSocket, name: str, hello: Hello) -> None:
        if name in self._connections:
            self.lost(name, "it has started again")
        reason = self._mismatch(hello)
        if reason:
            logger.error("worker '%s' (%s, process %d) is refused: %s", name, hello.host, hello.pid, reason)
            socket.send(name, Refused(reason))
            self._joining_failed(name, reason)
            return
        worker = WorkerState(name, hello.info, hello.roles)
        worker.loras = hello.loras
        self._connections[name] = _Connection(worker, hello, socket)
        socket.send(name, Welcome(self._silence))
        self._events.worker_joined(worker)
        logger.info("worker '%s' (%s, process %d) has joined", name, hello.host, hello.pid)
        if not self._first_joined.done():
            self._first_joined.set_result(hello.info)
        if name in self._joining:
            self._joining[name].set_result(hello.info)
        self.changed()

    def _mismatch(self, hello: Hello) -> str:
        """Return why a worker cannot serve the model of this front end; "" if it can."""
        if hello.version != PROTOCOL_VERSION:
            return f"it has version {hello.version} of the protocol, this server {PROTOCOL_VERSION}"
        if hello.model != self._model:
            return "it has another checkpoint, or other options of the model"
        if not hello.roles or not hello.roles <= MIXED:
            return f"it has the roles {sorted(hello.roles)}, known are {sorted(MIXED)}"
        if hello.roles != MIXED and not hello.info.kv_address:
            return f"its engine transfers no KV cache, which the role {', '.join(hello.roles)} needs"
        if not self._first_joined.done():
            return ""
        first, own = self._first_joined.result(), hello.info
        for name in ("block_size", "vocab_size", "hidden_size", "generates", "logits_processors"):
            if getattr(first, name) != getattr(own, name):
                return f"its {name} is {getattr(own, name)}, that of the others {getattr(first, name)}"
        if own.max_model_len < first.max_model_len:
            return f"its max_model_len is {own.max_model_len}, the others have {first.max_model_len}"
        missing = first.capabilities - own.capabilities
        return f"its runner ({own.runner}) lacks {', '.join(sorted(missing))}" if missing else ""

    def _joining_failed(self, name: str, reason: str) -> None:
        if name in self._joining and not self._joining[name].done():
            self._joining[name].set_exception(WorkerFailed(reason))

    # -- connected workers --------------------------------------------------------------------------------------

    async def _receive(self, socket: FrontEndSocket) -> None:
        while True:
            name, data = await socket.receive()
            try:
                self._handle(socket, name, from_worker.decode(data))
            except msgspec.MsgspecError as error:
                logger.error("worker '%s' has sent a message that cannot be read: %s", name, error)
            except Exception:
                logger.exception("a message of worker '%s' could not be processed", name)

    def _handle(self, socket: FrontEndSocket, name: str, message: FromWorker) -> None:
        connection = self._connections.get(name)
        if isinstance(message, Hello):
            self._join(socket, name, message)
            return
        if isinstance(message, Leave):
            self.lost(name, message.reason)
            return
        if connection is None:
            socket.send(name, Introduce())
            return
        connection.silent_checks = 0
        if isinstance(message, Report):
            self._events.worker_reported(connection.state, message)
        else:
            self._events.worker_event(connection.state, message)

    def lost(self, name: str, reason: str) -> None:
        """Give up a worker. Does nothing for an unknown worker."""
        self._joining_failed(name, reason)
        connection = self._connections.pop(name, None)
        if connection is None:
            return
        worker = connection.state
        logger.warning("worker '%s' is lost with %d requests: %s", name, len(worker.jobs), reason)
        self._past = EngineStats().after(worker.stats).after(self._past)
        self._events.worker_lost(worker, reason)
        self.changed()

    async def _watch(self) -> None:
        """Find workers that are silent or no longer connected, and extend leases of the others."""
        interval = min(1.0, self._silence / _NUM_CHECKS) if self._silence else 1.0
        limit = self._silence / interval if self._silence else float("inf")
        while True:
            await asyncio.sleep(interval)
            for name, connection in tuple(self._connections.items()):
                self._extend_leases(connection.state)
                connection.silent_checks += 1
                if not connection.socket.send(name, Ping()):
                    self.lost(name, "its connection was closed")
                elif connection.silent_checks > limit:
                    self.lost(name, f"it did not respond for {self._silence:g} s")

    def _extend_leases(self, worker: WorkerState) -> None:
        """Extend the leases of prompts whose blocks no worker has taken yet."""
        now = self._loop.time()
        for job in worker.exports.values():
            export = job.export
            if export is not None and not export.num_uncached and now - export.touched > LEASE_SECONDS / 3:
                export.touched = now
                self.send(worker.name, Tell(ExtendLease(export.transfer_id, LEASE_SECONDS)))
