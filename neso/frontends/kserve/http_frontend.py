"""HTTP frontend: routes, restricted APIs and mounted applications."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterator
from typing import NamedTuple

from neso.frontends.frontend_options import HttpOptions
from neso.frontends.kserve.generate import GenerateEndpoint
from neso.frontends.kserve.http_handlers import HttpHandlers, reject_unnamed_region
from neso.frontends.kserve.http_infer import InferEndpoint, error_to_response, traced
from neso.frontends.kserve.request_limits import RequestLimits
from neso.frontends.kserve.service import KServeService
from neso.frontends.security import CROSS_SITE, RequiredHeader, is_cross_site
from neso.frontends.transport.http1 import (
    AsgiApp,
    Handler,
    HandlerResult,
    HttpServer,
    PendingResponse,
    Request,
    Response,
    Router,
    error_response,
)
from neso.frontends.transport.http1.asgi import AsgiCallable
from neso.frontends.transport.tcp import ConnectionLimits
from neso.server.core import Core
from neso.server.errors import ServerError

logger = logging.getLogger(__name__)

_MODEL_PREFIXES = ("/v2/models/{model}", "/v2/models/{model}/versions/{version:digits}")
_REPOSITORY_PREFIXES = ("/v2/repository", "/v2/repository/{repository}")
_CONTROL_GROUPS = ("model-repository", "shared-memory", "trace", "logging")
"""API groups whose POST operations change the server. They refuse requests of other sites' pages."""
_RESPONSES = (Response, PendingResponse)


class Route(NamedTuple):
    """`group`: API group for access restrictions."""

    method: str
    pattern: str
    group: str
    handler: Handler


def routes(service: KServeService, max_input_size: int, limits: RequestLimits) -> Iterator[Route]:
    """Yield all routes. `max_input_size`: see `InferEndpoint`."""
    handlers = HttpHandlers(service)
    infer, generate = InferEndpoint(service, max_input_size, limits), GenerateEndpoint(service)
    yield Route("GET", "/v2", "metadata", handlers.server_metadata)
    yield Route("GET", "/v2/health/live", "health", handlers.live)
    yield Route("GET", "/v2/health/ready", "health", handlers.ready)
    yield Route("GET", "/v2/models/stats", "statistics", handlers.statistics)
    for model in _MODEL_PREFIXES:
        yield Route("GET", model, "metadata", handlers.model_metadata)
        yield Route("GET", f"{model}/ready", "health", handlers.model_ready)
        yield Route("GET", f"{model}/config", "model-config", handlers.model_config)
        yield Route("GET", f"{model}/stats", "statistics", handlers.model_statistics)
        for name, endpoint, async_endpoint in (
            ("infer", infer.infer, infer.infer_async),
            ("generate", generate.generate, generate.generate),
            ("generate_stream", generate.generate_stream, generate.generate_stream),
        ):
            yield Route("POST", f"{model}/{name}", "inference", traced(service, endpoint, async_endpoint))
    for prefix in _REPOSITORY_PREFIXES:
        model = f"{prefix}/models/{{model}}"
        yield Route("POST", f"{prefix}/index", "model-repository", handlers.repository_index)
        yield Route("POST", f"{model}/load", "model-repository", handlers.load_model)
        yield Route("POST", f"{model}/unload", "model-repository", handlers.unload_model)
    for kind, status, register, unregister in (
        (
            "system",
            handlers.system_shared_memory_status,
            handlers.register_system_shared_memory,
            handlers.unregister_system_shared_memory,
        ),
        (
            "cuda",
            handlers.cuda_shared_memory_status,
            handlers.register_cuda_shared_memory,
            handlers.unregister_cuda_shared_memory,
        ),
    ):
        all_regions, region = f"/v2/{kind}sharedmemory", f"/v2/{kind}sharedmemory/region/{{region}}"
        yield Route("POST", f"{region}/register", "shared-memory", register)
        yield Route("POST", f"{all_regions}/register", "shared-memory", reject_unnamed_region(kind))
        for prefix in (all_regions, region):
            yield Route("GET", f"{prefix}/status", "shared-memory", status)
            yield Route("POST", f"{prefix}/unregister", "shared-memory", unregister)
    for prefix in ("/v2", *_MODEL_PREFIXES):
        yield Route("GET", f"{prefix}/trace/setting", "trace", handlers.trace_settings)
        yield Route("POST", f"{prefix}/trace/setting", "trace", handlers.update_trace_settings)
    yield Route("GET", "/v2/logging", "logging", handlers.log_settings)
    yield Route("POST", "/v2/logging", "logging", handlers.update_log_settings)


class HttpFrontend:
    """Serves the routes of a router over HTTP, on the core's event loop. Errors of the server become responses.

    Mount or share applications before `start`.
    """

    def __init__(self, options: HttpOptions, limits: ConnectionLimits | None) -> None:
        self._apps: list[AsgiApp] = []
        self._server = HttpServer(self._handle, options.server(), limits)
        self._router = Router()

    @property
    def port(self) -> int:
        """The port listened on; the configured one before `start`."""
        return self._server.port

    @property
    def address(self) -> str:
        """`host:port`, with an IPv6 host in brackets."""
        return self._server.address

    def share(self, app: AsgiApp) -> None:
        """Start and stop an application, which may also be served elsewhere, together with this frontend."""
        self._apps.append(app)

    async def start(self) -> None:
        """Start the applications and listen. Raises `BindError`."""
        for app in self._apps:
            await app.startup()
        try:
            await self._server.start()
        except OSError:
            await self._shutdown_apps()
            raise

    async def stop(self, grace: float = 30.0) -> None:
        """Wait up to `grace` seconds for requests in flight, then close."""
        await self._server.stop(grace)
        await self._shutdown_apps()

    async def _shutdown_apps(self) -> None:
        for app in self._apps:
            await app.shutdown()

    def _handle(self, request: Request) -> Response | PendingResponse | Awaitable[HandlerResult]:
        if logger.isEnabledFor(logging.DEBUG):
            # Not the decoded path: it can contain line breaks.
            logger.debug("HTTP request: %s %s", request.method, request.raw_path.decode("latin-1"))
        try:
            result = self._router(request)
        except ServerError as error:
            return error_to_response(error)
        return result if isinstance(result, _RESPONSES) else _catch_server_error(result)


class KServeHttp(HttpFrontend):
    """Serves a core over HTTP, and the applications mounted on its port."""

    def __init__(
        self, core: Core, options: HttpOptions | None = None, limits: ConnectionLimits | None = None
    ) -> None:
        self.options = options = options or HttpOptions()
        super().__init__(options, limits)
        service = KServeService(core, options.header_forwarding)
        for route in routes(service, options.max_input_size, options.request_limits):
            required = options.restrictions.get(route.group)
            handler = route.handler if required is None else restrict(route.handler, required)
            if route.method == "POST" and route.group in _CONTROL_GROUPS:
                handler = refuse_cross_site(handler)
            self._router.add(route.method, route.pattern, handler)

    def serve_page(self, app: AsgiApp) -> None:
        """Serve `/` by an application that is also mounted, without the paths below it."""
        self._router.add("GET", "/", app)

    def mount(self, prefix: str, app: AsgiCallable | AsgiApp) -> None:
        """Serve an ASGI application at and below `prefix`; paths are not rewritten.

        An application that is also served elsewhere must be wrapped in one `AsgiApp`, so that it starts up once.
        """
        wrapped = app if isinstance(app, AsgiApp) else AsgiApp(app)
        self.share(wrapped)
        self._router.mount(prefix, wrapped)


async def _catch_server_error(result: Awaitable[HandlerResult]) -> HandlerResult:
    try:
        return await result
    except ServerError as error:
        return error_to_response(error)


def refuse_cross_site(handler: Handler) -> Handler:
    """Wrap a handler so that requests that browsers send for pages of other origins get status 403."""

    def same_site(request: Request) -> Response | PendingResponse | Awaitable[HandlerResult]:
        if is_cross_site(request.header):
            return error_response(403, CROSS_SITE)
        return handler(request)

    return same_site


def restrict(handler: Handler, required: RequiredHeader) -> Handler:
    """Wrap a handler so that requests without the header get status 403."""
    name = required.name.encode()
    message = f"This API is restricted, expecting header '{required.name}'"

    def restricted(request: Request) -> Response | PendingResponse | Awaitable[HandlerResult]:
        if not required.matches(request.headers.get(name)):
            return error_response(403, message)
        return handler(request)

    return restricted
