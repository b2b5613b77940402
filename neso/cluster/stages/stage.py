"""A stage: the requests of a model that runs on workers.

A request waits until a worker has room, is given to it, and stays here until its last response. If the worker is lost
before it has sent a response, the request is given to another one. The attempt number is a fencing token: what a
worker still sends for an earlier attempt is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from neso.cluster.stages.manifold import Manifold
from neso.cluster.stages.messages import Durations, Flow, Outcome, StageReport, Stop, Task, Work
from neso.cluster.stages.tensors import remote_ref
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import EngineInfo
from neso.generation.spans import Span
from neso.server.errors import Cancelled, InternalError, ServerError, Unavailable
from neso.server.inference_response import ResponseStream
from neso.server.schedulers.priority_queue import PriorityQueue

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Job:
    """A request that a worker has.

    - size: its batch entries; responded: whether a response has arrived
    - waits_since, granted: times of the present attempt, in ns of the monotonic clock
    """

    number: int
    stream: ResponseStream
    waits_since: int
    attempt: int = 1
    granted: int = 0
    worker: StageWorker | None = None
    responded: bool = False
    paused: bool = False

    @property
    def size(self) -> int:
        return self.stream.batch_size

    def add_span(
        self, name: str, start: int, end: int, error: str = "", counts: Mapping[str, str | int] | None = None
    ) -> None:
        """Record a part of the present attempt, if the request is traced."""
        if self.stream.trace is not None and self.worker is not None:
            about = {"worker": self.worker.name, "attempt": self.attempt, **(counts or {})}
            self.stream.trace.phases.append(Span(name, start, end, about, error))


class StageWorker:
    """A worker as the server knows it.

    - host: identifies its system; slots: batch entries that it executes at a time; turn: of its last request
    - engine, stats: properties and statistics of the engine of a language model
    """

    def __init__(self, name: str, host: str, slots: int, engine: EngineInfo | None = None) -> None:
        self.name, self.host, self.slots, self.engine = name, host, slots, engine
        self.stats = EngineStats()
        self.turn = 0
        self.accepts = True
        self.jobs: dict[int, Job] = {}

    @property
    def num_used(self) -> int:
        """Batch entries of the requests that the worker has."""
        return sum(job.size for job in self.jobs.values())

    def has_room(self, size: int) -> bool:
        """Whether the worker can take a request now. An idle worker takes any request."""
        return self.accepts and (not self.jobs or self.num_used + size <= self.slots)


@dataclass(slots=True)
class StageCounters:
    """What has happened since the start.

    - grants: attempts that were given to workers; retries: those after a lost worker; lost_workers
    - failed: requests that failed because workers were lost
    - kept_tensors, kept_bytes: outputs that workers have kept for the next stage
    """

    grants: int = 0
    retries: int = 0
    lost_workers: int = 0
    failed: int = 0
    kept_tensors: int = 0
    kept_bytes: int = 0


class Stage:
    """Requests of one model version, and its workers. Used on the core's loop.

    - batching: the `ModelDynamicBatching` message with the priorities and limits of the queue
    - manifold: packs requests and unpacks responses
    - send: sends a message to the worker of this name
    """

    def __init__(
        self,
        model: str,
        version: str,
        batching: Any,
        max_attempts: int,
        manifold: Manifold,
        send: Callable[[str, msgspec.Struct], None],
    ) -> None:
        self.model, self.version = model, version
        self.workers: dict[str, StageWorker] = {}
        self.counters = StageCounters()
        self._queue = PriorityQueue.of(batching)
        self._past = EngineStats()  # counters of the engines of workers that were lost
        self._repeated: deque[Job] = deque()  # before all that wait in the queue
        self._jobs: dict[int, Job] = {}
        self._max_attempts = max_attempts
        self._manifold, self._send = manifold, send
        self._num_jobs = 0
        self._timer: asyncio.TimerHandle | None = None
        self._woken = False

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a worker."""
        return len(self._repeated) + sum(1 for _ in self._queue.waiting())

    @property
    def oldest_wait(self) -> float:
        """Seconds that the oldest waiting request has waited; 0 if none waits."""
        waiting = [*(job.stream for job in self._repeated), *self._queue.waiting()]
        oldest = min((stream.timeline.queue_start for stream in waiting), default=None)
        return 0.0 if oldest is None else (time.monotonic_ns() - oldest) * 1e-9

    @property
    def stats(self) -> EngineStats:
        """Statistics of the engines of all workers, including lost ones. Requests in the queue count as waiting."""
        stats = EngineStats.sum([worker.stats for worker in self.workers.values()] or [EngineStats()])
        queued = self.num_waiting
        return msgspec.structs.replace(
            stats.after(self._past),
            num_requests=stats.num_requests + queued,
            num_waiting=stats.num_waiting + queued,
        )

    def use_limits(self, batching: Any) -> None:
        """Use another `ModelDynamicBatching` message, before the first request."""
        self._queue = PriorityQueue.of(batching)

    def stop_requests(self, stream: ResponseStream) -> None:
        """Let workers execute a request that ends those with its id, beside all others; waiting ones end here."""
        name = stream.request.id
        for waiting in [*(job.stream for job in self._repeated), *self._queue.waiting()]:
            if waiting.request.id == name:
                callbacks = waiting.request.begin_cancel()
                waiting.finish()
                for callback in callbacks:
                    callback()
        jobs = [job for job in self._jobs.values() if job.stream.request.id == name]
        for worker in {job.worker for job in jobs if job.worker is not None}:
            self._num_jobs += 1
            job = Job(self._num_jobs, ResponseStream(replace(stream.request)), time.monotonic_ns())
            task = self._manifold.pack(job.number, job.attempt, job.stream.request, self.version)
            self._give(job, worker)
            self._send(worker.name, Work([task]))
        stream.finish()

    def submit(self, stream: ResponseStream) -> None:
        """Queue a request, or reject it."""
        try:
            self._queue.put(stream)
        except ServerError as error:
            stream.reject(error)
            return
        stream.request.on_cancel(stream.fail_if_queued)
        self._wake()

    def close(self, error: ServerError) -> None:
        """Fail all requests."""
        if self._timer is not None:
            self._timer.cancel()
        for job in tuple(self._jobs.values()):
            self._end(job, error.message)
            job.stream.fail(error)
        for stream in self._queue.clear():
            stream.fail(error)

    # -- giving requests to workers -----------------------------------------------------------------------------

    def _wake(self) -> None:
        """Dispatch in the next iteration of the event loop, so that simultaneous requests are given together."""
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._woken = False
        self._queue.expire()
        given: dict[str, list[Task]] = {}
        while (job := self._next()) is not None:
            worker = self._choose(job)
            if worker is None:
                if job.attempt > 1:
                    self._repeated.appendleft(job)
                break
            if job.attempt == 1:
                self._queue.take(1)
            try:
                task = self._manifold.pack(job.number, job.attempt, job.stream.request, self.version)
            except ServerError as error:
                job.stream.fail(error)
                continue
            except Exception as error:
                logger.exception(
                    "request '%s' of stage '%s' cannot be encoded", job.stream.request.id, self.model
                )
                job.stream.fail(
                    InternalError(f"the request to stage '{self.model}' cannot be encoded: {error}")
                )
                continue
            self._give(job, worker)
            given.setdefault(worker.name, []).append(task)
        for name, tasks in given.items():
            self._send(name, Work(tasks))
        self._wake_at(self._queue.next_deadline())

    def _next(self) -> Job | None:
        """Return the request to give next; a waiting one stays in the queue."""
        while self._repeated:
            job = self._repeated.popleft()
            if not job.stream.closed:
                return job
        stream = next(self._queue.waiting(), None)
        if stream is None:
            return None
        self._num_jobs += 1
        return Job(self._num_jobs, stream, stream.timeline.queue_start)

    def _choose(self, job: Job) -> StageWorker | None:
        """Return the least loaded worker with room: on the host that has the inputs if possible, else in turns."""
        free = [worker for worker in self.workers.values() if worker.has_room(job.size)]
        hosts = self._manifold.hosts(job.stream.request)

        def cost(worker: StageWorker) -> tuple[float, bool, int]:
            return worker.num_used / worker.slots, bool(hosts) and worker.host not in hosts, worker.turn

        return min(free, key=cost, default=None)

    def _give(self, job: Job, worker: StageWorker) -> None:
        logger.debug(
            "request '%s' of stage '%s', attempt %d: worker '%s'",
            *(job.stream.request.id, self.model, job.attempt, worker.name),
        )
        job.worker = worker
        worker.jobs[job.number] = self._jobs[job.number] = job
        job.stream.timeline.compute_start = job.granted = time.monotonic_ns()
        job.add_span("queue", job.waits_since, job.granted)
        self.counters.grants += 1
        worker.turn = self.counters.grants
        if job.attempt == 1:
            job.stream.request.on_cancel(lambda: self._cancel(job))

    def _cancel(self, job: Job) -> None:
        if job.worker is not None:
            self._send(job.worker.name, Stop(job.number, job.attempt))
        else:  # it waits for another worker
            job.stream.fail(Cancelled("the request was cancelled"))

    def _wake_at(self, deadline: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            seconds = max(deadline - time.monotonic_ns(), 0) * 1e-9
            self._timer = asyncio.get_running_loop().call_later(seconds, self._dispatch)

    # -- from workers -------------------------------------------------------------------------------------------

    def add(self, worker: StageWorker) -> None:
        """Use a worker that has joined."""
        self.workers[worker.name] = worker
        self._wake()

    def report(self, worker: StageWorker, report: StageReport) -> None:
        """Process responses of a worker."""
        worker.accepts = report.accepts
        if report.stats is not None:
            worker.stats = report.stats
        for outcome in report.outcomes:
            job = self._jobs.get(outcome.number)
            if job is None or job.worker is not worker or job.attempt != outcome.attempt:
                continue  # of an earlier attempt
            self._respond(job, outcome)
        self._wake()

    def _respond(self, job: Job, outcome: Outcome) -> None:
        response = self._manifold.unpack(outcome)
        self.counters.kept_tensors += len(outcome.refs)
        self.counters.kept_bytes += sum(ref.nbytes for ref in outcome.refs.values())
        job.responded = True
        if response.final:
            _add_reading(job, outcome)
            self._end(job, response.error.message if response.error is not None else "")
            if outcome.durations is not None:
                _set_times(job.stream, outcome.durations)
        job.stream.send(response)
        if not response.final and job.stream.congested and not job.paused:
            self._pause(job)

    def _pause(self, job: Job) -> None:
        """Let the worker wait until the client has taken responses."""
        assert job.worker is not None and job.stream.backlog is not None
        job.paused = True
        self._send(job.worker.name, Flow(job.number, job.attempt, True))
        job.stream.backlog.on_room(lambda: self._resume(job))

    def _resume(self, job: Job) -> None:
        job.paused = False
        if job.worker is not None:
            self._send(job.worker.name, Flow(job.number, job.attempt, False))

    def lose(self, worker: StageWorker, reason: str) -> None:
        """Give up a worker: its requests wait for another one, unless it has sent responses of them."""
        if self.workers.get(worker.name) is worker:
            del self.workers[worker.name]
        self._past = EngineStats().after(worker.stats).after(self._past)
        self.counters.lost_workers += 1
        logger.warning("worker '%s' is lost with %d requests: %s", worker.name, len(worker.jobs), reason)
        for job in reversed(tuple(worker.jobs.values())):
            self._end(job, reason)
            if job.stream.request.cancelled:
                job.stream.fail(Cancelled("the request was cancelled"))
            elif job.responded:
                self._fail(job, f"its worker was lost after it has sent responses, because {reason}")
            elif job.attempt >= self._max_attempts:
                self._fail(job, f"it has lost {job.attempt} workers, the last one because {reason}")
            else:
                job.attempt += 1
                job.waits_since = time.monotonic_ns()
                job.paused = False
                self.counters.retries += 1
                self._repeated.appendleft(job)
        self._wake()

    def _fail(self, job: Job, reason: str) -> None:
        self.counters.failed += 1
        job.stream.fail(Unavailable(f"the request to stage '{self.model}' has failed: {reason}"))

    def _end(self, job: Job, error: str) -> None:
        """Take a request from its worker. `error`: why the attempt has failed."""
        if job.worker is not None:
            job.add_span("execute", job.granted, time.monotonic_ns(), error)
            del job.worker.jobs[job.number]
            del self._jobs[job.number]
            job.worker = None


def _add_reading(job: Job, outcome: Outcome) -> None:
    """Record the time in which the worker has read inputs that other workers keep."""
    if outcome.reading is not None:
        ns, transport = outcome.reading
        refs = [
            ref for tensor in job.stream.request.inputs.values() if (ref := remote_ref(tensor)) is not None
        ]
        counts: dict[str, str | int] = {
            "transport": transport,
            "tensors": len(refs),
            "bytes": sum(ref.nbytes for ref in refs),
        }
        job.add_span("tensor_transfer", job.granted, job.granted + ns, "", counts)


def _set_times(stream: ResponseStream, durations: Durations) -> None:
    """Set the times of a request from the durations that its worker has measured. The rest is time in queues."""
    compute_input, infer, output = durations
    timeline = stream.timeline
    timeline.output_start = time.monotonic_ns() - output
    timeline.input_end = timeline.output_start - infer
    timeline.compute_start = max(timeline.queue_start, timeline.input_end - compute_input)
