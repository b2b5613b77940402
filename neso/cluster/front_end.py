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
from dataclasses import dataclass

import msgspec

from neso.cluster.common_commands import CommonCommands
from neso.cluster.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Cost,
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
from neso.cluster.roles import RoleController, pressure
from neso.cluster.router import Router
from neso.cluster.sockets import FrontEndSocket
from neso.cluster.work_queue import Job, WorkerState, WorkQueue, WrongContinuation, loads
from neso.engine.client.prefix_estimate import PrefixKeys
from neso.engine.cluster_config import DECODE, MIXED
from neso.engine.config import EngineConfig
from neso.engine.core.admission import QueueFull, expiry_message
from neso.engine.core.request import EngineRequest, KvExport, KvImport, SequenceOutput
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.channel import EngineChannel
from neso.engine.ipc.messages import (
    Abort,
    Add,
    CheckIntegrity,
    Command,
    EngineInfo,
    Event,
    ExtendLease,
    LoadLora,
    ReleaseLease,
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
LEASE_SECONDS = 30.0
"""Time for which a worker holds the blocks of a prompt; extended while a request waits for them."""


@dataclass(slots=True)
class _Connection:
    """A worker that has said hello. `socket`: where it is connected."""

    state: WorkerState
    hello: Hello
    socket: FrontEndSocket
    silent_checks: int = 0


@dataclass(slots=True)
class ClusterCounters:
    """What has happened since the start.

    - grants: attempts that were given to workers; retries: those after a lost worker; lost_workers, failed: requests
      that have lost `max_attempts` workers; stale_frames: outputs of earlier attempts that were dropped
    - remote_prefills: prompts given to another worker than the one that decodes; imported_tokens: tokens whose blocks
      were transferred; fallbacks: prompts that the worker that decodes has computed instead;
      role_changes: of workers
    """

    grants: int = 0
    retries: int = 0
    lost_workers: int = 0
    failed: int = 0
    stale_frames: int = 0
    remote_prefills: int = 0
    imported_tokens: int = 0
    fallbacks: int = 0
    role_changes: int = 0


class ClusterChannel(EngineChannel):
    """Workers behind the interface of one engine. `model`: digest that workers must have."""

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
        self._on_workers: list[Callable[[], None]] = []
        self._router = Router(config.cluster.min_remote_prefill)
        self._config, self._model = config.cluster, model
        self._roles = RoleController()
        self._silence = config.heartbeat_timeout
        self._connections: dict[str, _Connection] = {}
        self._joining: dict[str, asyncio.Future[EngineInfo]] = {}
        self._first_joined: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._outputs: list[SequenceOutput] = []
        self._past = EngineStats()  # counters of workers that were lost
        self._common = CommonCommands(
            lambda: self.workers, self._send_to, self._events.put_nowait, self.stats
        )
        self._timer: asyncio.TimerHandle | None = None
        self._sockets = tuple(sockets)
        self._tasks = [asyncio.create_task(self._receive(socket)) for socket in sockets]
        self._tasks.append(asyncio.create_task(self._watch()))
        if config.cluster.ttft_target is not None and config.cluster.itl_target is not None:
            control = self._control_roles(config.cluster.ttft_target, config.cluster.itl_target)
            self._tasks.append(asyncio.create_task(control))

    # -- the channel --------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[WorkerState]:
        """The connected workers."""
        return [connection.state for connection in self._connections.values()]

    def on_workers(self, callback: Callable[[], None]) -> None:
        """Call `callback()` when a worker has joined, was lost, or has other roles."""
        self._on_workers.append(callback)

    def _workers_changed(self) -> None:
        for callback in self._on_workers:
            callback()

    @property
    def predicted_wait(self) -> float:
        """Seconds in which the workers can prefill the waiting requests; 0 if no speed was measured."""
        return self.queue.predicted_wait(worker for worker in self.workers if "prefill" in worker.roles)

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
            case LoadLora() | UnloadLora() | CheckIntegrity():
                self._common.start(command)
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
        wait, limit = self.predicted_wait, self._config.max_queue_seconds
        if limit is not None and wait > limit:
            message = f"the predicted wait is {wait:.1f} s, max_queue_seconds is {limit:g}"
            self._outputs.append(SequenceOutput.failed(request.request_id, 0, message, refused=True))
            return
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
        self._end(job)
        self._dispatch()

    def _cancel(self, job: Job, index: int | None = None) -> None:
        if job.worker is not None:
            self._send_to(job.worker.name, Cancel(job.id, job.attempt, index))

    def _end(self, job: Job) -> None:
        """Forget a request, and free the blocks that a worker holds for it."""
        self._release_export(job)
        self.queue.ack(job)

    def _release_export(self, job: Job) -> None:
        export = self.queue.end_export(job)
        if export is not None:
            self._send_to(export.worker.name, Cancel(job.id, export.attempt))
            self._send_to(export.worker.name, Tell(ReleaseLease(export.transfer_id)))

    def _expire(self) -> None:
        for job in self.queue.expired():
            self._fail(job, expiry_message(job.request), refused=True)
        self._emit_outputs()

    def _fail(self, job: Job, message: str, *, refused: bool = False) -> None:
        """End a request with an error."""
        self._end(job)
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
            self._grant(choice.job, choice.worker, choice.prefiller)

    def _grant(self, job: Job, worker: WorkerState, prefiller: WorkerState | None) -> None:
        if job.export is not None and job.export.worker is worker:
            self._release_export(job)  # the prompt is in its own cache
        elif job.export is None and worker.roles == DECODE and self._router.is_remote(job, worker):
            self.counters.fallbacks += prefiller is None
        request = self._attempt_request(job)
        if prefiller is not None:
            cost = self.queue.grant_prefill(job, prefiller)
            assert job.export is not None
            self.counters.remote_prefills += 1
            export = KvExport(job.export.transfer_id, LEASE_SECONDS)
            self._send_grant(job, prefiller, cost, request.prefill_only(export))
        if job.export is not None:
            source = KvImport(job.export.worker.info.kv_address, job.export.transfer_id, LEASE_SECONDS)
            request = msgspec.structs.replace(request, kv_import=source)
        self._send_grant(job, worker, self.queue.grant(job, worker), request)
        self.counters.grants += 1
        for index in range(job.num_sequences):
            if index not in job.delivered.open:
                self._send_to(worker.name, Cancel(job.id, job.attempt, index))

    def _send_grant(self, job: Job, worker: WorkerState, cost: Cost, request: EngineRequest) -> None:
        logger.debug(
            "request %s, attempt %d: worker '%s' %s, %d tokens to compute",
            *(job.id, job.attempt, worker.name),
            *("computes the prompt" if request.kv_export is not None else "generates", cost.prefill_tokens),
        )
        encoded = msgspec.Raw(command_encoder.encode(request))
        # A worker that has just disconnected is found by the next ping, and the request goes to another one.
        self._send_to(worker.name, Grant(job.id, job.attempt, cost, encoded))

    def _attempt_request(self, job: Job) -> EngineRequest:
        """Return the request of the present attempt."""
        request = job.request
        if request.queue_timeout_ms is not None:
            left = self.queue.time_left_ms(job) if job.attempt == 1 else None
            request = msgspec.structs.replace(request, queue_timeout_ms=left)
        if job.num_sequences == 1 and job.delivered.any:
            # The sequences of other requests start again, and what was delivered of them is dropped.
            request = msgspec.structs.replace(request, output_token_ids=job.delivered.tokens[0], draft=None)
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
            self._common.handle(connection.state, message.event)

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
        self._common.catch_up(worker)
        logger.info("worker '%s' (%s, process %d) has joined", name, hello.host, hello.pid)
        if not self._first_joined.done():
            self._first_joined.set_result(hello.info)
        if name in self._joining:
            self._joining[name].set_result(hello.info)
        self._workers_changed()

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
        if job is not None and job.export is not None and job.export.worker is worker:
            self._prefilled(job, output)
            return
        if output.exported_tokens:
            return  # the first output of the other worker was faster
        if job is None or job.worker is not worker or job.attempt != frame.attempt:
            self.counters.stale_frames += 1
            self._send_to(worker.name, Cancel(output.request_id, frame.attempt))
            return
        self.queue.observe(job, len(output.token_ids))
        self._imported(job, output)
        if output.finish_reason is FinishReason.ERROR:
            self._end(job)
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
            self._end(job)

    def _prefilled(self, job: Job, output: SequenceOutput) -> None:
        """Record that a prompt is computed. If that has failed, the next attempt computes it where it decodes."""
        if output.finish_reason is not FinishReason.ERROR:
            self.queue.prefilled(job)
            return
        logger.warning("request %s: its prompt could not be computed elsewhere: %s", job.id, output.error)
        self.counters.fallbacks += 1
        self.queue.end_export(job)
        job.can_import = False
        if job.worker is not None:  # it would wait for the blocks
            self._cancel(job)
            self._repeat(job, output.error)

    def _imported(self, job: Job, output: SequenceOutput) -> None:
        """Count the transfer of a prompt at its first output. Its worker has then freed the blocks."""
        if job.export is None:
            return
        self.queue.end_export(job)
        self.counters.imported_tokens += output.imported_tokens
        if output.import_error:
            self.counters.fallbacks += 1
            logger.warning("request %s: its prompt was not transferred: %s", job.id, output.import_error)

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
        for job in tuple(worker.exports.values()):
            self.queue.end_export(job)
            if job.worker is not None:  # it would wait for the blocks
                self._cancel(job)
                self._repeat(job, reason)
        for job in tuple(worker.jobs.values()):
            self._repeat(job, reason)
        self._common.forget(name)
        self._dispatch()
        self._emit_outputs()
        self._workers_changed()

    def _repeat(self, job: Job, reason: str) -> None:
        """Let a request wait for another worker, or fail it after its last attempt."""
        if self.queue.nack(job):
            self.counters.retries += 1
        else:
            self.counters.failed += 1
            message = f"the request has lost {job.attempt} workers, the last one because {reason}"
            self._fail(job, message)

    def _joining_failed(self, name: str, reason: str) -> None:
        if name in self._joining and not self._joining[name].done():
            self._joining[name].set_exception(WorkerFailed(reason))

    async def _watch(self) -> None:
        """Find workers that are silent or no longer connected."""
        interval = min(1.0, self._silence / _NUM_CHECKS) if self._silence else 1.0
        limit = self._silence / interval if self._silence else float("inf")
        while True:
            await asyncio.sleep(interval)
            self._extend_leases()
            for name, connection in tuple(self._connections.items()):
                connection.silent_checks += 1
                if not connection.socket.send(name, Ping()):
                    self.lost(name, "its connection was closed")
                elif connection.silent_checks > limit:
                    self.lost(name, f"it did not respond for {self._silence:g} s")

    async def _control_roles(self, ttft_target: float, itl_target: float) -> None:
        """Change the role of a worker when prefill or decode is too slow."""
        while True:
            await asyncio.sleep(self._config.role_period)
            now = pressure(self.workers, self.queue.waiting_tokens, ttft_target, itl_target)
            change = self._roles.decide(self.workers, now)
            if change is not None:
                logger.info(
                    "worker '%s' changes from %s to %s: prefill is at %.0f %% of its target, decode at %.0f %%",
                    *(change.worker.name, "+".join(change.worker.roles), "+".join(change.roles)),
                    *(100 * now.prefill, 100 * now.decode),
                )
                change.worker.roles = change.roles
                self.counters.role_changes += 1
                self._workers_changed()
                self._dispatch()

    def _extend_leases(self) -> None:
        """Extend the leases of prompts whose blocks no worker has taken yet."""
        now = self._loop.time()
        for job in self.queue.jobs.values():
            export = job.export
            if export is not None and not export.num_uncached and now - export.touched > LEASE_SECONDS / 3:
                export.touched = now
                self._send_to(export.worker.name, Tell(ExtendLease(export.transfer_id, LEASE_SECONDS)))

    def _send_to(self, name: str, message: Grant | Cancel | Tell) -> None:
        connection = self._connections.get(name)
        if connection is not None:
            connection.socket.send(name, message)

    # -- all workers together -----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return the statistics of all workers, including lost ones, and of the queue."""
        stats = EngineStats.sum(loads(self.workers)).after(self._past)
        waiting = self.queue.num_waiting
        return msgspec.structs.replace(
            stats, num_requests=stats.num_requests + waiting, num_waiting=stats.num_waiting + waiting
        )

    def _take_outputs(self) -> list[SequenceOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _emit_outputs(self) -> None:
        if self._outputs:
            self._events.put_nowait(StepOutputs(self._take_outputs(), self.stats()))


class WorkerFailed(Exception):
    """A worker could not be started, or was refused."""
