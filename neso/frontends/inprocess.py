"""The front ends for an in-process server: objects that any thread starts and stops."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from neso.frontends.frontend_options import GrpcOptions, HttpOptions, MetricsOptions
from neso.frontends.kserve.grpc_frontend import KServeGrpc as GrpcFrontEnd
from neso.frontends.kserve.http_frontend import KServeHttp as HttpFrontEnd
from neso.frontends.metrics import MetricsHttp
from neso.server.core import Core
from neso.server.errors import AlreadyExists, Unavailable
from neso.server.inprocess import Server

Options = TypeVar("Options")
Self = TypeVar("Self", bound="InProcessFrontEnd[Any]")


class AsyncFrontEnd(Protocol):
    """A front end as it lives on the core's event loop."""

    @property
    def port(self) -> int: ...

    async def start(self) -> None: ...

    async def stop(self, grace: float) -> None: ...


class InProcessFrontEnd(Generic[Options]):
    """Serves an in-process server's models to clients; a context manager that starts and stops it.

    May be started again once it was stopped. The server stops it with itself, before the models are unloaded.
    """

    def __init__(self, server: Server, options: Options | None = None) -> None:
        self._server = server
        self._options = options
        self._front_end: AsyncFrontEnd | None = None

    @property
    def port(self) -> int:
        """The port that it listens on. Raises `Unavailable` while it does not."""
        if self._front_end is None:
            raise Unavailable("the front end has not been started")
        return self._front_end.port

    def start(self: Self) -> Self:
        """Listen. Raises `BindError` or `Unavailable`, `AlreadyExists` if it listens already."""
        if self._front_end is not None:
            raise AlreadyExists("the front end has been started already")
        front_end = self._make(self._server.running_core(), self._options)
        self._server.wait_for(self._begin(front_end))
        self._front_end = front_end
        return self

    def stop(self, grace: float | None = None) -> None:
        """Let requests in flight end within `grace` seconds (the server's `exit_timeout`), then close. Idempotent."""
        front_end, self._front_end = self._front_end, None
        if front_end is None:
            return
        if grace is None:
            grace = self._server.options.exit_timeout
        try:
            self._server.wait_for(self._end(front_end, grace))
        except Unavailable:
            return  # the server has stopped, and this with it

    def __enter__(self: Self) -> Self:
        return self if self._front_end is not None else self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    async def _begin(self, front_end: AsyncFrontEnd) -> None:
        await front_end.start()
        self._server.attach(front_end)

    async def _end(self, front_end: AsyncFrontEnd, grace: float) -> None:
        self._server.detach(front_end)
        await front_end.stop(grace)

    def _make(self, core: Core, options: Options | None) -> AsyncFrontEnd:
        raise NotImplementedError


class KServeHttp(InProcessFrontEnd[HttpOptions]):
    """KServe v2 and Triton's extensions over HTTP, by default on port 8000."""

    Options = HttpOptions

    def _make(self, core: Core, options: HttpOptions | None) -> AsyncFrontEnd:
        return HttpFrontEnd(core, options)


class KServeGrpc(InProcessFrontEnd[GrpcOptions]):
    """The same over gRPC, by default on port 8001."""

    Options = GrpcOptions

    def _make(self, core: Core, options: GrpcOptions | None) -> AsyncFrontEnd:
        return GrpcFrontEnd(core, options)


class Metrics(InProcessFrontEnd[MetricsOptions]):
    """Prometheus metrics over HTTP, by default on port 8002."""

    Options = MetricsOptions

    def _make(self, core: Core, options: MetricsOptions | None) -> AsyncFrontEnd:
        return MetricsHttp(core, options)
