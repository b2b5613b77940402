"""A worker of a stage: a server core with one model, and an agent that executes the requests that it is given."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket as sockets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import neso.server.processes.messages as wire
from neso.cluster.messages import Goodbye, Introduce, Leave, Ping, Refused, Welcome
from neso.cluster.sockets import WorkerSocket
from neso.cluster.stages.hub import signature_digest
from neso.cluster.stages.messages import (
    PROTOCOL_VERSION,
    Durations,
    Flow,
    Outcome,
    StageHello,
    StageReport,
    Stop,
    Task,
    ToStageWorker,
    Work,
    to_worker,
)
from neso.engine.errors import EngineError
from neso.server.config.scheduling import instances_of
from neso.server.core import Core
from neso.server.errors import ServerError
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.model import Model
from neso.server.options import ModelControlMode, ServerOptions

logger = logging.getLogger(__name__)


class StageWorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a worker of a stage.

    - model: its name in one of the `repositories`
    - config: its `ModelConfig` as JSON; None: that of the repository
    - version: the version that is served; "": the newest one
    - address: of the server; name: unique among its workers; drain_seconds: to finish requests at the end
    - the other options are those of `ServerOptions`
    """

    model: str
    repositories: list[str]
    address: str
    name: str
    config: str | None = None
    version: str = ""
    token: str | None = None
    drain_seconds: float = 30.0
    backend_config: dict[str, dict[str, str]] = {}
    backend_directory: str | None = None
    model_config_name: str = ""
    disable_auto_complete_config: bool = False

    def server_options(self) -> ServerOptions:
        """Return the options of the worker's core."""
        directory = self.backend_directory
        return ServerOptions(
            model_repository=tuple(self.repositories),
            model_control_mode=ModelControlMode.EXPLICIT,
            backend_config=self.backend_config,
            backend_directory=None if directory is None else Path(directory),
            model_config_name=self.model_config_name,
            disable_auto_complete_config=self.disable_auto_complete_config,
            exit_timeout=self.drain_seconds,
        )


class StageAgent:
    """Executes requests of a server and sends it the responses. Bound to the running event loop."""

    def __init__(self, options: StageWorkerOptions) -> None:
        self._options = options
        self._core = Core(options.server_options())
        self._model: Model
        self._socket = WorkerSocket(options.name, options.address, options.token)
        self._running: dict[tuple[int, int], ResponseStream] = {}
        self._outcomes: list[Outcome] = []
        self._welcome: Welcome | None = None
        self._silent_checks = 0
        self._draining = False
        self._stopped = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def stop(self) -> None:
        """Take no more requests, finish those that run within `drain_seconds`, and end `run`."""
        self._draining = True
        self._stopped.set()

    async def run(self) -> None:
        """Load the model and serve until `stop`. Raises `EngineError` if it cannot be loaded or is refused."""
        try:
            await self._load()
        except ServerError as error:
            reason = f"the model could not be loaded: {error.message}"
            self._socket.send(Leave(reason))
            self._socket.close()
            await self._core.stop(0)
            raise EngineError(reason) from None
        self._hello()
        work = [self._receive(), self._beat(), self._until_stopped()]
        tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
        reason = "it was stopped"
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            next(task for task in tasks if task.done()).result()
        except EngineError as error:
            reason = str(error)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._socket.send(Leave(reason))
            self._socket.close()
            await self._core.stop(0 if self._running else None)

    async def _load(self) -> None:
        options = self._options
        await self._core.start()
        await self._core.load_model(options.model, options.config)
        self._model = self._core.model(options.model, options.version)

    def _hello(self) -> None:
        model, options = self._model, self._options
        self._welcome = None
        self._socket.send(
            StageHello(
                version=PROTOCOL_VERSION,
                name=options.name,
                host=sockets.gethostname(),
                pid=os.getpid(),
                model=model.name,
                model_version=model.version,
                signature=signature_digest(model.config),
                slots=_slots(model.config),
                decoupled=model.decoupled,
                labels={name: list(labels) for name, labels in model.labels.items()},
            )
        )

    async def _until_stopped(self) -> None:
        await self._stopped.wait()
        self._report()
        try:
            await asyncio.wait_for(self._idle.wait(), self._options.drain_seconds)
        except asyncio.TimeoutError:
            logger.warning("%d requests have not ended in time", len(self._running))
        self._report()

    async def _beat(self) -> None:
        """Send a report regularly, and give the server up when it is silent."""
        while True:
            silence = self._welcome.silence if self._welcome is not None else 0.0
            await asyncio.sleep(min(1.0, silence / 8) if silence else 1.0)
            self._report()
            self._silent_checks += 1
            if silence and self._silent_checks > 2 * max(8, silence):
                logger.warning("the server has not responded for %g s", 2 * silence)
                self._cancel_all()
                self._hello()
                self._silent_checks = 0

    def _report(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        if self._welcome is not None:
            accepts = not self._draining and self._model.ready()
            self._socket.send(StageReport(accepts, outcomes))

    # -- requests -----------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            data = await self._socket.receive()
            self._silent_checks = 0
            self._obey(to_worker.decode(data))

    def _obey(self, message: ToStageWorker) -> None:
        match message:
            case Welcome():
                self._welcome = message
                self._report()
            case Work(tasks):
                for task in tasks:
                    self._start(task)
            case Stop(number, attempt):
                stream = self._running.get((number, attempt))
                if stream is not None:
                    stream.cancel()
            case Flow(number, attempt, paused):
                stream = self._running.get((number, attempt))
                if stream is not None:
                    stream.pause() if paused else stream.consume(self._sink(number, attempt, stream))
            case Introduce():
                self._cancel_all()
                self._hello()
            case Goodbye():
                self._cancel_all()
                self._welcome = None
            case Refused(reason):
                raise EngineError(f"the server at {self._options.address} refuses this worker: {reason}")
            case Ping():
                pass

    def _start(self, task: Task) -> None:
        number, attempt = task.number, task.attempt
        try:
            message = wire.decoder.decode(task.request)
            if not isinstance(message, wire.Infer) or message.payload:  # a payload would be unpickled
                raise EngineError("it is no request with tensors")
            request = wire.unpack_request(message)
            request.client = ""  # the server has counted it
            stream = self._model.submit(request)
        except Exception as error:
            failure = InferenceResponse("", "", final=True)
            failure.error = wire.unpack_error(wire.pack_error(error))
            self._send(number, attempt, failure)
            return
        self._running[number, attempt] = stream
        self._idle.clear()
        stream.consume(self._sink(number, attempt, stream))

    def _sink(self, number: int, attempt: int, stream: ResponseStream) -> Callable[[InferenceResponse], None]:
        def receive(response: InferenceResponse) -> None:
            durations = None
            if response.final:
                self._running.pop((number, attempt), None)
                if not self._running:
                    self._idle.set()
                _, *stages = stream.timeline.stages(time.monotonic_ns())
                durations = (stages[0], stages[1], stages[2])
            self._send(number, attempt, response, durations)

        return receive

    def _send(
        self, number: int, attempt: int, response: InferenceResponse, durations: Durations | None = None
    ) -> None:
        """Send a response, together with others of the same iteration of the event loop."""
        if not self._outcomes:
            asyncio.get_running_loop().call_soon(self._report)
        encoded = wire.pack_response(number, response)
        self._outcomes.append(Outcome(number, attempt, msgspec.Raw(encoded), durations))

    def _cancel_all(self) -> None:
        for stream in tuple(self._running.values()):
            stream.cancel()
        self._running.clear()
        self._idle.set()


def worker_config(config: Any) -> str:
    """Return a `ModelConfig` message for workers as JSON. The queue, its limits and the cache are the server's."""
    from google.protobuf import json_format  # type: ignore[import-untyped]

    own = type(config)()
    own.CopyFrom(config)
    own.ClearField("response_cache")
    if own.HasField("dynamic_batching"):
        for name in ("default_queue_policy", "priority_queue_policy"):
            own.dynamic_batching.ClearField(name)
    return json.dumps(json_format.MessageToDict(own, preserving_proto_field_name=True))


def _slots(config: Any) -> int:
    """Return the number of batch entries that the instances of a model execute at a time."""
    instances = sum(not spec.passive for spec in instances_of(config))
    batch = int(config.max_batch_size) if config.HasField("dynamic_batching") else 1
    return max(1, instances) * max(1, batch)
