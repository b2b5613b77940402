"""A child process with an initialized model: executes work items and receives their responses."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast

from neso.backends.python.description import ModelDescription, PythonSettings
from neso.backends.python.local_server import LocalServer
from neso.backends.python.model_instance import WorkItem
from neso.backends.python.process.codec import log_level, payload_size, write_log_record
from neso.backends.python.process.messages import (
    Cancel,
    CheckReady,
    Execute,
    Executed,
    Finalized,
    Hello,
    Initialize,
    Log,
    Message,
    Pause,
    Reply,
    Reschedule,
    Respond,
    Resume,
    Started,
    Stop,
    WorkDone,
)
from neso.backends.python.process.model_process import ModelProcess
from neso.backends.python.process.server_requests import ServerRequestHandler
from neso.backends.python.process.spawn import Interpreter
from neso.backends.python.thread_instances import Rescheduler
from neso.server.backlog import Backlog
from neso.server.errors import Cancelled, InternalError, ServerError
from neso.server.inference_response import NEVER_EXECUTED, ResponseStream
from neso.server.tracing import ModelTrace

EXIT_TIMEOUT = 5.0
"""Timeout for a process to exit after `finalize` has returned, in seconds."""


class SentWork(NamedTuple):
    """A work item in the process. `streams`: its requests by number, without cancelled requests."""

    number: int
    work: WorkItem
    streams: dict[int, ResponseStream]


class RunningModel:
    """A process with an initialized model. Used on the core's event loop only.

    The process executes its work items in turn. `work_done` is called when an item is finished. `ended` is resolved
    with the exit reason when the process has ended.
    """

    def __init__(
        self,
        name: str,
        server: LocalServer,
        work_done: Callable[[], None],
        reschedule: Rescheduler | None,
    ) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._process = ModelProcess(self._received)
        self._request_handler = ServerRequestHandler(server, self._process, self._find_trace)
        self._on_work_done, self._reschedule = work_done, reschedule
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._initialized: asyncio.Future[str | None] = self._loop.create_future()
        self._numbers = itertools.count()
        self._streams: dict[int, ResponseStream] = {}
        self._paused: set[int] = set()
        self._pending_queries: dict[int, asyncio.Future[bool]] = {}
        self._works: deque[SentWork] = deque()
        self.ended = self._process.ended

    async def start(
        self,
        interpreter: Interpreter,
        settings: PythonSettings,
        description: ModelDescription,
        args: dict[str, str],
    ) -> None:
        """Start the process and initialize the model. Raises `ServerError` after `ended` is resolved."""
        try:
            await self._process.start(interpreter, settings)
        except OSError as error:
            self.ended.set_result(str(error))
            raise InternalError(f"'{interpreter.program}' cannot be started: {error}") from None
        self._process.send(
            Initialize(
                str(description.code.file),
                str(description.code.folder),
                args,
                description.decoupled,
                {name: datatype.value for name, datatype in description.datatypes.items()},
                description.states,
                description.iterative,
                log_level(),
                settings.shm_default_size,
                settings.shm_growth_size,
            )
        )
        try:
            await self._wait_until_initialized(settings.stub_timeout)
        except BaseException:
            await self.kill()
            raise

    @property
    def num_works(self) -> int:
        """Number of work items in the process."""
        return len(self._works)

    def execute(self, work: WorkItem) -> None:
        """Send a work item."""
        streams = {next(self._numbers): stream for stream in self._drop_cancelled(work)}
        if not streams:
            work.finish()
            return
        sent = SentWork(next(self._numbers), work, streams)
        self._works.append(sent)
        if len(self._works) == 1:
            self._mark_started(sent)
        self._streams.update(streams)
        pack = self._process.codec.pack_request

        def failed(error: Exception) -> None:
            for request, stream in streams.items():
                self._streams.pop(request, None)
                stream.fail(error if isinstance(error, ServerError) else InternalError(str(error)))
            self._loop.call_soon(self._work_done, sent.number)

        self._process.send_tensors(
            lambda: Execute(
                sent.number,
                tuple((request, pack(stream.request, stream.trace)) for request, stream in streams.items()),
                log_level(),
            ),
            sum(payload_size(stream.request.inputs.values()) for stream in streams.values()),
            failed,
        )
        for request, stream in streams.items():
            stream.request.on_cancel(lambda request=request: self._cancel(request))  # type: ignore[misc]

    async def check_ready(self) -> bool:
        """Return the result of the model's `is_ready`; False if the process ends meanwhile."""
        number = next(self._numbers)
        result = self._pending_queries[number] = self._loop.create_future()
        self._process.send(CheckReady(number))
        await asyncio.wait((result, self.ended), return_when=asyncio.FIRST_COMPLETED)
        return result.done() and result.result()

    async def stop(self, timeout: float) -> bool:
        """Finalize the model and end the process. Returns False if it was killed after `timeout` seconds.

        If it is cancelled, the process is killed at once.
        """
        self._process.send(Stop())
        try:
            await asyncio.wait((self.ended,), timeout=timeout)
            return self.ended.done()
        finally:
            await self.kill()

    async def kill(self) -> None:
        """Kill the process, wait for its end and release its server-side objects."""
        self._process.kill()
        await asyncio.wait((self.ended,))
        self._request_handler.close()

    def fail_all(self, error: ServerError) -> list[WorkItem]:
        """After the process has ended, fail the requests that it had started. Returns the unstarted work items."""
        works, self._works = list(self._works), deque()
        streams, self._streams = self._streams, {}
        for sent in works[1:]:
            for request in sent.streams:
                streams.pop(request, None)
        for stream in streams.values():
            stream.fail(error)
        for sent in works[:1]:
            sent.work.finish()
        return [sent.work for sent in works[1:]]

    async def _wait_until_initialized(self, timeout: float) -> None:
        unhealthy = f"Stub process '{self._name}' is not healthy:"
        await asyncio.wait((self._hello, self.ended), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not self._hello.done() and not self.ended.done():
            raise InternalError(f"{unhealthy} it did not start within {timeout:g} s")
        await asyncio.wait((self._initialized, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if not self._initialized.done():
            raise InternalError(
                f"{unhealthy} the process has ended ({self.ended.result()}) before the model was initialized"
            )
        failure = self._initialized.result()
        if failure is not None:
            raise InternalError(failure)

    def _received(self, message: Message) -> None:
        match message:
            case Respond():
                self._respond(message)
            case WorkDone(work):
                self._work_done(work)
            case Executed():
                self._executed(message)
            case Reschedule(request):
                stream = self._streams.pop(request, None)
                if stream is not None and self._reschedule is not None:
                    self._reschedule(stream)
            case Log():
                write_log_record(message)
            case Hello():
                self._hello.set_result(None)
            case Started(error):
                self._initialized.set_result(error)
            case Reply(query, value):
                if (result := self._pending_queries.pop(query, None)) is not None and not result.done():
                    result.set_result(bool(value))
            case Finalized():
                self._process.kill_after(EXIT_TIMEOUT)
            case _:
                self._request_handler.handle(message)

    def _respond(self, message: Respond) -> None:
        stream = self._streams.get(message.number)
        if stream is None:
            return
        if message.response.final:
            del self._streams[message.number]
        stream.timeline.input_end, stream.timeline.output_start = message.input_end, message.output_start
        stream.send(self._process.codec.unpack_response(message.response))
        if stream.congested and not message.response.final and message.number not in self._paused:
            self._pause(message.number, stream.backlog)

    def _pause(self, number: int, backlog: Backlog | None) -> None:
        """Let the model wait before its next response, until the client has read some of them."""
        assert backlog is not None

        def resume() -> None:
            self._paused.discard(number)
            if number in self._streams:
                self._process.send(Resume(number))

        self._paused.add(number)
        self._process.send(Pause(number))
        backlog.on_room(resume)

    def _executed(self, message: Executed) -> None:
        sent = next((sent for sent in self._works if sent.number == message.work), None)
        if sent is None:
            return
        for stream in sent.streams.values():
            stream.timeline.input_end = message.input_end
            stream.timeline.output_start = message.output_start
        if sent.work.on_executed is not None:
            sent.work.on_executed(next(iter(sent.streams.values())).timeline)

    def _work_done(self, number: int) -> None:
        sent = next((sent for sent in self._works if sent.number == number), None)
        if sent is None:
            return
        self._works.remove(sent)
        sent.work.finish()
        if self._works:
            self._mark_started(self._works[0])
        self._on_work_done()

    @staticmethod
    def _mark_started(sent: SentWork) -> None:
        now = time.monotonic_ns()
        for stream in sent.streams.values():
            stream.timeline.compute_start = stream.timeline.compute_start or now

    def _find_trace(self, id: int) -> ModelTrace | None:
        """Return the trace of a request in the process; a BLS call refers to it as its parent."""
        traces = (stream.trace for stream in self._streams.values())
        return next((trace for trace in traces if trace is not None and trace.id == id), None)

    def _cancel(self, number: int) -> None:
        if number in self._streams:
            self._process.send(Cancel(number))

    @staticmethod
    def _drop_cancelled(work: WorkItem) -> list[ResponseStream]:
        active = []
        for stream in cast("list[ResponseStream]", work.streams):
            if stream.request.cancelled:
                stream.fail(Cancelled(NEVER_EXECUTED))  # no effect if it has already failed
            else:
                active.append(stream)
        return active
