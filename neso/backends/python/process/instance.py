"""One instance of a model in a process of its own: started, given work, started again when it dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from neso.backends.python.instance import Work
from neso.backends.python.instances import END_TIMEOUT
from neso.backends.python.local_server import LocalServer
from neso.backends.python.model_description import ModelDescription
from neso.backends.python.process.environment import Interpreter
from neso.backends.python.process.exchange import payload
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
    Respond,
    Started,
    Stop,
)
from neso.backends.python.process.model_process import ModelProcess
from neso.backends.python.process.server_log import write
from neso.backends.python.process.services import ModelServices
from neso.backends.python.settings import PythonSettings
from neso.server.errors import Cancelled, InternalError, ServerError, Unavailable
from neso.server.inference_response import NEVER_EXECUTED, ResponseStream

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 5
"""So many in a row, and the instance stays down."""

FIRST_DELAY, LONGEST_DELAY = 0.25, 30.0
"""Seconds before a second restart in a row (the first is immediate); doubled for each that follows."""

AFTER_FINALIZE = 5.0
"""Seconds that a process may take to end once its model is finalized."""


class State(Enum):
    """Of an instance: DOWN for good, STARTING (again), IDLE, or BUSY with work."""

    DOWN = "down"
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"


class ProcessInstance:
    """Belongs to the core's event loop. `changed` is called when the state is another: there may be work to give."""

    def __init__(
        self,
        description: ModelDescription,
        args: dict[str, str],
        settings: PythonSettings,
        server: LocalServer,
        changed: Callable[[], None],
    ) -> None:
        self.name = args["model_instance_name"]
        self.state = State.STARTING
        self.reason = ""
        self._description, self._args, self._settings, self._server = description, args, settings, server
        self._changed = changed
        self._numbers = itertools.count()
        self._life: asyncio.Task[None] | None = None
        self._stopping = False
        self._failures = 0  # crashes since the last execution that ended
        self._forget_process()

    async def start(self, interpreter: Interpreter) -> None:
        """Initialize the model. Raises `ServerError`; later failures restart it."""
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(interpreter, started))
        await started

    def execute(self, work: Work) -> None:
        """Send work; for an instance that is IDLE."""
        streams = self._still_wanted(work)
        if not streams:
            _free(work)
            return
        now = time.monotonic_ns()
        self._state(State.BUSY)
        self._work_number, self._work, self._sent = next(self._numbers), work, streams
        numbered = [(next(self._numbers), stream) for stream in streams]
        for number, stream in numbered:
            stream.timeline.compute_start = now
            self._streams[number] = stream
        process, work_number = self._process, self._work_number
        assert process is not None

        def build() -> Execute:
            pack = process.exchange.pack_request
            return Execute(work_number, tuple((number, pack(stream.request)) for number, stream in numbered))

        def failed(error: Exception) -> None:
            for number, stream in numbered:
                self._streams.pop(number, None)
                stream.fail(error if isinstance(error, ServerError) else InternalError(str(error)))
            self._free(work_number)

        size = sum(payload(stream.request.inputs.values()) for stream in streams)
        process.send_tensors(build, size, failed)
        for number, stream in numbered:
            stream.request.on_cancel(lambda number=number: self._cancel(number))  # type: ignore[misc]

    async def check_ready(self) -> bool:
        """What the model's own `is_ready` says; False if the process ends meanwhile."""
        if self._process is None:
            return False
        number = next(self._numbers)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        self._process.send(CheckReady(number))
        return await answer

    async def stop(self) -> None:
        """Let the model finalize, and end the process; by force when that takes too long."""
        self._stopping = True
        if self._process is not None and self.state in (State.IDLE, State.BUSY):
            self._process.send(Stop())
            _, late = await asyncio.wait((self._process.ended,), timeout=END_TIMEOUT)
            if late:
                logger.error("instance '%s' does not end, and is killed", self.name)
        elif self._life is not None:
            self._life.cancel()  # it waits to start again, or is being initialized
        if self._process is not None:
            self._process.kill()
        if self._life is not None:
            await asyncio.wait((self._life,))

    async def _live(self, interpreter: Interpreter, started: asyncio.Future[None]) -> None:
        """Processes, one after the other."""
        failed_starts = 0
        while True:
            try:
                ended = await self._start_process(interpreter)
                failed_starts = 0
                if not started.done():
                    started.set_result(None)
                self._state(State.IDLE)
                reason = f"the process has ended ({await asyncio.shield(ended)})"
            except ServerError as error:
                reason = error.message
                failed_starts += 1
                if not started.done():
                    self._state(State.DOWN)
                    started.set_exception(InternalError(reason))
                    return
            finally:
                await self._end_process()
            if self._stopping:
                self._fail_all(Unavailable(f"model '{self._description.name}' is unloaded"))
                self._state(State.DOWN)
                return
            logger.error("instance '%s' of a Python model is not healthy: %s", self.name, reason)
            self.reason = f"Stub process '{self.name}' is not healthy: {reason}"
            self._failures += 1
            gives_up = failed_starts >= MAX_FAILED_STARTS
            self._state(State.DOWN if gives_up else State.STARTING, tell=False)
            self._fail_all(Unavailable(self.reason))
            self._changed()
            if gives_up:
                logger.error("instance '%s' failed to start %d times, and stays down", self.name, failed_starts)
                return
            await asyncio.sleep(self._delay())

    async def _start_process(self, interpreter: Interpreter) -> asyncio.Future[str]:
        """Start a process and initialize the model in it. Raises `ServerError`."""
        description, settings = self._description, self._settings
        loop = asyncio.get_running_loop()
        self._hello, self._initialized = loop.create_future(), loop.create_future()
        process = ModelProcess(self._received)
        try:
            await process.start(interpreter, settings)
        except OSError as error:
            raise InternalError(f"'{interpreter.program}' cannot be started: {error}") from None
        self._process, self._services = process, ModelServices(self._server, process)
        process.send(
            Initialize(
                str(description.path.absolute()),
                self._args,
                description.decoupled,
                {name: datatype.value for name, datatype in description.datatypes.items()},
                description.states,
                logging.getLogger("neso.model").getEffectiveLevel(),
                settings.shm_default_size,
                settings.shm_growth_size,
            )
        )
        await asyncio.wait(
            (self._hello, process.ended), timeout=settings.stub_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if not self._hello.done() and not process.ended.done():
            raise InternalError(
                f"Stub process '{self.name}' is not healthy: it did not come up in {settings.stub_timeout:g} s"
            )
        await asyncio.wait((self._initialized, process.ended), return_when=asyncio.FIRST_COMPLETED)
        if not self._initialized.done():
            raise InternalError(
                f"Stub process '{self.name}' is not healthy: "
                f"the process has ended ({process.ended.result()}) before the model was initialized"
            )
        if (error := self._initialized.result()) is not None:
            raise InternalError(error)
        return process.ended

    async def _end_process(self) -> None:
        """Give back all that was the process's, but for the streams."""
        if self._process is None:
            return
        self._process.kill()
        process, services = self._process, self._services
        self._process = None
        await asyncio.shield(process.ended)
        services.close()
        for answer in self._questions.values():
            if not answer.done():
                answer.set_result(False)
        self._questions.clear()

    def _forget_process(self) -> None:
        self._process: ModelProcess | None = None
        self._services: ModelServices
        self._streams: dict[int, ResponseStream] = {}
        self._questions: dict[int, asyncio.Future[bool]] = {}
        self._work: Work | None = None
        self._sent: list[ResponseStream] = []  # those of its requests that were still wanted
        self._work_number = -1

    def _delay(self) -> float:
        if self._failures <= 1:
            return 0.0
        return min(FIRST_DELAY * 2 ** (self._failures - 2), LONGEST_DELAY)

    def _received(self, message: Message) -> None:
        match message:
            case Respond():
                self._respond(message)
            case Free(work):
                self._failures = 0
                self._free(work)
            case Executed(work, input_end, output_start):
                self._executed(work, input_end, output_start)
            case Log():
                write(message)
            case Hello():
                self._hello.set_result(None)
            case Started(error):
                self._initialized.set_result(error)
            case Answer(question, value):
                if (answer := self._questions.pop(question, None)) is not None and not answer.done():
                    answer.set_result(bool(value))
            case Ended():
                if self._process is not None:
                    asyncio.get_running_loop().call_later(AFTER_FINALIZE, self._process.kill)
            case _:
                self._services.handle(message)

    def _respond(self, message: Respond) -> None:
        stream = self._streams.get(message.number)
        if message.response.final:
            self._streams.pop(message.number, None)
        if stream is None or self._process is None:
            return
        stream.timeline.input_end, stream.timeline.output_start = message.input_end, message.output_start
        stream.send(self._process.exchange.unpack_response(message.response))

    def _executed(self, work: int, input_end: int, output_start: int) -> None:
        if self._work is None or work != self._work_number:
            return
        for stream in self._sent:
            stream.timeline.input_end, stream.timeline.output_start = input_end, output_start
        if self._work.executed is not None:
            self._work.executed(self._sent[0].timeline)

    def _free(self, number: int) -> None:
        if self._work is None or number != self._work_number:
            return
        work, self._work, self._sent = self._work, None, []
        _free(work)
        self._state(State.IDLE)

    def _cancel(self, number: int) -> None:
        if number in self._streams and self._process is not None:
            self._process.send(Cancel(number))

    def _fail_all(self, error: ServerError) -> None:
        """Answer all that the process had, and tell that it is free of its work."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        work, self._work, self._sent = self._work, None, []
        if work is not None:
            _free(work)

    def _state(self, state: State, *, tell: bool = True) -> None:
        self.state = state
        if tell and state is not State.BUSY:
            self._changed()

    @staticmethod
    def _still_wanted(work: Work) -> list[ResponseStream]:
        wanted = []
        for stream in work.streams:
            if stream.request.cancelled:
                stream.fail(Cancelled(NEVER_EXECUTED))  # or was already
            else:
                wanted.append(stream)
        return wanted


def _free(work: Work) -> None:
    if work.free is not None:
        work.free()
