"""Frontends of an in-process server (`neso.KServeHttp` and others), with thread-safe start and stop."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from neso.frontends import Frontend
from neso.frontends.frontend_options import GrpcOptions, HttpOptions, MetricsOptions
from neso.frontends.kserve.grpc_frontend import KServeGrpc as GrpcFrontend
from neso.frontends.kserve.http_frontend import KServeHttp as HttpFrontend
from neso.frontends.metrics import MetricsHttp
from neso.server.core import Core
from neso.server.errors import AlreadyExists, Unavailable
from neso.server.inprocess import Server

Options = TypeVar("Options")
Self = TypeVar("Self", bound="InProcessFrontend[Any]")


class InProcessFrontend(Generic[Options]):
    """Serves the models of an in-process server to clients. As a context manager, starts and stops the frontend.

    Can be restarted. The server stops it before it unloads the models.
    """

    def __init__(self, server: Server, options: Options | None = None) -> None:
        self._server = server
        self._options = options
        self._frontend: Frontend | None = None

    @property
    def port(self) -> int:
        """The port listened on. Raises `Unavailable` while the frontend is not running."""
        if self._frontend is None:
            raise Unavailable("the frontend has not been started")
        return self._frontend.port

    def start(self: Self) -> Self:
        """Start listening. Raises `BindError`, `Unavailable`, or `AlreadyExists` if the frontend is running."""
        if self._frontend is not None:
            raise AlreadyExists("the frontend has been started already")
        frontend = self._make(self._server.running_core(), self._options)
        self._server.wait_for(self._begin(frontend))
        self._frontend = frontend
        return self

    def stop(self, grace: float | None = None) -> None:
        """Wait up to `grace` seconds (default `exit_timeout`) for requests in flight, then close. Idempotent."""
        frontend, self._frontend = self._frontend, None
        if frontend is None:
            return
        if grace is None:
            grace = self._server.options.exit_timeout
        try:
            self._server.wait_for(self._end(frontend, grace))
        except Unavailable:
            return  # already stopped with the server

    def __enter__(self: Self) -> Self:
        return self if self._frontend is not None else self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    async def _begin(self, frontend: Frontend) -> None:
        await frontend.start()
        self._server.attach(frontend)

    async def _end(self, frontend: Frontend, grace: float) -> None:
        self._server.detach(frontend)
        await frontend.stop(grace)

    def _make(self, core: Core, options: Options | None) -> Frontend:
        raise NotImplementedError


class KServeHttp(InProcessFrontend[HttpOptions]):
    """KServe v2 and Triton's extensions over HTTP, by default on port 8000."""

    Options = HttpOptions

    def _make(self, core: Core, options: HttpOptions | None) -> Frontend:
        return HttpFrontend(core, options)


class KServeGrpc(InProcessFrontend[GrpcOptions]):
    """KServe v2 and Triton's extensions over gRPC, by default on port 8001."""

    Options = GrpcOptions

    def _make(self, core: Core, options: GrpcOptions | None) -> Frontend:
        return GrpcFrontend(core, options)


class Metrics(InProcessFrontend[MetricsOptions]):
    """Prometheus metrics over HTTP, by default on port 8002."""

    Options = MetricsOptions

    def _make(self, core: Core, options: MetricsOptions | None) -> Frontend:
        return MetricsHttp(core, options)
