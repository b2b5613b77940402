"""One process with a model in it, from its start to its end: what it was given, and what it answers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast

from neso.backends.python.description import ModelDescription, PythonSettings
from neso.backends.python.local_server import LocalServer
from neso.backends.python.model_instance import Work
from neso.backends.python.process.codec import log_level, payload, write_log_record
from neso.backends.python.process.messages import (
    Answer,
    Cancel,
    CheckReady,
    Ended,
    Execute,
    Executed,
    Free,
    Hello,
    Initialize,
    Log,
    Message,
    Reschedule,
    Respond,
    Started,
    Stop,
)
from neso.backends.python.process.model_process import ModelProcess
from neso.backends.python.process.services import ModelServices
from neso.backends.python.process.spawn import Interpreter
from neso.backends.python.thread_instances import Rescheduler
from neso.server.errors import Cancelled, InternalError, ServerError
from neso.server.inference_response import NEVER_EXECUTED, ResponseStream
from neso.server.tracing import ModelTrace

AFTER_FINALIZE = 5.0
"""Seconds that a process may take to end once its model is finalized."""


class Sent(NamedTuple):
    """A work that the process has, and those of its requests, by their numbers, that were still wanted."""

    number: int
    work: Work
    streams: dict[int, ResponseStream]


class RunningModel:
    """Belongs to the core's event loop. `free` is called whenever a work is over.

    It has up to `depth` works, of which the first is being executed: with the next one at hand, the process need not
    wait for the server. `ended` is resolved, with the reason, when the process is gone.
    """

    def __init__(
        self,
        name: str,
        server: LocalServer,
        depth: int,
        free: Callable[[], None],
        reschedule: Rescheduler | None,
    ) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._process = ModelProcess(self._received)
        self._services = ModelServices(server, self._process, self._find_trace)
        self._depth, self._free, self._reschedule = depth, free, reschedule
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._initialized: asyncio.Future[str | None] = self._loop.create_future()
        self._numbers = itertools.count()
        self._streams: dict[int, ResponseStream] = {}
        self._questions: dict[int, asyncio.Future[bool]] = {}
        self._works: deque[Sent] = deque()
        self.ended = self._process.ended

    async def start(
        self,
        interpreter: Interpreter,
        settings: PythonSettings,
        description: ModelDescription,
        args: dict[str, str],
    ) -> None:
        """Start the process and initialize the model. Raises `ServerError`; then `ended` is resolved."""
        try:
            await self._process.start(interpreter, settings)
        except OSError as error:
            self.ended.set_result(str(error))
            raise InternalError(f"'{interpreter.program}' cannot be started: {error}") from None
        self._process.send(
            Initialize(
                str(description.path.absolute()),
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
            await self._come_up(settings.stub_timeout)
        except BaseException:
            await self.kill()
            raise

    @property
    def has_room(self) -> bool:
        """Whether it can take one more work."""
        return len(self._works) < self._depth

    def execute(self, work: Work) -> None:
        """Send work, to a model that has room."""
        streams = {next(self._numbers): stream for stream in self._still_wanted(work)}
        if not streams:
            tell_free(work)
            return
        sent = Sent(next(self._numbers), work, streams)
        self._works.append(sent)
        if len(self._works) == 1:
            self._begins(sent)
        self._streams.update(streams)
        pack = self._process.exchange.pack_request

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
            sum(payload(stream.request.inputs.values()) for stream in streams.values()),
            failed,
        )
        for request, stream in streams.items():
            stream.request.on_cancel(lambda request=request: self._cancel(request))  # type: ignore[misc]

    async def check_ready(self) -> bool:
        """What the model's own `is_ready` says; False if the process ends meanwhile."""
        number = next(self._numbers)
        answer = self._questions[number] = self._loop.create_future()
        self._process.send(CheckReady(number))
        await asyncio.wait((answer, self.ended), return_when=asyncio.FIRST_COMPLETED)
        return answer.done() and answer.result()

    async def stop(self, timeout: float) -> bool:
        """Let the model finalize; False if it had to be killed after `timeout` seconds."""
        self._process.send(Stop())
        await asyncio.wait((self.ended,), timeout=timeout)
        in_time = self.ended.done()
        await self.kill()
        return in_time

    async def kill(self) -> None:
        """End the process by force, unless it has ended, and give back what it held in the server."""
        self._process.kill()
        await asyncio.wait((self.ended,))
        self._services.close()

    def fail_all(self, error: ServerError) -> list[Work]:
        """Once it has ended: answer all that it had begun; gives back the works that it had not."""
        works, self._works = list(self._works), deque()
        streams, self._streams = self._streams, {}
        for sent in works[1:]:
            for request in sent.streams:
                streams.pop(request, None)
        for stream in streams.values():
            stream.fail(error)
        for sent in works[:1]:
            tell_free(sent.work)
        return [sent.work for sent in works[1:]]

    async def _come_up(self, timeout: float) -> None:
        unhealthy = f"Stub process '{self._name}' is not healthy:"
        await asyncio.wait((self._hello, self.ended), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not self._hello.done() and not self.ended.done():
            raise InternalError(f"{unhealthy} it did not come up in {timeout:g} s")
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
            case Free(work):
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
            case Answer(question, value):
                if (answer := self._questions.pop(question, None)) is not None and not answer.done():
                    answer.set_result(bool(value))
            case Ended():
                self._process.kill_after(AFTER_FINALIZE)
            case _:
                self._services.handle(message)

    def _respond(self, message: Respond) -> None:
        stream = self._streams.get(message.number)
        if stream is None:
            return
        if message.response.final:
            del self._streams[message.number]
        stream.timeline.input_end, stream.timeline.output_start = message.input_end, message.output_start
        stream.send(self._process.exchange.unpack_response(message.response))

    def _executed(self, message: Executed) -> None:
        sent = next((sent for sent in self._works if sent.number == message.work), None)
        if sent is None:
            return
        for stream in sent.streams.values():
            stream.timeline.input_end = message.input_end
            stream.timeline.output_start = message.output_start
        if sent.work.executed is not None:
            sent.work.executed(next(iter(sent.streams.values())).timeline)

    def _work_done(self, number: int) -> None:
        sent = next((sent for sent in self._works if sent.number == number), None)
        if sent is None:
            return
        self._works.remove(sent)
        tell_free(sent.work)
        if self._works:
            self._begins(self._works[0])
        self._free()

    @staticmethod
    def _begins(sent: Sent) -> None:
        now = time.monotonic_ns()
        for stream in sent.streams.values():
            stream.timeline.compute_start = stream.timeline.compute_start or now

    def _find_trace(self, id: int) -> ModelTrace | None:
        """Of a request that the process has, to which it says that a call belongs."""
        traces = (stream.trace for stream in self._streams.values())
        return next((trace for trace in traces if trace is not None and trace.id == id), None)

    def _cancel(self, number: int) -> None:
        if number in self._streams:
            self._process.send(Cancel(number))

    @staticmethod
    def _still_wanted(work: Work) -> list[ResponseStream]:
        wanted = []
        for stream in cast("list[ResponseStream]", work.streams):
            if stream.request.cancelled:
                stream.fail(Cancelled(NEVER_EXECUTED))  # or was already
            else:
                wanted.append(stream)
        return wanted


def tell_free(work: Work) -> None:
    """The work is over, whatever became of it."""
    if work.free is not None:
        work.free()
