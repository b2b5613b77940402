"""The main process's side: starts the front-end processes, executes their requests and calls, keeps them up to date."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import neso.server.processes.messages as wire
from neso.server.errors import ServerError, Unavailable
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.processes.channel import Channel
from neso.server.processes.state import ServerState, StateReader
from neso.server.processes.totals import ProcessTotals, Totals

if TYPE_CHECKING:
    from neso.server.core import Core
    from neso.server.model import Model
    from neso.server.statistics import ModelStatistics

logger = logging.getLogger(__name__)

STATE_INTERVAL = 0.1
"""Seconds between two checks for changes of the state that no request has made, such as the end of an engine."""
ANSWER_TIMEOUT = 10.0
"""Seconds in which a front-end process must answer the main process; then it is not waited for."""
START_TIMEOUT = 120.0
"""Seconds in which the front-end processes must listen."""
MIN_DELAY, MAX_DELAY = 0.25, 30.0
"""Seconds between the end of a front-end process and its restart; they double while it ends soon after its start."""
STABLE_SECONDS = 10.0
"""Seconds after which a front-end process counts as started well."""

Spawn = Callable[[socket.socket], "subprocess.Popen[bytes]"]
"""Starts a front-end process with one end of a socket pair."""


class FrontEnd:
    """A front-end process: its channel, and its requests in flight in this process."""

    def __init__(self, owner: FrontEnds, index: int) -> None:
        self.index = index
        self.known: set[int] | None = (
            None  # keys of the models that it has the descriptions of; None before `setup`
        )
        self.listening = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.totals = ProcessTotals()
        self._owner = owner
        self._streams: dict[int, ResponseStream] = {}
        self.channel: Channel
        self.process: subprocess.Popen[bytes]

    async def start(self, spawn: Spawn) -> None:
        """Start the process. Raises `OSError`."""
        here, there = socket.socketpair()
        here.setblocking(False)
        try:
            self.process = spawn(there)
        except BaseException:
            here.close()
            raise
        finally:
            there.close()
        operations: dict[str, Any] = {
            **self._owner.operations,
            **self._owner.core.operations,
            "setup": lambda: self._owner.setup(self),
            "listening": self._on_listening,
            "failed": self._on_failed,
            "attach": self._attach,
            "totals": self._receive_totals,
        }
        self.channel = await Channel.open(here, operations, self._on_message, self._on_lost)

    def _on_listening(self) -> None:
        if not self.listening.done():
            self.listening.set_result(None)

    def _on_failed(self, message: str) -> None:
        logger.error("a front-end process could not start: %s", message)
        self._fail_listening(message)

    def _fail_listening(self, message: str) -> None:
        if not self.listening.done():
            self.listening.set_exception(Unavailable(message))
            self.listening.exception()  # only `FrontEnds.start` waits for it

    def _receive_totals(self, totals: ProcessTotals) -> None:
        self.totals = totals

    async def _attach(self, key: int, *arguments: Any) -> Any:
        model = self._owner.model(key)
        if model is None:
            raise Unavailable("the model is not loaded any more")
        return await model.attach(self.index, *arguments)

    def _on_lost(self) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.consume(_ignore)
            stream.cancel()
        self._fail_listening("a front-end process ended before it listened")
        self._owner.on_lost(self)
        self.ended.set()

    # -- requests -----------------------------------------------------------------------------------------------

    def _on_message(self, message: wire.Message) -> None:
        match message:
            case wire.Infer():
                self._submit(message)
            case wire.Cancel(number) if number in self._streams:
                self._streams[number].cancel()
            case wire.Flow(number, paused) if number in self._streams:
                if paused:
                    self._streams[number].pause()
                else:
                    self._streams[number].consume(self._sink(number))

    def _submit(self, message: wire.Infer) -> None:
        number = message.number
        try:
            request = wire.unpack_request(message)
            model = self._owner.core.model(message.model_name, message.model_version, message.namespace)
            stream = model.submit(request)
        except Exception as error:
            if not isinstance(error, ServerError):
                logger.exception("a request of a front-end process could not be started")
            failure = InferenceResponse(message.model_name, message.model_version, message.id, final=True)
            failure.error = wire.unpack_error(wire.pack_error(error))
            self.channel.send(wire.pack_response(number, failure))
            return
        self._streams[number] = stream
        stream.consume(self._sink(number))

    def _sink(self, number: int) -> Callable[[InferenceResponse], None]:
        def send(response: InferenceResponse) -> None:
            if response.final:
                self._streams.pop(number, None)
            self.channel.send(wire.pack_response(number, response))

        return send


def _ignore(response: InferenceResponse) -> None:
    """Consume a response of a request whose front-end process has ended."""


class FrontEnds:
    """The front-end processes of a core: `count` processes, which are restarted when they end.

    - operations: what they can call, beside the operations of the core
    - make_setup: returns what a front-end process needs to start, apart from the state
    - on_end: called with the index of a process that has ended
    """

    def __init__(
        self,
        core: Core,
        count: int,
        spawn: Spawn,
        make_setup: Callable[[int], Any],
        on_end: Callable[[int], None] = lambda index: None,
    ) -> None:
        self.core = core
        self._count = count
        self._spawn = spawn
        self._make_setup = make_setup
        self._on_end = on_end
        self._reader = StateReader(core)
        self._state: ServerState | None = None
        self._running: dict[int, FrontEnd] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.totals = Totals()
        self.num_restarts = 0
        self.operations: dict[str, Callable[..., Any]] = {
            "load_model": core.load_model,
            "unload_model": core.unload_model,
            "statistics": core.model_statistics,
            "list_repository": core.list_repository,
            "trace_settings": core.change_trace_settings,
            "log_settings": core.change_log_settings,
            "shared_memory": core.change_shared_memory,
            "render_metrics": core.render_metrics,
            "check_model_ready": core.check_model_ready,
        }

    # -- processes ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the processes and wait until they listen. Raises `Unavailable` with the reason of a failure."""
        fronts = [await self._start_one(index) for index in range(1, self._count + 1)]
        try:
            await asyncio.wait_for(asyncio.gather(*(front.listening for front in fronts)), START_TIMEOUT)
        except asyncio.TimeoutError:
            raise Unavailable(f"the front-end processes did not listen within {START_TIMEOUT:g} s") from None
        for front in fronts:
            self._in_task(self._keep_running(front))
        self._in_task(self._watch())

    async def _start_one(self, index: int) -> FrontEnd:
        front = FrontEnd(self, index)
        await front.start(self._spawn)
        self._running[index] = front
        return front

    async def _keep_running(self, front: FrontEnd) -> None:
        delay = MIN_DELAY
        while True:
            started = time.monotonic()
            await front.ended.wait()
            status = await asyncio.to_thread(front.process.wait)
            if self._stopping:
                return
            logger.error(
                "front-end process %d has ended (status %d): its connections are lost, it is restarted",
                *(front.process.pid, status),
            )
            delay = MIN_DELAY if time.monotonic() - started > STABLE_SECONDS else min(2 * delay, MAX_DELAY)
            while True:
                await asyncio.sleep(delay)
                try:
                    front = await self._start_one(front.index)
                    break
                except OSError as error:
                    logger.error("a front-end process could not be started: %s", error)
                    delay = min(2 * delay, MAX_DELAY)
            self.num_restarts += 1

    def setup(self, front: FrontEnd) -> tuple[Any, ServerState, list[Any]]:
        """Return what a process needs to start."""
        state = self._state = self._reader.read()
        return self._make_setup(front.index), state, self._news(front, state)

    def on_lost(self, front: FrontEnd) -> None:
        """Release everything of a process that has ended."""
        if self._running.get(front.index) is front:
            del self._running[front.index]
        self.totals.add_ended(front.totals)
        for model in self.core.models():
            model.detach(front.index)
        self._on_end(front.index)

    async def stop(self, grace: float) -> None:
        """Let the processes end their requests within `grace` seconds, then end them."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        fronts = list(self._running.values())
        await asyncio.gather(*(self._stop_one(front, grace) for front in fronts))

    @staticmethod
    async def _stop_one(front: FrontEnd, grace: float) -> None:
        if not front.listening.done():
            front.process.kill()
        try:
            await asyncio.wait_for(front.channel.call("stop", grace), grace + 2.0)
        except (asyncio.TimeoutError, ServerError):
            logger.warning("front-end process %d did not stop in time", front.process.pid)
        front.channel.close()
        try:
            await asyncio.to_thread(front.process.wait, 2.0)
        except subprocess.TimeoutExpired:
            front.process.kill()
            await asyncio.to_thread(front.process.wait)

    def _in_task(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- state --------------------------------------------------------------------------------------------------

    def model(self, key: int) -> Model | None:
        """Return the loaded model with this key."""
        for model in self.core.models():
            if self._reader.key(model) == key:
                return model
        return None

    def counts(self, model: Model) -> tuple[ModelStatistics, int] | None:
        """Return statistics and pending requests of a model in all processes, as of the last `collect`."""
        return self.totals.models.get(self._reader.key(model))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(STATE_INTERVAL)
            self._push()

    def _push(self, *, always: bool = False) -> list[asyncio.Future[Any]]:
        """Send the state to all processes if it has changed. Returns futures of their acknowledgements."""
        state = self._reader.read()
        if state == self._state and not always:
            return []
        self._state = state
        return [
            asyncio.ensure_future(self._answer(front, "apply", state, self._news(front, state)))
            for front in self._running.values()
            if front.known is not None
        ]

    def _news(self, front: FrontEnd, state: ServerState) -> list[Any]:
        """Return the descriptions of the models that are new for a process."""
        keys = {slot.key for record in state.records for slot in record.slots if slot.key}
        new = list(self._reader.describe(keys - (front.known or set())))
        front.known = keys
        return new

    async def synchronize(self) -> None:
        """Return when all processes serve the current state."""
        await asyncio.gather(*self._push(always=True))

    async def retire(self, model: Model, timeout: float | None) -> None:
        """Return when no process has requests in flight of a model that is being unloaded, or after `timeout`."""
        await self.synchronize()
        key = self._reader.key(model)
        seconds = ANSWER_TIMEOUT if timeout is None else timeout + 1.0
        await asyncio.gather(
            *(
                self._answer(front, "drain", key, timeout, timeout=None if timeout is None else seconds)
                for front in self._running.values()
            )
        )

    def notify(self, operation: str, *arguments: Any) -> None:
        """Call an operation of all processes without waiting."""
        for front in self._running.values():
            front.channel.notify(operation, *arguments)

    async def collect(self) -> None:
        """Fetch the current statistics and metrics of all processes."""
        await asyncio.gather(*(self._answer(front, "send_totals") for front in self._running.values()))
        self.totals.forget({self._reader.key(model) for model in self.core.models()})
        self.totals.update([front.totals for front in self._running.values()])

    @staticmethod
    async def _answer(
        front: FrontEnd, operation: str, *arguments: Any, timeout: float | None = ANSWER_TIMEOUT
    ) -> Any:
        """Call an operation. A process that has ended or hangs does not hold up the others."""
        try:
            return await asyncio.wait_for(front.channel.call(operation, *arguments), timeout)
        except asyncio.TimeoutError:
            logger.error("front-end process %d does not answer", front.process.pid)
        except Unavailable:
            pass
        except ServerError as error:
            logger.error("front-end process %d: %s", front.process.pid, error.message)
        return None
