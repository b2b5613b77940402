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
from urllib.parse import urlsplit

import msgspec

import neso.server.processes.messages as wire
from neso.cluster.agent import leaving, run_together
from neso.cluster.messages import Goodbye, Introduce, Leave, Ping, Refused, Welcome
from neso.cluster.sockets import WorkerSocket, read_token
from neso.cluster.stages.hub import signature_digest
from neso.cluster.stages.manifold import add_mapped, pack_response, unpack_request
from neso.cluster.stages.messages import (
    PROTOCOL_VERSION,
    Durations,
    Flow,
    Outcome,
    Release,
    StageHello,
    StageReport,
    Stop,
    Task,
    ToStageWorker,
    Work,
    to_worker,
)
from neso.cluster.stages.tensors import TensorReader, TensorServer, TensorStore
from neso.engine.errors import EngineError
from neso.engine.kv_transfer.protocol import host_id
from neso.server.core import Core
from neso.server.errors import Cancelled, Restarting, ServerError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.metrics.registry import SampleKey
from neso.server.model import Model
from neso.server.options import ModelControlMode, ServerOptions

logger = logging.getLogger(__name__)


class StageWorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a worker of a stage.

    - model: its name in one of the `repositories`
    - config: its `ModelConfig` as JSON; None: that of the repository
    - version: the version that is served; "": the newest one
    - address: of the server; token_file: with its secret, if workers of other hosts can join
    - name: unique among its workers; drain_seconds: to finish requests at the end; verbose: log each request
    - share: its number and the number of workers of this host, between whose engines CPUs and GPUs are divided
    - the other options are those of `ServerOptions`
    """

    model: str
    repositories: list[str]
    address: str
    name: str
    config: str | None = None
    version: str = ""
    token_file: str | None = None
    drain_seconds: float = 30.0
    backend_config: dict[str, dict[str, str]] = {}
    backend_directory: str | None = None
    model_config_name: str = ""
    disable_auto_complete_config: bool = False
    share: tuple[int, int] = (0, 1)
    verbose: bool = False

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
            stage_share=self.share,
        )


class StageAgent:
    """Executes requests of a server and sends it the responses. Bound to the running event loop."""

    def __init__(self, options: StageWorkerOptions) -> None:
        self._options = options
        self._core = Core(options.server_options())
        self._model: Model
        token = read_token(options.token_file)
        remote = options.address.startswith("tcp://")
        self._socket = WorkerSocket(options.name, options.address, token if remote else None)
        host = _own_host(options.address) if remote else "*"
        self._tensors = None if token is None else TensorServer(token, host)
        self.store = TensorStore(options.name, "" if self._tensors is None else self._tensors.address)
        if self._tensors is not None:
            self._tensors.store = self.store
        self._reader = TensorReader(token, urlsplit(options.address).hostname or "" if remote else "")
        self._reading: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._running: dict[tuple[int, int], ResponseStream] = {}
        self._sinks: dict[tuple[int, int], Callable[[InferenceResponse], None]] = {}
        self._read_in: dict[tuple[int, int], tuple[int, str]] = {}  # see `Outcome.reading`
        self._outcomes: list[Outcome] = []
        self._counts: dict[SampleKey, float] = {}  # those that the server knows
        self._engine_lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
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
        work = [self._until_engine_lost(), self._receive(), self._beat(), self._until_stopped()]
        if self._tensors is not None:
            work.append(self._tensors.run())
        try:
            with leaving(self._socket.send):
                await run_together(*work)
        finally:
            self._socket.close()
            if self._tensors is not None:
                self._tensors.close()
            await self._core.stop(0 if self._running else None)
            self.store.release_all()

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
                slots=model.capacity,
                host_id=host_id(),
                decoupled=model.decoupled,
                labels={name: list(labels) for name, labels in model.labels.items()},
                engine=None if model.engine_group is None else model.engine_group.info,
                max_queue_size=model.max_queue_size,
            )
        )

    async def _until_engine_lost(self) -> None:
        raise EngineError(await self._engine_lost)

    async def _until_stopped(self) -> None:
        await self._stopped.wait()
        self._report()
        try:
            await asyncio.wait_for(self._idle.wait(), self._options.drain_seconds)
        except asyncio.TimeoutError:
            logger.warning("%d requests have not ended in time", len(self._running))
        self._report_metrics()

    async def _beat(self) -> None:
        """Send a report regularly, and give the server up when it is silent."""
        while True:
            silence = self._welcome.silence if self._welcome is not None else 0.0
            await asyncio.sleep(min(1.0, silence / 8) if silence else 1.0)
            self._report_metrics()
            self._silent_checks += 1
            if silence and self._silent_checks > 2 * max(8, silence):
                logger.warning("the server has not responded for %g s", 2 * silence)
                self._cancel_all()
                self._hello()
                self._silent_checks = 0

    def _report(self, **metrics: Any) -> None:
        outcomes, self._outcomes = self._outcomes, []
        if self._welcome is not None:
            accepts = not self._draining and self._model.ready()
            self._socket.send(StageReport(accepts, outcomes, **metrics))

    def _report_metrics(self) -> None:
        """Send a report with the values of metrics."""
        if self._welcome is None:
            return
        known, self._counts = self._counts, self._core.metrics.counts()
        new = [
            (key, value - known.get(key, 0.0))
            for key, value in self._counts.items()
            if value != known.get(key, 0.0)
        ]
        engine = self._model.engine_group
        self._report(stats=None if engine is None else engine.stats, counts=new)

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
                self._reader.timeout = message.silence
                self._report()
            case Work(tasks):
                for task in tasks:
                    self._start(task)
            case Stop(number, attempt):
                stream = self._running.get((number, attempt))
                if stream is not None:
                    stream.cancel()
                elif (reading := self._reading.get((number, attempt))) is not None:
                    reading.cancel()
            case Flow(number, attempt, paused):
                stream = self._running.get((number, attempt))
                if stream is not None:
                    stream.pause() if paused else stream.consume(self._sinks[number, attempt])
            case Release(numbers):
                for kept in numbers:
                    self.store.release(kept)
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
        """Submit a request. It waits for inputs that are read from other hosts."""
        key, started = (task.number, task.attempt), time.monotonic_ns()
        try:
            request = unpack_request(task)
            logger.debug(
                "request '%s' (%d of the server), attempt %d: begins", request.id, task.number, task.attempt
            )
            missing = [name for name, ref in task.refs.items() if not add_mapped(request, name, ref)]
            if missing:
                self._reading[key] = asyncio.ensure_future(self._read(task, request, missing))
                self._idle.clear()
            else:
                if task.refs:
                    self._read_in[key] = time.monotonic_ns() - started, "shm"
                self._submit(task, request)
        except Exception as error:
            self._fail(task, error)

    async def _read(self, task: Task, request: InferenceRequest, missing: list[str]) -> None:
        started = time.monotonic_ns()
        try:
            for name in missing:
                request.inputs[name] = await self._reader.read(name, task.refs[name])
            self._read_in[task.number, task.attempt] = time.monotonic_ns() - started, "tcp"
            self._submit(task, request)
        except asyncio.CancelledError:
            self._fail(task, Cancelled("the request was cancelled"))
        except Exception as error:
            self._fail(task, error)
        finally:
            del self._reading[task.number, task.attempt]
            self._check_idle()

    def _submit(self, task: Task, request: InferenceRequest) -> None:
        key = task.number, task.attempt
        stream = self._model.submit(request)
        sink = self._sink(task, stream)
        self._running[key], self._sinks[key] = stream, sink
        self._idle.clear()
        stream.consume(sink)

    def _sink(self, task: Task, stream: ResponseStream) -> Callable[[InferenceResponse], None]:
        key = task.number, task.attempt

        def receive(response: InferenceResponse) -> None:
            if self._running.get(key) is not stream:
                return  # the server has given this worker up: it would not free what is kept
            if isinstance(response.error, Restarting) and self._model.engine_group is not None:
                # Another worker executes the request, as if this process had ended together with its engine.
                if not self._engine_lost.done():
                    self._engine_lost.set_result(response.error.message)
                return
            durations = None
            if response.final:
                del self._running[key], self._sinks[key]
                self._check_idle()
                _, *stages = stream.timeline.stages(time.monotonic_ns())
                durations = (stages[0], stages[1], stages[2])
            try:
                self._send(task, response, durations)
            except Exception as error:
                logger.exception("a response of request '%s' cannot be encoded", response.id)
                self._running.pop(key, None)
                self._sinks.pop(key, None)
                self._check_idle()
                self._fail(task, error)
                stream.cancel()

        return receive

    def _fail(self, task: Task, error: Exception) -> None:
        failure = InferenceResponse("", "", final=True)
        failure.error = wire.unpack_error(wire.pack_error(error))
        self._send(task, failure)

    def _send(self, task: Task, response: InferenceResponse, durations: Durations | None = None) -> None:
        """Send a response, together with others of the same iteration of the event loop."""
        if not self._outcomes:
            asyncio.get_running_loop().call_soon(self._report)
        outcome = pack_response(task, response, self.store, durations)
        if response.final:
            reading = self._read_in.pop((task.number, task.attempt), None)
            outcome = msgspec.structs.replace(outcome, reading=reading)
            error = f": {response.error.message}" if response.error is not None else ""
            logger.debug("request %d of the server, attempt %d has ended%s", task.number, task.attempt, error)
        self._outcomes.append(outcome)

    def _check_idle(self) -> None:
        if not self._running and not self._reading:
            self._idle.set()

    def _cancel_all(self) -> None:
        """Forget all requests and tensors: the server has given this worker up, or has ended."""
        for stream in tuple(self._running.values()):
            stream.cancel()
        for reading in self._reading.values():
            reading.cancel()
        self._running.clear()
        self._sinks.clear()
        self._read_in.clear()
        self._outcomes.clear()
        self.store.release_all()
        self._check_idle()


def _own_host(address: str) -> str:
    """Return the address of this host on the way to the server, for other workers. Raises `EngineError`."""
    parts = urlsplit(address)
    try:
        family, kind, _, _, place = sockets.getaddrinfo(parts.hostname, parts.port, type=sockets.SOCK_DGRAM)[
            0
        ]
        with sockets.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            host = str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise EngineError(f"cannot find the way to {address}: {error}") from None
    return f"[{host}]" if ":" in host else host


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
