"""Runs a server process: the core, its front ends, and what the terminal shows."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import uvloop

from neso.cli.options.errors import OptionError
from neso.cli.ready import show_ready
from neso.cli.serve_options import ModelArgument, ServeOptions
from neso.frontends.http import AsgiApp, AsgiServer, BindError
from neso.server.core import Core
from neso.server.errors import ServerError
from neso.server.log import configure_log
from neso.server.memory import settle_memory
from neso.server.metadata import ModelState

logger = logging.getLogger("neso")

OPENAI_ON_HTTP = ("/v1", "/health", "/metrics", "/version", "/tokenize", "/detokenize", "/score", "/rerank")
"""Paths below which the port of HTTP answers OpenAI's API too: what clients of vLLM look for on its one port."""


class FrontEnd(Protocol):
    """What every front end has."""

    @property
    def port(self) -> int: ...

    async def start(self) -> None: ...

    async def stop(self, grace: float) -> None: ...


def run(command_line: Mapping[str, list[str]]) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status. A second signal ends at once.

    `command_line` has the texts that each option was given, by its name.
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
        return uvloop.run(_serve(options, started))
    except (ServerError, BindError, ValueError) as error:
        print(f"neso: {error}", file=sys.stderr)
        return 1


async def _serve(options: ServeOptions, started: float) -> int:
    stopping = asyncio.Event()
    _on_signals(stopping.set)
    _on_hangup(options)
    core = Core(options.server)
    for model in options.models:
        _add_checkpoint(core, model, options.engine)
    # The models load in their own processes while the front ends are imported and started here.
    loading = asyncio.ensure_future(core.start())
    front_ends: dict[str, FrontEnd] = {}
    try:
        await asyncio.sleep(0)
        await _start_front_ends(core, options, front_ends)
        if not await _unless(stopping, loading):
            return 0
        failed = _failures(core, options)
        if failed:
            print("\n".join(f"neso: {reason}" for reason in failed), file=sys.stderr)
            return 1
        ports = {name: front_end.port for name, front_end in front_ends.items()}
        settle_memory()
        show_ready(core, ports, time.perf_counter() - started)
        await stopping.wait()
        logger.info("stopping: requests in flight have %.0f s to end", options.server.exit_timeout)
        return 0
    finally:
        loading.cancel()
        await _stop(front_ends, core, options.server.exit_timeout)


def _add_checkpoint(core: Core, model: ModelArgument, engine: dict[str, str]) -> None:
    from pathlib import Path

    from tritonclient.grpc.model_config_pb2 import ModelConfig

    config = ModelConfig(name=model.name, backend=_backend_of(model.checkpoint))
    for name, value in {"model": model.checkpoint, **engine}.items():
        config.parameters[name].string_value = value
    core.add_model(model.name, config, Path.cwd())


def _backend_of(checkpoint: str) -> str:
    """The backend of a checkpoint; one that is not on this machine yet counts as a language model."""
    from neso.engine.specs.registry import is_embedding_model

    return "embedding" if is_embedding_model(checkpoint) else "llm"


async def _start_front_ends(core: Core, options: ServeOptions, started: dict[str, FrontEnd]) -> None:
    """Fill `started`, so that what has started is known even if the next one fails."""

    async def start(name: str, front_end: FrontEnd) -> None:
        await front_end.start()
        started[name] = front_end

    app = None
    if options.openai is not None:
        app = await asyncio.to_thread(_openai_app, core, options)
    if options.http is not None:
        from neso.frontends.kserve_http import KServeHttp

        http = KServeHttp(core, options.http)
        if app is not None:
            for path in OPENAI_ON_HTTP:
                http.mount(path, app)
        await start("http", http)
    if options.grpc is not None:
        from neso.frontends.kserve_grpc import KServeGrpc

        await start("grpc", KServeGrpc(core, options.grpc))
    if options.metrics is not None:
        from neso.frontends.metrics import MetricsHttp

        await start("metrics", MetricsHttp(core, options.metrics))
    if app is not None:
        await start("openai", AsgiServer(app, options.openai_http))


def _openai_app(core: Core, options: ServeOptions) -> AsgiApp:
    from neso.frontends.openai import create_app

    return AsgiApp(create_app(core, options.openai))


def _failures(core: Core, options: ServeOptions) -> list[str]:
    """Why the server must not go on: a MODEL of the command line that failed or, if so asked, any."""
    named = {model.name for model in options.models}
    return [
        f"model '{entry.name}' could not be loaded: {entry.reason}"
        for entry in core.repository_index()
        if entry.state is ModelState.UNAVAILABLE and (options.server.exit_on_error or entry.name in named)
    ]


async def _unless(stopping: asyncio.Event, work: Awaitable[None]) -> bool:
    """Wait for `work`; False if a signal came first."""
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if task.done():
        await task
    return task.done()


async def _stop(front_ends: dict[str, FrontEnd], core: Core, timeout: float) -> None:
    await asyncio.gather(*(front_end.stop(timeout) for front_end in front_ends.values()))
    await core.stop()


def _on_hangup(options: ServeOptions) -> None:
    """SIGHUP reads the API keys again, where there are any."""
    keys = None if options.openai is None else options.openai.access.keys
    if keys is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: keys.reload(force=True))


def _on_signals(first: Callable[[], None]) -> None:
    """Call `first` at the first SIGINT or SIGTERM; the second has its usual effect."""
    loop = asyncio.get_running_loop()

    def handle() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        first()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle)
