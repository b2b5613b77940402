"""The connected workers of a front end: how they join, and how the front end finds that one is lost."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from neso.cluster.jetstream.front_end import NatsFrontEndSocket
from neso.cluster.messages import (
    PROTOCOL_VERSION,
    EngineEvent,
    Goodbye,
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
from neso.engine.ipc.messages import EngineInfo, ExtendLease, SendBlockKeys

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


class Joining(Protocol):
    """First message of a worker."""

    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...


class Connected(Protocol):
    """A connected worker."""

    name: str


H = TypeVar("H", bound=Joining)
W = TypeVar("W", bound=Connected)


@dataclass(slots=True)
class _Connection(Generic[W]):
    """A worker that has said hello. `socket`: where it is connected."""

    state: W
    socket: FrontEndSocket | NatsFrontEndSocket
    silent_checks: int = 0


class Connections(ABC, Generic[H, W]):
    """Welcomes workers, pings them, and gives up those that are silent or disconnected.

    - hello: class of a worker's first message; decoder: of all its messages
    - silence: seconds without a message after which a worker is given up, 0: never
    """

    def __init__(
        self,
        hello: type[H],
        decoder: msgspec.msgpack.Decoder[Any],
        silence: float,
        sockets: Sequence[FrontEndSocket | NatsFrontEndSocket],
    ) -> None:
        self._hello, self._decoder, self._silence = hello, decoder, silence
        self._sockets = tuple(sockets)
        self._loop = asyncio.get_running_loop()
        self._connections: dict[str, _Connection[W]] = {}
        self._joining: dict[str, asyncio.Future[H]] = {}
        self._on_change: list[Callable[[], None]] = []
        self._tasks = [asyncio.create_task(self._receive(socket)) for socket in sockets]
        self._tasks.append(asyncio.create_task(self._watch()))

    @abstractmethod
    def _accept(self, name: str, hello: H) -> W:
        """Return the state of a worker that joins. Raises `WorkerFailed` with the reason to refuse it."""

    @abstractmethod
    def _joined(self, worker: W, hello: H) -> None:
        """A worker has joined and was welcomed."""

    @abstractmethod
    def _received(self, worker: W, message: Any) -> None:
        """A worker has sent another message than `Hello` and `Leave`."""

    @abstractmethod
    def _lost(self, worker: W, reason: str) -> None:
        """A worker is no longer connected; it still has its requests."""

    def _checked(self, worker: W) -> None:
        """Called about every second for each worker."""

    @property
    def workers(self) -> list[W]:
        """The connected workers."""
        return [connection.state for connection in self._connections.values()]

    def knows(self, name: str) -> bool:
        """Whether a worker is connected."""
        return name in self._connections

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback()` when a worker has joined, was lost, or has other roles."""
        self._on_change.append(callback)

    def ignore_changes(self, callback: Callable[[], None]) -> None:
        """Do not call `callback` any more."""
        self._on_change.remove(callback)

    def changed(self) -> None:
        """Run the callbacks of `on_change`."""
        for callback in tuple(self._on_change):
            callback()

    def send(self, name: str, message: msgspec.Struct) -> None:
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

    async def joined(self, name: str) -> H:
        """Wait until the worker `name` joins, and return its first message; `lost` ends this with an error."""
        waiting: asyncio.Future[H] = self._loop.create_future()
        self._joining[name] = waiting
        try:
            return await waiting
        finally:
            self._joining.pop(name, None)

    def _join(self, socket: FrontEndSocket | NatsFrontEndSocket, name: str, hello: H) -> None:
        if name in self._connections:
            self.lost(name, "it has started again")
        try:
            worker = self._accept(name, hello)
        except WorkerFailed as refusal:
            reason = str(refusal)
            logger.error("worker '%s' (%s, process %d) is refused: %s", name, hello.host, hello.pid, reason)
            socket.send(name, Refused(reason))
            self._joining_failed(name, reason)
            return
        self._connections[name] = _Connection(worker, socket)
        socket.send(name, Welcome(self._silence))
        self._joined(worker, hello)
        logger.info("worker '%s' (%s, process %d) has joined", name, hello.host, hello.pid)
        if name in self._joining and not self._joining[name].done():
            self._joining[name].set_result(hello)
        self.changed()

    def _joining_failed(self, name: str, reason: str) -> None:
        if name in self._joining and not self._joining[name].done():
            self._joining[name].set_exception(WorkerFailed(reason))

    # -- connected workers --------------------------------------------------------------------------------------

    async def _receive(self, socket: FrontEndSocket | NatsFrontEndSocket) -> None:
        while True:
            name, data = await socket.receive()
            try:
                self._handle(socket, name, self._decoder.decode(data))
            except msgspec.MsgspecError as error:
                logger.error("worker '%s' has sent a message that cannot be read: %s", name, error)
            except Exception:
                logger.exception("a message of worker '%s' could not be processed", name)

    def _handle(self, socket: FrontEndSocket | NatsFrontEndSocket, name: str, message: Any) -> None:
        connection = self._connections.get(name)
        if isinstance(message, self._hello):
            self._join(socket, name, message)
        elif isinstance(message, Leave):
            self.lost(name, message.reason)
        elif connection is None:
            socket.send(name, Introduce())
        else:
            connection.silent_checks = 0
            self._received(connection.state, message)

    def lost(self, name: str, reason: str) -> None:
        """Give up a worker. Does nothing for an unknown worker."""
        self._joining_failed(name, reason)
        connection = self._connections.pop(name, None)
        if connection is None:
            return
        self._lost(connection.state, reason)
        self.changed()

    async def _watch(self) -> None:
        """Find workers that are silent or no longer connected."""
        interval = min(1.0, self._silence / _NUM_CHECKS) if self._silence else 1.0
        limit = self._silence / interval if self._silence else float("inf")
        while True:
            await asyncio.sleep(interval)
            for name, connection in tuple(self._connections.items()):
                self._checked(connection.state)
                connection.silent_checks += 1
                if not connection.socket.send(name, Ping()):
                    self.lost(name, "its connection was closed")
                elif connection.silent_checks > limit:
                    self.lost(name, f"it did not respond for {self._silence:g} s")


class WorkerConnections(Connections[Hello, WorkerState]):
    """The engines that execute the requests of a model.

    - model: digest that workers must have; events: receives joining and lost workers and their messages
    - max_tracked_blocks: of each worker's prefix cache, see `WorkerPrefixes`
    """

    def __init__(
        self,
        model: str,
        silence: float,
        sockets: Sequence[FrontEndSocket | NatsFrontEndSocket],
        events: WorkerEvents,
        max_tracked_blocks: int,
    ) -> None:
        self._model, self._events = model, events
        self._max_tracked_blocks = max_tracked_blocks
        self._first_joined: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._past = EngineStats()  # counters of workers that were lost
        super().__init__(Hello, from_worker, silence, sockets)

    @property
    def first_info(self) -> EngineInfo:
        """Properties of the engine of the first worker that has joined."""
        return self._first_joined.result()

    @property
    def stats(self) -> EngineStats:
        """The statistics of all workers, including lost ones."""
        return EngineStats.sum([worker.stats for worker in self.workers] or [EngineStats()]).after(self._past)

    async def first_worker(self) -> EngineInfo:
        """Wait until a worker has joined."""
        return await asyncio.shield(self._first_joined)

    def _accept(self, name: str, hello: Hello) -> WorkerState:
        reason = self._mismatch(hello)
        if reason:
            raise WorkerFailed(reason)
        worker = WorkerState(name, hello.info, hello.roles, self._max_tracked_blocks)
        worker.loras = hello.loras
        return worker

    def _joined(self, worker: WorkerState, hello: Hello) -> None:
        self._ask_for_blocks(worker)
        self._events.worker_joined(worker)
        if not self._first_joined.done():
            self._first_joined.set_result(hello.info)

    def _received(self, worker: WorkerState, message: Report | EngineEvent) -> None:
        if isinstance(message, Report):
            for changes in message.blocks:
                if worker.blocks.apply(changes):
                    self._ask_for_blocks(worker)
            self._events.worker_reported(worker, message)
        else:
            self._events.worker_event(worker, message)

    def _ask_for_blocks(self, worker: WorkerState) -> None:
        """Ask a worker for all keys of its prefix cache: they are not known yet, or a change was missed."""
        if self._max_tracked_blocks and worker.info.enable_prefix_caching and worker.num_blocks:
            worker.blocks.asked()
            self.send(worker.name, Tell(SendBlockKeys()))

    def _lost(self, worker: WorkerState, reason: str) -> None:
        logger.warning("worker '%s' is lost with %d requests: %s", worker.name, len(worker.jobs), reason)
        self._past = EngineStats().after(worker.stats).after(self._past)
        self._events.worker_lost(worker, reason)

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

    def _checked(self, worker: WorkerState) -> None:
        """Extend the leases of prompts whose blocks no worker has taken yet."""
        now = self._loop.time()
        for job in worker.exports.values():
            export = job.export
            if export is not None and not export.num_uncached and now - export.touched > LEASE_SECONDS / 3:
                export.touched = now
                self.send(worker.name, Tell(ExtendLease(export.transfer_id, LEASE_SECONDS)))
