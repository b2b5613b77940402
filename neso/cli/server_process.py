"""The server process: runs the core and the frontends, and prints a summary when they are ready."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import uvloop

from neso.cli.flag_values import OptionError
from neso.cli.leader_mode import follow, lead
from neso.cli.serve_options import ModelArgument, ServeOptions
from neso.cli.throughput_log import log_throughput
from neso.engine.parallel.launched_rank import launched_rank
from neso.frontends import Frontend
from neso.frontends.transport.http1 import AsgiApp, AsgiServer, BindError
from neso.frontends.transport.tcp import ConnectionLimits
from neso.server.admission import Admission
from neso.server.core import Core
from neso.server.errors import ServerError
from neso.server.log import configure_log
from neso.server.memory import freeze_gc, trim_when_idle
from neso.server.metadata import ModelState
from neso.server.model import BACKEND_SHARE, Model
from neso.server.processes.front_ends import FrontEnds
from neso.server.shared_counts import SharedCounts

logger = logging.getLogger("neso")

OPENAI_ON_HTTP = (
    "/v1",
    "/health",
    "/metrics",
    "/version",
    "/tokenize",
    "/detokenize",
    "/classify",
    "/score",
    "/rerank",
)
"""Paths of the OpenAI API that the HTTP port also serves, like vLLM's single port."""
PAGES_ON_HTTP = ("/dashboard", "/static", "/docs", "/openapi.json")
"""Paths of the web pages that the HTTP port also serves."""
EXIT_GRACE = 3.0
"""Seconds after `exit_timeout` at which the process exits even if something blocks."""
PROTOCOLS = {
    "http": "KServe v2 HTTP, generate; OpenAI under /v1",
    "grpc": "KServe v2 gRPC",
    "metrics": "Prometheus /metrics",
    "openai": "OpenAI API /v1, docs at /docs",
    "sagemaker": "SageMaker /ping, /invocations, /models",
    "vertex-ai": "Vertex AI predictions and health",
}


def run(command_line: Mapping[str, list[str]]) -> int:
    """Serve until SIGINT or SIGTERM and return the exit status. A second signal terminates immediately.

    `command_line`: the given texts of each flag, by name.
    """
    started = time.perf_counter()
    try:
        options = ServeOptions.read(command_line)
    except OptionError as error:
        print(f"neso serve: {error}", file=sys.stderr)
        return 2
    try:
        configure_log(options.log)
        for warning in options.warnings:
            logger.warning(warning)
        if options.multi_model:
            from neso.cli.orchestrator_mode import orchestrate

            options = orchestrate(options)
        launched = None if options.multi_model else launched_rank()
        if launched is not None and launched.size > 1:
            if launched.rank:
                return follow(options, launched)
            options = lead(options, launched)
        return uvloop.run(_serve(options, started))
    except (ServerError, BindError, OptionError, ValueError) as error:
        print(f"neso: {error}", file=sys.stderr)
        return 1


@dataclass(frozen=True)
class FrontEndSetup:
    """What a front-end process needs to start.

    - options: with the ports that the main process listens on
    - index: number of the process; the main process has 0
    - counts: file descriptors of the `SharedCounts` of sequences, input bytes and connections
    """

    options: ServeOptions
    index: int
    counts: tuple[int, int, int]

    def admission(self) -> Admission:
        """Return the limits on requests in flight."""
        sequences, input_bytes, _ = self._counts()
        return Admission(self.options.server.admission, (sequences, input_bytes))

    def connection_limits(self) -> ConnectionLimits:
        """Return the limits on connections."""
        return self.options.connections.limits(self._counts()[2])

    def _counts(self) -> list[SharedCounts]:
        number = self.options.connections.num_processes
        return [SharedCounts(descriptor, number, self.index) for descriptor in self.counts]


async def _serve(options: ServeOptions, started: float) -> int:
    stopping = asyncio.Event()
    _on_signals(stopping.set)
    if options.connections.num_processes > 1:
        await asyncio.to_thread(options.check_ports_free)
        options = options.sharing_ports()
        core, limits = _core_of_several(options, lambda: _ports(frontends))
    else:
        core, limits = Core(options.server), options.connections.limits()
    _on_hangup(options, core)
    lost: list[str] = []

    def on_lost(reason: str) -> None:
        lost.append(reason)
        stopping.set()

    core.on_lost = on_lost
    for model in options.models:
        _add_checkpoint(core, model, options.engine)
    # The frontends are imported and started while the models load in their own processes.
    loading = asyncio.ensure_future(core.start())
    background: list[asyncio.Future[None]] = []
    frontends: dict[str, Frontend] = {}
    try:
        await asyncio.sleep(0)
        await start_frontends(core, options, frontends, limits)
        work = [loading]
        if core.front_ends is not None:
            work.append(asyncio.ensure_future(core.front_ends.start()))
        if not await _wait_unless(stopping, *work):
            return 0
        if core.front_ends is not None:
            await core.front_ends.synchronize()
        failed = _failures(core, options)
        if failed:
            print("\n".join(f"neso: {reason}" for reason in failed), file=sys.stderr)
            return 1
        freeze_gc()
        background.append(asyncio.ensure_future(trim_when_idle(lambda: core.admission.sequences > 0)))
        if options.log.stats_interval:
            background.append(asyncio.ensure_future(log_throughput(core, options.log.stats_interval)))
        dashboard = options.openai is not None and options.openai.dashboard
        show_ready(core, _ports(frontends), time.perf_counter() - started, dashboard)
        await stopping.wait()
        if lost:
            logger.critical("%s: the server ends, so that its launcher starts all ranks again", lost[0])
            return 1
        logger.info("stopping: requests in flight have %.0f s to finish", options.server.exit_timeout)
        return 0
    except (ServerError, BindError, ValueError) as error:
        print(f"neso: {error}", file=sys.stderr)  # now: a model that is loading can delay the end
        return 1
    except Exception:
        logger.exception("the server failed")
        return 1
    finally:
        loading.cancel()
        for task in background:
            task.cancel()
        await _stop(frontends, core, options.server.exit_timeout)


def _core_of_several(
    options: ServeOptions, ports: Callable[[], dict[str, int]]
) -> tuple[Core, ConnectionLimits]:
    """Return the core of a server with front-end processes, and the limits on connections of this process.

    `options`: see `ServeOptions.sharing_ports`. `ports`: returns the ports that this process listens on.
    """
    number = options.connections.num_processes
    sequences, input_bytes, connections = counts = [SharedCounts.create(number) for _ in range(3)]
    descriptors = (sequences.descriptor, input_bytes.descriptor, connections.descriptor)
    core = Core(options.server, Admission(options.server.admission, (sequences, input_bytes)))

    def spawn(sock: socket.socket) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "neso.cli.front_end_process", str(sock.fileno())]
        inherited = (sock.fileno(), *descriptors)
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited)

    def setup(index: int) -> FrontEndSetup:
        return FrontEndSetup(options.with_ports(ports()), index, descriptors)

    def clear(index: int) -> None:
        for each in counts:
            each.clear(index)

    core.front_ends = FrontEnds(core, number - 1, spawn, setup, clear)
    return core, options.connections.limits(connections)


def _ports(frontends: Mapping[str, Frontend]) -> dict[str, int]:
    return {name: frontend.port for name, frontend in frontends.items()}


def _add_checkpoint(core: Core, model: ModelArgument, engine: dict[str, str]) -> None:
    from pathlib import Path

    from tritonclient.grpc.model_config_pb2 import ModelConfig

    config = ModelConfig(name=model.name, backend=_backend_of(model.checkpoint))
    for name, value in {"model": model.checkpoint, **engine}.items():
        config.parameters[name].string_value = value
    core.add_model(model.name, config, Path.cwd())


def _backend_of(checkpoint: str) -> str:
    """Return the backend of a checkpoint. A checkpoint that is not downloaded yet is assumed to be a language model."""
    from neso.engine.specs.registry import is_embedding_model

    return "embedding" if is_embedding_model(checkpoint) else "llm"


async def start_frontends(
    core: Core, options: ServeOptions, started: dict[str, Frontend], limits: ConnectionLimits
) -> None:
    """Start the frontends and add each to `started`, so that the caller can stop them after a failure."""

    async def start(name: str, frontend: Frontend) -> None:
        await frontend.start()
        started[name] = frontend

    app = None
    if options.openai is not None:
        app = await asyncio.to_thread(_openai_app, core, options)
    if options.http is not None:
        from neso.frontends.kserve.http_frontend import KServeHttp

        http = KServeHttp(core, options.http, limits)
        if app is not None:
            for path in (*OPENAI_ON_HTTP, *PAGES_ON_HTTP):
                http.mount(path, app)
            if options.openai is not None and options.openai.dashboard:
                http.serve_page(app)
        await start("http", http)
    if options.grpc is not None:
        from neso.frontends.kserve.grpc_frontend import KServeGrpc

        await start("grpc", KServeGrpc(core, options.grpc, limits))
    if options.metrics is not None:
        from neso.frontends.metrics import MetricsHttp

        await start("metrics", MetricsHttp(core, options.metrics, limits))
    if app is not None and options.openai is not None:
        await start("openai", AsgiServer(app, options.openai.server(), limits))
    if options.sagemaker is not None:
        from neso.frontends.kserve.cloud_endpoints import SageMakerHttp

        await start("sagemaker", SageMakerHttp(core, options.sagemaker, app, limits))
    if options.vertex_ai is not None:
        from neso.frontends.kserve.cloud_endpoints import VertexAiHttp

        await start("vertex-ai", VertexAiHttp(core, options.vertex_ai, app, limits))


def _openai_app(core: Core, options: ServeOptions) -> AsgiApp:
    from neso.frontends.openai import create_app

    return AsgiApp(create_app(core, options.openai))


def _failures(core: Core, options: ServeOptions) -> list[str]:
    """Return a line for each failed load of a MODEL argument, or with `exit_on_error` of any model.

    It has the reason only if standard error does not have it yet, as a line of the log.
    """
    named = {model.name for model in options.models}
    ranks = options.server.backend_config.get("llm", {})
    if "rank-model" in ranks:
        named.add(ranks["rank-model"])
        if ranks["rank-model"] not in {entry.name for entry in core.repository_index()}:
            return [
                f"there is no model '{ranks['rank-model']}' to run on the {ranks['ranks']} ranks: see --rank-model"
            ]
    logged = options.log.error and not options.log.file
    return [
        f"model '{entry.name}' could not be loaded" + ("" if logged else f": {entry.reason}")
        for entry in core.repository_index()
        if entry.state is ModelState.UNAVAILABLE and (options.server.exit_on_error or entry.name in named)
    ]


async def _wait_unless(stopping: asyncio.Event, *work: Awaitable[Any]) -> bool:
    """Wait for all of `work`; returns False if `stopping` is set first."""

    async def wait() -> None:
        await asyncio.gather(
            *work
        )  # in a task: a cancelled one is not logged, other than the future of `gather`

    task = asyncio.ensure_future(wait())
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if task.done():
        await task
    return task.done()


async def _stop(frontends: dict[str, Frontend], core: Core, timeout: float) -> None:
    """Stop within `timeout` seconds and a few more; then the process exits in any case."""
    deadline = time.monotonic() + timeout
    exit_after(timeout + EXIT_GRACE)
    grace = timeout * (1 - BACKEND_SHARE)  # the rest of the time is for the models
    stops = [frontend.stop(grace) for frontend in frontends.values()]
    if core.front_ends is not None:
        stops.append(core.front_ends.stop(grace))
    await asyncio.gather(*stops)
    await core.stop(max(0.0, deadline - time.monotonic()))


def exit_after(seconds: float) -> None:
    """End the process after `seconds`, even if code of a model blocks: Python waits for busy worker threads."""

    def exit_now() -> None:
        logger.critical("the server did not end in time: exiting")
        logging.shutdown()
        os._exit(1)

    timer = threading.Timer(seconds, exit_now)
    timer.daemon = True
    timer.start()


def _on_hangup(options: ServeOptions, core: Core) -> None:
    """Reload the API keys on SIGHUP."""
    keys = None if options.openai is None else options.openai.access.keys
    if keys is None:
        return

    def reload() -> None:
        keys.reload(force=True)
        if core.front_ends is not None:
            core.front_ends.notify("reload_keys")

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def _on_signals(first: Callable[[], None]) -> None:
    """Call `first` on the first SIGINT or SIGTERM; a second signal has its default effect."""
    loop = asyncio.get_running_loop()

    def handle() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        first()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle)


def show_ready(core: Core, ports: dict[str, int], seconds: float, dashboard: bool = False) -> None:
    """Print the models, ports, the address of the dashboard and an example request to standard output."""
    lines = [""]
    models = core.models()
    for model in models:
        lines.append(f"  model    {model.name}  (version {model.version}, {_backend_or_platform(model)})")
    for entry in core.repository_index():
        if entry.reason and entry.name not in {model.name for model in models}:
            lines.append(f"  failed   {entry.name}: {entry.reason}")
    lines += [f"  {name:<8} {port:<6} {PROTOCOLS[name]}" for name, port in ports.items()]
    lines += ["", f"Neso is ready after {seconds:.2f} s. Try:", ""]
    if dashboard and "http" in ports:
        lines.append(f"  http://localhost:{ports['http']}   dashboard and chat, in a browser")
    lines += [*_example(core, ports), ""]
    print("\n".join(lines), flush=True)


def _backend_or_platform(model: Model) -> str:
    """Return the backend, or the platform of ensembles and models whose platform selects the backend."""
    config = model.config
    return f"backend {config.backend}" if config.backend else f"platform {config.platform}"


def _example(core: Core, ports: dict[str, int]) -> list[str]:
    if "http" not in ports:
        return []
    address = f"localhost:{ports['http']}/v2"
    model = next(filter(_generates_text, core.models()), None)
    if model is None:
        return [f"  curl {address}"]
    parameters = (
        '"max_tokens": 32' if "max_tokens" in model.signature.inputs else '"parameters": {"temperature": 0}'
    )
    body = f'{{"text_input": "What is in-flight batching?", {parameters}}}'
    return [f"  curl -X POST {address}/models/{model.name}/generate -d '{body}'"]


def _generates_text(model: Model) -> bool:
    """Whether the model generates text from `text_input` and requires no other input except `max_tokens`."""
    required = {name for name, spec in model.signature.inputs.items() if not spec.optional}
    return (
        "text_input" in required <= {"text_input", "max_tokens"} and "text_output" in model.signature.outputs
    )
