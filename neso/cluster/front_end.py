"""The server's side: an engine channel behind which workers execute the requests.

`AsyncEngine` sends it the commands of one engine and receives the events of one engine. Requests go through the work
queue to workers; the front end keeps each request and its delivered tokens until it has ended, so that another worker
can continue it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from neso.cluster.common_commands import CommonCommands
from neso.cluster.connections import LEASE_SECONDS, WorkerConnections
from neso.cluster.jetstream.front_end import NatsFrontEndSocket
from neso.cluster.messages import Cancel, Cost, EngineEvent, Frame, Grant, Report, Tell
from neso.cluster.pulls import CreditPulls, Pulls
from neso.cluster.request_trace import RequestTrace
from neso.cluster.roles import control_roles
from neso.cluster.router import Router
from neso.cluster.sockets import FrontEndSocket
from neso.cluster.work_queue import Job, WorkerState, WorkQueue, WrongContinuation
from neso.engine.client.prefix_estimate import PrefixKeys
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
    Event,
    LoadLora,
    ReleaseLease,
    StepOutputs,
    UnloadLora,
    Unsendable,
    command_encoder,
)
from neso.generation.output import FinishReason
from neso.generation.spans import Span

logger = logging.getLogger(__name__)


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
    """Workers behind the interface of one engine.

    `model`: digest that workers must have; `pulls`: None for workers that only this front end uses.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: str,
        sockets: Sequence[FrontEndSocket | NatsFrontEndSocket],
        pulls: Pulls | None = None,
    ) -> None:
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
        self.on_span: Callable[[str, Span], None] = lambda request_id, span: None
        """Called with the id of a traced request and a span that has ended."""
        self._pulls = pulls if pulls is not None else CreditPulls()
        self._pulls.attach(self)
        self.router = Router(config.cluster.min_remote_prefill, self._pulls.may_start)
        self._config = config.cluster
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._outputs: list[SequenceOutput] = []
        self.connections = WorkerConnections(
            model, config.heartbeat_timeout, sockets, self, config.cluster.max_tracked_blocks
        )
        self._common = CommonCommands(
            lambda: self.workers, self.connections.send, self._events.put_nowait, self.stats
        )
        self._timer: asyncio.TimerHandle | None = None
        self._roles = asyncio.create_task(
            control_roles(config.cluster, self.connections, self.queue, self._roles_changed)
        )

    # -- the channel --------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[WorkerState]:
        """The connected workers."""
        return self.connections.workers

    @property
    def predicted_wait(self) -> float:
        """Seconds in which the workers can prefill the waiting requests; 0 if no speed was measured."""
        return self.queue.predicted_wait(worker for worker in self.workers if "prefill" in worker.roles)

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

    async def close(self, timeout: float) -> None:
        self._roles.cancel()
        await asyncio.gather(self._roles, return_exceptions=True)
        await self.connections.close()
        await self._pulls.close()
        if self._timer is not None:
            self._timer.cancel()
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
        info = self.connections.first_info
        wait, limit = self.predicted_wait, self._config.max_queue_seconds
        if limit is not None and wait > limit:
            message = f"the predicted wait is {wait:.1f} s, max_queue_seconds is {limit:g}"
            self._outputs.append(SequenceOutput.failed(request.request_id, 0, message, refused=True))
            return
        cached = info.enable_prefix_caching and info.num_blocks
        try:
            job = self.queue.put(request, PrefixKeys(request, info.block_size) if cached else None)
        except QueueFull as error:
            self._outputs.append(SequenceOutput.failed(request.request_id, 0, str(error), refused=True))
            return
        if request.trace:
            job.trace = RequestTrace(job.num_prompt_tokens, lambda span: self.on_span(job.id, span))
        if request.queue_timeout_ms is not None:
            self._loop.call_later(request.queue_timeout_ms / 1000, self._expire)
        self._pulls.waits(job)
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
            self.connections.send(job.worker.name, Cancel(job.id, job.attempt, index))

    def _end(self, job: Job, error: str = "") -> None:
        """Forget a request, and free the blocks that a worker holds for it. `error`: why it has failed."""
        if job.trace is not None:
            job.trace.ended(error)
        self._release_export(job)
        self.queue.ack(job)
        self._pulls.ended(job)

    def _release_export(self, job: Job) -> None:
        export = self.queue.end_export(job)
        if export is not None:
            self.connections.send(export.worker.name, Cancel(job.id, export.attempt))
            self.connections.send(export.worker.name, Tell(ReleaseLease(export.transfer_id)))

    def _expire(self) -> None:
        for job in self.queue.expired():
            self._fail(job, expiry_message(job.request), refused=True)
        self._emit_outputs()

    def _fail(self, job: Job, message: str, *, refused: bool = False) -> None:
        """End a request with an error."""
        self._end(job, message)
        self._outputs.append(SequenceOutput.failed(job.id, 0, message, refused=refused))

    def _dispatch(self) -> None:
        """Grant waiting requests to workers with room."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self.queue.num_waiting:
            choice = self.router.choose(self.queue.window(), self.workers, self._loop.time())
            if choice.job is None or choice.worker is None:
                if choice.wake is not None:
                    self._timer = self._loop.call_at(choice.wake, self._dispatch)
                break
            self._grant(choice.job, choice.worker, choice.prefiller)
        self._pulls.settle(soon=self._timer is not None)

    def _grant(self, job: Job, worker: WorkerState, prefiller: WorkerState | None) -> None:
        if job.export is not None and job.export.worker is worker:
            self._release_export(job)  # the prompt is in its own cache
        elif job.export is None and prefiller is None:
            self.counters.fallbacks += self.router.is_fallback(job, worker, self.workers)
        request = self._attempt_request(job)
        if prefiller is not None:
            cost = self.queue.grant_prefill(job, prefiller)
            assert job.export is not None
            self.counters.remote_prefills += 1
            export = KvExport(job.export.transfer_id, LEASE_SECONDS)
            if job.trace is not None:
                job.trace.prefill_granted(prefiller.name, job.attempt)
            self._send_grant(job, prefiller, cost, request.prefill_only(export))
        if job.export is not None:
            source = KvImport(job.export.worker.info.kv_address, job.export.transfer_id, LEASE_SECONDS)
            request = msgspec.structs.replace(request, kv_import=source)
        if job.trace is not None:
            job.trace.granted(worker.name, job.attempt)
        ticket = self._pulls.granted(job, worker)
        self._send_grant(job, worker, self.queue.grant(job, worker), request, ticket)
        self.counters.grants += 1
        for index in range(len(job.delivered.tokens)):
            if index not in job.delivered.open:
                self.connections.send(worker.name, Cancel(job.id, job.attempt, index))

    def _send_grant(
        self, job: Job, worker: WorkerState, cost: Cost, request: EngineRequest, ticket: str = ""
    ) -> None:
        logger.debug(
            "request %s, attempt %d: worker '%s' %s, %d tokens to compute",
            *(job.id, job.attempt, worker.name),
            *("computes the prompt" if request.kv_export is not None else "generates", cost.prefill_tokens),
        )
        encoded = msgspec.Raw(command_encoder.encode(request))
        # A worker that has just disconnected is found by the next ping, and the request goes to another one.
        self.connections.send(worker.name, Grant(job.id, job.attempt, cost, encoded, ticket))

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

    def worker_joined(self, worker: WorkerState) -> None:
        self._common.catch_up(worker)

    def worker_event(self, worker: WorkerState, message: EngineEvent) -> None:
        self._common.handle(worker, message.event)

    def worker_reported(self, worker: WorkerState, report: Report) -> None:
        worker.update(report.credits)
        worker.num_generating = max(1, len(report.frames))
        worker.stats = report.stats
        clock_offset = time.monotonic_ns() - report.sent_ns if report.sent_ns else 0
        for frame in report.frames:
            if frame.output.scheduled_ns:
                output = frame.output.moved_in_time(clock_offset)
                frame = msgspec.structs.replace(frame, output=output)
            self._frame(worker, frame)
        self._dispatch()
        self._events.put_nowait(StepOutputs(self._take_outputs(), self.stats()))

    def _frame(self, worker: WorkerState, frame: Frame) -> None:
        output = frame.output
        job = self.queue.jobs.get(output.request_id)
        if job is not None and job.export is not None and job.export.worker is worker:
            self._prefilled(job, output)
            return
        if output.exported_tokens:  # the first output of the other worker was faster
            if job is not None and job.trace is not None and job.attempt == frame.attempt:
                job.trace.prefilled(output)
            return
        if job is None or job.worker is not worker or job.attempt != frame.attempt:
            self.counters.stale_frames += 1
            self.connections.send(worker.name, Cancel(output.request_id, frame.attempt))
            return
        self.queue.observe(job, len(output.token_ids))
        if job.trace is not None:
            job.trace.output(output)
        self._imported(job, output)
        if output.finish_reason is FinishReason.ERROR:
            self._end(job, output.error)
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
        if job.trace is not None:
            job.trace.prefilled(output)
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

    def worker_lost(self, worker: WorkerState, reason: str) -> None:
        self.counters.lost_workers += 1
        for job in tuple(worker.exports.values()):
            self.queue.end_export(job)
            if job.trace is not None:
                job.trace.prefill_lost(reason)
            if job.worker is not None:  # it would wait for the blocks
                self._cancel(job)
                self._repeat(job, reason)
        for job in tuple(worker.jobs.values()):
            self._repeat(job, reason)
        self._common.forget(worker.name)
        self._dispatch()
        self._emit_outputs()

    # -- pulls --------------------------------------------------------------------------------------------------

    def worker(self, name: str) -> WorkerState | None:
        return next((worker for worker in self.workers if worker.name == name), None)

    def pulled(self) -> None:
        self._dispatch()

    def worker_stopped(self, job: Job, reason: str) -> None:
        self._cancel(job)
        self._repeat(job, reason)
        self._emit_outputs()

    def rejected(self, job: Job, reason: str) -> None:
        self._fail(job, reason, refused=True)
        self._emit_outputs()

    def _repeat(self, job: Job, reason: str) -> None:
        """Let a request wait for another worker, or fail it after its last attempt."""
        if self.queue.nack(job):
            if job.trace is not None:
                job.trace.attempt_lost(reason)
            self.counters.retries += 1
            self._pulls.waits(job)
        else:
            self.counters.failed += 1
            message = f"the request has lost {job.attempt} workers, the last one because {reason}"
            self._fail(job, message)

    def _roles_changed(self) -> None:
        self.counters.role_changes += 1
        self.connections.changed()
        self._dispatch()

    # -- all workers together -----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return the statistics of all workers, including lost ones, and of the queue."""
        stats = self.connections.stats
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
