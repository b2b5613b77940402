"""KServe v2 and Triton's extensions over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable

from neso.frontends.frontend_options import HttpOptions
from neso.frontends.kserve_http.errors import respond
from neso.frontends.kserve_http.generate import GenerateEndpoint
from neso.frontends.kserve_http.health import HealthEndpoints
from neso.frontends.kserve_http.infer import InferEndpoint
from neso.frontends.kserve_http.metadata import MetadataEndpoints
from neso.frontends.kserve_http.repository import RepositoryEndpoints
from neso.frontends.kserve_http.restricted import group_of, restrict
from neso.frontends.kserve_http.settings import SettingEndpoints
from neso.frontends.kserve_http.shared_memory import SharedMemoryEndpoints
from neso.frontends.kserve_http.tracing import traced
from neso.frontends.transport.http1 import (
    AsgiApp,
    Handler,
    HandlerResult,
    HttpServer,
    PendingResponse,
    Request,
    Response,
    Router,
)
from neso.frontends.transport.http1.asgi import AsgiCallable
from neso.server.core import Core
from neso.server.errors import ServerError

_MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version:digits}")
_REPOSITORY = ("/v2/repository", "/v2/repository/{repository}")


class KServeHttp:
    """Serves a core; lives on the core's event loop. Mount further applications before `start`."""

    def __init__(self, core: Core, options: HttpOptions | None = None) -> None:
        self.options = options or HttpOptions()
        self._router = Router()
        self._apps: list[AsgiApp] = []
        self._server = HttpServer(self._handle, self.options.server())
        self._route(core)

    @property
    def port(self) -> int:
        """The port listened on, which the system chose if the options say 0. Known once started."""
        return self._server.port

    @property
    def address(self) -> str:
        """host:port, for people."""
        return self._server.address

    def mount(self, prefix: str, app: AsgiCallable | AsgiApp) -> None:
        """Let an ASGI application answer below `prefix`, its paths unchanged.

        Wrap an application that is served elsewhere too in one `AsgiApp`, so that it starts up once.
        """
        wrapped = app if isinstance(app, AsgiApp) else AsgiApp(app)
        self._apps.append(wrapped)
        self._router.mount(prefix, wrapped)

    async def start(self) -> None:
        """Start the mounted applications and listen. Raises `BindError`."""
        for app in self._apps:
            await app.startup()
        try:
            await self._server.start()
        except OSError:
            await self._shutdown_apps()
            raise

    async def stop(self, grace: float = 30.0) -> None:
        """Let responses in flight end within `grace` seconds, then close."""
        await self._server.stop(grace)
        await self._shutdown_apps()

    async def _shutdown_apps(self) -> None:
        for app in self._apps:
            await app.shutdown()

    def _handle(self, request: Request) -> Response | PendingResponse | Awaitable[HandlerResult]:
        try:
            answer = self._router(request)
        except ServerError as error:
            return respond(error)
        return answer if isinstance(answer, Response | PendingResponse) else _guard(answer)

    def _add(self, method: str, pattern: str, handler: Handler) -> None:
        required = self.options.restrictions.get(group_of(pattern))
        self._router.add(method, pattern, handler if required is None else restrict(handler, required))

    def _route(self, core: Core) -> None:
        add, forwarding = self._add, self.options.header_forwarding
        health, metadata = HealthEndpoints(core), MetadataEndpoints(core)
        infer = InferEndpoint(core, self.options.max_input_size, forwarding)
        generate, repository = GenerateEndpoint(core, forwarding), RepositoryEndpoints(core)
        add("GET", "/v2", metadata.server)
        add("GET", "/v2/health/live", health.live)
        add("GET", "/v2/health/ready", health.ready)
        add("GET", "/v2/models/stats", metadata.stats)
        for model in _MODEL:
            add("GET", model, metadata.model)
            add("GET", f"{model}/ready", health.model_ready)
            add("GET", f"{model}/config", metadata.config)
            add("GET", f"{model}/stats", metadata.model_stats)
            add("POST", f"{model}/infer", traced(core, infer.__call__, infer.answer))
            for name, endpoint in (
                ("generate", generate.generate),
                ("generate_stream", generate.generate_stream),
            ):
                add("POST", f"{model}/{name}", traced(core, endpoint, endpoint))
        for prefix in _REPOSITORY:
            add("POST", f"{prefix}/index", repository.index)
            add("POST", f"{prefix}/models/{{model}}/load", repository.load)
            add("POST", f"{prefix}/models/{{model}}/unload", repository.unload)
        for method, pattern, handler in SharedMemoryEndpoints(core.shared_memory).routes():
            add(method, pattern, handler)
        settings = SettingEndpoints(core)
        for prefix in ("/v2", *_MODEL):
            add("GET", f"{prefix}/trace/setting", settings.trace)
            add("POST", f"{prefix}/trace/setting", settings.update_trace)
        add("GET", "/v2/logging", settings.log)
        add("POST", "/v2/logging", settings.update_log)


async def _guard(answer: Awaitable[HandlerResult]) -> HandlerResult:
    """An error of the core becomes its response, if none has begun."""
    try:
        return await answer
    except ServerError as error:
        return respond(error)
