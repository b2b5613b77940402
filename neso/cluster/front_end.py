"""The server's side: an engine channel behind which workers execute the requests.

`AsyncEngine` sends it the commands of one engine and receives the events of one engine. Requests go through the work
queue to workers; the front end keeps each request and its delivered tokens until it has ended, so that another worker
can continue it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from neso.cluster.messages import (
    PROTOCOL_VERSION,
    Cancel,
    EngineEvent,
    Frame,
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
from neso.cluster.router import Router
from neso.cluster.sockets import FrontEndSocket
from neso.cluster.work_queue import Job, WorkerState, WorkQueue, WrongContinuation, loads
from neso.engine.client.prefix_estimate import PrefixKeys
from neso.engine.config import EngineConfig
from neso.engine.core.admission import QueueFull, expiry_message
from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.channel import EngineChannel
from neso.engine.ipc.messages import (
    Abort,
    Add,
    CheckIntegrity,
    Command,
    EngineInfo,
    Event,
    Integrity,
    LoadLora,
    LoraDone,
    LoraNames,
    StepOutputs,
    UnloadLora,
    Unsendable,
    command_encoder,
)
from neso.generation.output import FinishReason

logger = logging.getLogger(__name__)

_NUM_CHECKS = 4
"""Number of consecutive checks without a message after which a worker is given up. Checks are counted instead of the
time, which also passes while this process is stopped."""
_CATCH_UP = -1
"""Number of changes of adapters that a worker makes when it joins; nobody waits for their results."""


@dataclass(slots=True)
class _Connection:
    """A worker that has said hello. `socket`: where it is connected."""

    state: WorkerState
    hello: Hello
    socket: FrontEndSocket
    silent_checks: int = 0


@dataclass(slots=True)
class _Change:
    """A change of adapters, or a check, that all workers are making. `waiting`: workers without a result."""

    command: LoadLora | UnloadLora | CheckIntegrity
    waiting: set[str]
    done: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ClusterCounters:
    """What has happened since the start.

    - grants: attempts that were given to workers; retries: those after a lost worker; lost_workers, failed: requests
      that have lost `max_attempts` workers; stale_frames: outputs of earlier attempts that were dropped
    """

    grants: int = 0
    retries: int = 0
    lost_workers: int = 0
    failed: int = 0
    stale_frames: int = 0


class ClusterChannel(EngineChannel):
    """Workers behind the interface of one engine. `model`: digest that workers must have.

    `on_workers` is called when a worker has joined or was lost.
    """

    def __init__(self, config: EngineConfig, model: str, sockets: Sequence[FrontEndSocket]) -> None:
        self._loop = asyncio.get_running_loop()
        self.dead = self._loop.create_future()
        scheduler = config.scheduler
        self.queue = WorkQueue(
            scheduler.max_queue_size,
            scheduler.priority_ageing_seconds,
            config.cluster.max_attempts,
            self._loop.time,
        )
        self.counters = ClusterCounters()
        self.on_workers: Callable[[], None] = lambda: None
        self._router = Router()
        self._model = model
        self._silence = config.heartbeat_timeout
        self._connections: dict[str, _Connection] = {}
        self._joining: dict[str, asyncio.Future[EngineInfo]] = {}
        self._first_joined: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._outputs: list[SequenceOutput] = []
        self._past = EngineStats()  # counters of workers that were lost
        self._adapters: dict[str, LoadLora | UnloadLora] = {}  # changes that a new worker has to make
        self._changes: dict[int, _Change] = {}
        self._check: _Change | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sockets = tuple(sockets)
        self._tasks = [asyncio.create_task(self._receive(socket)) for socket in sockets]
        self._tasks.append(asyncio.create_task(self._watch()))

    # -- the channel --------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[WorkerState]:
        """The connected workers."""
        return [connection.state for connection in self._connections.values()]

    def knows(self, name: str) -> bool:
        """Whether a worker is connected."""
        return name in self._connections

    def send(self, command: Command) -> None:
        if self.dead.done():
            return
        match command:
            case Add(request):
                self._put(request)
            case Abort(request_id, index):
                self._abort(request_id, index)
            case LoadLora() | UnloadLora():
                self._changes[command.number] = change = self._tell_all(command)
                self._finish_change(command.number, change)
            case CheckIntegrity():
                self._check = self._tell_all(command)
                self._finish_check()
            case _:
                raise AssertionError(f"{type(command).__name__} is not for workers")
        self._emit_outputs()

    async def receive(self) -> Event:
        return await self._events.get()

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

    async def close(self, timeout: float) -> None:
        for connection in self._connections.values():
            connection.socket.send(connection.state.name, Goodbye())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        for socket in self._sockets:
            socket.close()
        if not self.dead.done():
            self.dead.set_result("the server has stopped the workers")

    # -- requests -----------------------------------------------------------------------------------------------

    def _put(self, request: EngineRequest) -> None:
        if request.lora is not None and (request.lora.path is not None or request.lora.tensors is not None):
            message = "adapters in a request are not supported with workers: load the adapter first"
            self._outputs.append(
                SequenceOutput.failed(request.request_id, 0, message, error_field="lora_path")
            )
            return
        if request.pooling is None and request.sampling.seed is None:
            # Another worker must be able to generate the same tokens.
            sampling = msgspec.structs.replace(request.sampling, seed=random.getrandbits(63))
            request = msgspec.structs.replace(request, sampling=sampling)
        try:
            command_encoder.encode(request)
        except (ValueError, TypeError, OverflowError) as error:
            raise Unsendable(str(error)) from None
        info = self._first_joined.result()
        cached = info.enable_prefix_caching and info.num_blocks
        try:
            self.queue.put(request, PrefixKeys(request, info.block_size) if cached else None)
        except QueueFull as error:
            self._outputs.append(SequenceOutput.failed(request.request_id, 0, str(error), refused=True))
            return
        if request.queue_timeout_ms is not None:
            self._loop.call_later(request.queue_timeout_ms / 1000, self._expire)
        self._dispatch()

    def _abort(self, request_id: str, index: int | None) -> None:
        job = self.queue.jobs.get(request_id)
        if job is None:
            return
        if index is not None:
            job.delivered.open.discard(index)
            if job.delivered.open:
                self._cancel(job, index)
                return
        self._cancel(job)
        self.queue.ack(job)
        self._dispatch()

    def _cancel(self, job: Job, index: int | None = None) -> None:
        if job.worker is not None:
            self._send_to(job.worker.name, Cancel(job.id, job.attempt, index))

    def _expire(self) -> None:
        for job in self.queue.expired():
            self._fail(job, expiry_message(job.request), refused=True)
        self._emit_outputs()

    def _fail(self, job: Job, message: str, *, refused: bool = False) -> None:
        """End a request with an error."""
        self.queue.ack(job)
        self._outputs.append(SequenceOutput.failed(job.id, 0, message, refused=refused))

    def _dispatch(self) -> None:
        """Grant waiting requests to workers with room."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self.queue.num_waiting:
            choice = self._router.choose(self.queue.window(), self.workers, self._loop.time())
            if choice.job is None or choice.worker is None:
                if choice.wake is not None:
                    self._timer = self._loop.call_at(choice.wake, self._dispatch)
                return
            self._grant(choice.job, choice.worker)

    def _grant(self, job: Job, worker: WorkerState) -> None:
        cost = self.queue.grant(job, worker)
        request = self._attempt_request(job)
        self.counters.grants += 1
        logger.debug(
            "request %s, attempt %d: %s, %d prompt tokens to compute",
            *(job.id, job.attempt, worker.name, job.num_uncached),
        )
        encoded = msgspec.Raw(command_encoder.encode(request))
        # A worker that has just disconnected is found by the next ping, and the request goes to another one.
        self._send_to(worker.name, Grant(job.id, job.attempt, cost, encoded))
        for index in range(job.num_sequences):
            if index not in job.delivered.open:
                self._send_to(worker.name, Cancel(job.id, job.attempt, index))

    def _attempt_request(self, job: Job) -> EngineRequest:
        """Return the request of the present attempt."""
        request = job.request
        if request.queue_timeout_ms is not None:
            left = self.queue.time_left_ms(job) if job.attempt == 1 else None
            request = msgspec.structs.replace(request, queue_timeout_ms=left)
        return request

    # -- workers ------------------------------------------------------------------------------------------------

    async def _receive(self, socket: FrontEndSocket) -> None:
        while True:
            name, data = await socket.receive()
            try:
                self._handle(socket, name, from_worker.decode(data))
            except msgspec.MsgspecError as error:
                logger.error("worker '%s' has sent a message that cannot be read: %s", name, error)
            except Exception:
                logger.exception("a message of worker '%s' could not be processed", name)
            self._emit_outputs()

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
            self._report(connection.state, message)
        else:
            self._engine_event(connection.state, message)

    def _join(self, socket: FrontEndSocket, name: str, hello: Hello) -> None:
        if name in self._connections:
            self.lost(name, "it has started again")
        reason = self._mismatch(hello)
        if reason:
            logger.error("worker '%s' (%s, process %d) is refused: %s", name, hello.host, hello.pid, reason)
            socket.send(name, Refused(reason))
            self._joining_failed(name, reason)
            return
        worker = WorkerState(name, hello.info)
        worker.loras = hello.loras
        self._connections[name] = _Connection(worker, hello, socket)
        socket.send(name, Welcome(self._silence))
        for change in self._adapters.values():
            wanted = change.lora.name if isinstance(change, LoadLora) else change.name
            if isinstance(change, LoadLora) or wanted in hello.loras:
                socket.send(name, Tell(msgspec.structs.replace(change, number=_CATCH_UP)))
        logger.info("worker '%s' (%s, process %d) has joined", name, hello.host, hello.pid)
        if not self._first_joined.done():
            self._first_joined.set_result(hello.info)
        if name in self._joining:
            self._joining[name].set_result(hello.info)
        self.on_workers()

    def _mismatch(self, hello: Hello) -> str:
        """Return why a worker cannot serve the model of this front end; "" if it can."""
        if hello.version != PROTOCOL_VERSION:
            return f"it has version {hello.version} of the protocol, this server {PROTOCOL_VERSION}"
        if hello.model != self._model:
            return "it has another checkpoint, or other options of the model"
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

    def _report(self, worker: WorkerState, report: Report) -> None:
        worker.update(report.credits)
        worker.stats = report.stats
        for frame in report.frames:
            self._frame(worker, frame)
        self._dispatch()
        self._events.put_nowait(StepOutputs(self._take_outputs(), self.stats()))

    def _frame(self, worker: WorkerState, frame: Frame) -> None:
        output = frame.output
        job = self.queue.jobs.get(output.request_id)
        if job is None or job.worker is not worker or job.attempt != frame.attempt:
            self.counters.stale_frames += 1
            self._send_to(worker.name, Cancel(output.request_id, frame.attempt))
            return
        self.queue.started(job)
        if output.finish_reason is FinishReason.ERROR:
            self.queue.ack(job)
            self._outputs.append(output)
            return
        try:
            new = job.delivered.take(frame)
        except WrongContinuation as error:
            self._cancel(job)
            self._fail(job, f"the request could not be continued by worker '{worker.name}': {error}")
            return
        if new is not None:
            if job.keys is not None and job.num_sequences == 1:
                job.keys.extend(new.token_ids)
            self._outputs.append(new)
        if not job.delivered.open:
            if job.keys is not None:
                worker.prefixes.add(job.keys.keys)
            self.queue.ack(job)

    def lost(self, name: str, reason: str) -> None:
        """Give up a worker: its requests wait for another one. Does nothing for an unknown worker."""
        self._joining_failed(name, reason)
        connection = self._connections.pop(name, None)
        if connection is None:
            return
        worker = connection.state
        self.counters.lost_workers += 1
        logger.warning("worker '%s' is lost with %d requests: %s", name, len(worker.jobs), reason)
        self._past = EngineStats().after(worker.stats).after(self._past)
        for job in tuple(worker.jobs.values()):
            if self.queue.nack(job):
                self.counters.retries += 1
            else:
                self.counters.failed += 1
                message = f"the request has lost {job.attempt} workers, the last one because {reason}"
                self._fail(job, message)
        for number, change in tuple(self._changes.items()):
            change.waiting.discard(name)
            self._finish_change(number, change)
        if self._check is not None:
            self._check.waiting.discard(name)
            self._finish_check()
        self._dispatch()
        self._emit_outputs()
        self.on_workers()

    def _joining_failed(self, name: str, reason: str) -> None:
        if name in self._joining and not self._joining[name].done():
            self._joining[name].set_exception(WorkerFailed(reason))

    async def _watch(self) -> None:
        """Find workers that are silent or no longer connected."""
        interval = min(1.0, self._silence / _NUM_CHECKS) if self._silence else 1.0
        limit = self._silence / interval if self._silence else float("inf")
        while True:
            await asyncio.sleep(interval)
            for name, connection in tuple(self._connections.items()):
                connection.silent_checks += 1
                if not connection.socket.send(name, Ping()):
                    self.lost(name, "its connection was closed")
                elif connection.silent_checks > limit:
                    self.lost(name, f"it did not respond for {self._silence:g} s")

    def _send_to(self, name: str, message: Grant | Cancel | Tell) -> None:
        connection = self._connections.get(name)
        if connection is not None:
            connection.socket.send(name, message)

    # -- all workers together -----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return the sums over the workers, lost ones included, and the requests in the queue."""
        stats = EngineStats.sum(loads(self.workers)).after(self._past)
        waiting = self.queue.num_waiting
        return msgspec.structs.replace(
            stats, num_requests=stats.num_requests + waiting, num_waiting=stats.num_waiting + waiting
        )

    def _tell_all(self, command: LoadLora | UnloadLora | CheckIntegrity) -> _Change:
        for name in self._connections:
            self._send_to(name, Tell(command))
        return _Change(command, set(self._connections))

    def _engine_event(self, worker: WorkerState, message: EngineEvent) -> None:
        match message.event:
            case LoraNames(names):
                worker.loras = names
                self._emit_lora_names()
            case LoraDone(number, error):
                change = self._changes.get(number)
                if change is None or worker.name not in change.waiting:
                    if error:
                        logger.error("worker '%s' could not change an adapter: %s", worker.name, error)
                    return
                change.waiting.discard(worker.name)
                change.errors.append(error) if error else change.done.append(worker.name)
                self._finish_change(number, change)
            case Integrity(error, stats):
                worker.stats = stats
                if self._check is not None and worker.name in self._check.waiting:
                    self._check.waiting.discard(worker.name)
                    if error:
                        self._check.errors.append(f"worker '{worker.name}': {error}")
                    self._finish_check()

    def _finish_change(self, number: int, change: _Change) -> None:
        """Report a change of adapters when all workers have made it; undo it if one could not."""
        if change.waiting or number not in self._changes:
            return
        del self._changes[number]
        command = change.command
        assert not isinstance(command, CheckIntegrity)
        if not change.done and not change.errors:
            change.errors.append("no worker is connected")
        if isinstance(command, UnloadLora):
            if change.done:
                self._adapters[command.name] = command
            error = "" if change.done else change.errors[0]
        else:
            error = change.errors[0] if change.errors else ""
            if error:
                for name in change.done:
                    self._send_to(name, Tell(UnloadLora(_CATCH_UP, command.lora.name)))
            else:
                self._adapters[command.lora.name] = command
        self._events.put_nowait(LoraDone(number, error))

    def _emit_lora_names(self) -> None:
        names: dict[str, str | None] = {}
        for worker in self.workers:
            names |= worker.loras
        self._events.put_nowait(LoraNames(names))

    def _finish_check(self) -> None:
        check = self._check
        if check is not None and not check.waiting:
            self._check = None
            self._events.put_nowait(Integrity(check.errors[0] if check.errors else "", self.stats()))

    def _take_outputs(self) -> list[SequenceOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _emit_outputs(self) -> None:
        if self._outputs:
            self._events.put_nowait(StepOutputs(self._take_outputs(), self.stats()))


class WorkerFailed(Exception):
    """A worker could not be started, or was refused."""
