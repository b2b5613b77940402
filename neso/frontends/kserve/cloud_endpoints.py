"""HTTP endpoints that clouds request of a model container: Amazon SageMaker and Google Vertex AI.

Both pass a client's body and content type on, but not its other headers. The length of the JSON before binary tensors,
which KServe has in a header, is therefore a part of the content type.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from neso.frontends.cloud_options import SageMakerOptions, VertexAiOptions
from neso.frontends.kserve.http_codec import HEADER_LENGTH, HEADER_LENGTH_FIELD
from neso.frontends.kserve.http_frontend import HttpFrontend, restrict, routes
from neso.frontends.kserve.http_infer import InferEndpoint, error_to_response, traced
from neso.frontends.kserve.http_json import read_object, read_string
from neso.frontends.kserve.service import KServeService
from neso.frontends.transport.http1 import (
    AsgiApp,
    Handler,
    HandlerResult,
    PendingResponse,
    Request,
    Response,
    Router,
    error_response,
    json_response,
)
from neso.frontends.transport.tcp import ConnectionLimits
from neso.server.config.model_config import CONFIG_FILENAME, read_config
from neso.server.core import Core
from neso.server.errors import AlreadyExists, InvalidArgument, NotFound, ServerError
from neso.server.metrics.registry import CONTENT_TYPE

Result = Response | PendingResponse | Awaitable[HandlerResult]

_OPENAI_PATHS = {
    "chat_completions": b"/v1/chat/completions",
    "completions": b"/v1/completions",
    "embeddings": b"/v1/embeddings",
}
_OUT_OF_MEMORY = ("out of memory", "memoryerror", "outofmemory", "cannot allocate", "no space left on device")


class CloudInfer:
    """KServe inference whose content type has the length of the JSON: `TYPE;json-header-size=N`.

    `content_type`: TYPE. `in_response`: responses with binary tensors have this content type as well.
    """

    def __init__(self, infer: InferEndpoint, content_type: str, *, in_response: bool) -> None:
        self._infer = infer
        self._prefix = f"{content_type};json-header-size="
        self._in_response = in_response

    async def __call__(self, request: Request) -> Response:
        """Infer with the model of `request.params`. Raises `ServerError`."""
        given = request.header("content-type") or ""
        if self._prefix in given:
            if not given.startswith(self._prefix):
                raise InvalidArgument(
                    f"expect MIME type for binary data starts with '{self._prefix}', got: {given}"
                )
            request.headers[HEADER_LENGTH_FIELD] = given.removeprefix(self._prefix).encode("latin-1")
        response = await self._infer.infer_async(request)
        length = dict(response.headers).get(HEADER_LENGTH)
        if self._in_response and length is not None:
            response.content_type = f"{self._prefix}{length}"
        return response


class CloudFrontend(HttpFrontend):
    """What both clouds share: a default model, and the operations that its requests can have.

    `openai`: application of the OpenAI API, None if it is not served.
    """

    CONTENT_TYPE: ClassVar[str]
    CONTENT_TYPE_IN_RESPONSE: ClassVar[bool]
    """See `CloudInfer`."""

    def __init__(
        self,
        core: Core,
        options: SageMakerOptions | VertexAiOptions,
        openai: AsgiApp | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        assert options.port is not None, "with_environment sets the port"
        self.http = replace(options.http, port=options.port, reuse_port=False, tls=None)
        super().__init__(self.http, limits)
        self._core = core
        self._default_model = options.default_model
        self._openai = openai
        if openai is not None:
            self.share(openai)
        self._service = service = KServeService(core)
        self._routes = tuple(routes(service, self.http.max_input_size, self.http.request_limits))
        self._operations: dict[str, Handler] = {}
        for route in self._routes:
            if route.pattern.startswith("/v2/models/{model}/generate"):
                self._operations[route.pattern.rsplit("/", 1)[1]] = self.restricted(
                    route.group, route.handler
                )
        endpoint = CloudInfer(
            InferEndpoint(service, self.http.max_input_size, self.http.request_limits),
            self.CONTENT_TYPE,
            in_response=self.CONTENT_TYPE_IN_RESPONSE,
        )
        self._operations["infer"] = self.restricted("inference", traced(service, endpoint, endpoint))

    def restricted(self, group: str, handler: Handler) -> Handler:
        """Return the handler of an API group, which requires the group's header if it is restricted."""
        required = self.http.restrictions.get(group)
        return handler if required is None else restrict(handler, required)

    def run(self, request: Request, operation: str, model: str) -> Result:
        """Run an operation of `INFERENCE_TYPES`; those of the OpenAI API name their model in the body."""
        path = _OPENAI_PATHS.get(operation)
        if path is None:
            request.params = {"model": model or self._only_model()}
            return self._operations[operation](request)
        if self._openai is None:
            return error_response(400, f"{operation} needs the OpenAI API: --allow-openai=true")
        request.raw_path = path
        return self._openai(request)

    def _only_model(self) -> str:
        if self._default_model:
            return self._default_model
        names = {model.name for model in self._core.models()}
        if len(names) != 1:
            raise InvalidArgument(f"there is no default model, and {len(names)} models are loaded")
        return names.pop()


class SageMakerHttp(CloudFrontend):
    """Endpoints of a SageMaker container, https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html.

    - GET /ping: 200 if the server is ready, or live
    - POST /invocations: inference with the default model, see `SageMakerOptions.inference_type`
    - /models: the contract of multi-model endpoints: list, load, get, invoke and unload
    """

    CONTENT_TYPE = "application/vnd.sagemaker-triton.binary+json"
    CONTENT_TYPE_IN_RESPONSE = True

    def __init__(
        self,
        core: Core,
        options: SageMakerOptions,
        openai: AsgiApp | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        super().__init__(core, options, openai, limits)
        self._options = options
        self._loaded: dict[str, tuple[str, Path]] = {}
        """Name of the model and its repository, by SageMaker's name."""
        self._loads = asyncio.Lock()
        for method, path, group, handler in (
            ("GET", "/ping", "health", self._ping),
            ("GET", "/models", "model-repository", self._list),
            ("POST", "/models", "model-repository", self._load),
            ("GET", "/models/{name}", "model-repository", self._get),
            ("DELETE", "/models/{name}", "model-repository", self._unload),
        ):
            self._router.add(method, path, self.restricted(group, handler))
        self._router.add(
            "POST", "/invocations", lambda request: self.run(request, options.inference_type, "")
        )
        self._router.add("POST", "/models/{name}/invoke", self._invoke)

    def _ping(self, request: Request) -> Response:
        live_only = self._options.ping_mode == "live"
        healthy = self._service.live() if live_only else self._service.ready()
        return Response(status=200 if healthy else 400)

    async def _invoke(self, request: Request) -> HandlerResult:
        model, _ = self._find(request)
        try:
            result = self.run(request, self._options.inference_type, model)
            assert not isinstance(result, PendingResponse), "CloudInfer and generate are coroutines"
            return result if isinstance(result, Response) else await result
        except ServerError as error:
            return sagemaker_error(error)

    def _list(self, request: Request) -> Response:
        ready = [name for name, (model, _) in self._loaded.items() if self._core.model_ready(model)]
        return json_response({"models": [self._entry(name) for name in ready]})

    def _get(self, request: Request) -> Response:
        self._find(request)
        return json_response(self._entry(request.params["name"]))

    def _entry(self, name: str) -> dict[str, str]:
        return {"modelName": name, "modelUrl": str(self._loaded[name][1])}

    async def _load(self, request: Request) -> Response:
        body = read_object(request.body)
        name, url = (read_string(key, body.get(key)) for key in ("model_name", "url"))
        target = request.header("x-amzn-sagemaker-target-model") or name
        async with self._loads:
            try:
                repository, folder = await asyncio.to_thread(self._locate, url)
                await self._core.register_repository(repository, {target: folder})
                try:
                    await self._core.load_model(target)
                except ServerError:
                    await self._core.unregister_repository(repository)
                    raise
            except ServerError as error:
                return sagemaker_error(error)
            self._loaded[name] = target, repository
        return Response()

    async def _unload(self, request: Request) -> Response:
        async with self._loads:
            model, repository = self._find(request)
            await self._core.unload_model(model, unload_dependents=True)
            await self._core.unregister_repository(repository)
            del self._loaded[request.params["name"]]
        return Response()

    def _find(self, request: Request) -> tuple[str, Path]:
        """Return the name of a loaded model and its repository. Raises `NotFound`."""
        name = request.params["name"]
        found = self._loaded.get(name)
        if found is None:
            raise NotFound(f"model '{name}' is not loaded")
        return found

    def _locate(self, url: str) -> tuple[Path, str]:
        """Return the repository and the folder of the model at `url`: `models_directory/HASH/model[/FOLDER]`.

        A folder with several models has an ensemble, which is loaded with its steps. Raises `InvalidArgument`.
        """
        root = self._options.models_directory
        path = Path(url)
        inside = (
            path.is_absolute() and path.is_relative_to(root) and path.resolve().is_relative_to(root.resolve())
        )
        parts = path.relative_to(root).parts if inside else ()
        if ".." in parts or len(parts) not in (2, 3) or parts[1] != "model":
            raise InvalidArgument(
                f"invalid url '{url}': expected {root}/HASH/model or {root}/HASH/model/FOLDER"
            )
        if not path.is_dir():
            raise InvalidArgument(f"invalid url '{url}': there is no such folder")
        if (path / CONFIG_FILENAME).is_file():
            return path.parent, path.name
        folders = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
        ensembles = [name for name in folders if _is_ensemble(path / name)]
        found = ensembles or folders
        if len(found) != 1:
            raise InvalidArgument(f"'{url}': expected one model or one ensemble, found {len(found)}")
        return path, found[0]


class VertexAiHttp(CloudFrontend):
    """Endpoints of a Vertex AI container, https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements.

    - GET on the health route: 200 if the server is ready
    - POST on the prediction route: inference with the default model, or the operation that the header
      X-Vertex-Ai-Triton-Redirect names by its path, such as v2/models/NAME/infer. Operations that change the server
      are rejected.
    """

    REDIRECT = b"x-vertex-ai-triton-redirect"

    CONTENT_TYPE = "application/vnd.vertex-ai-triton.binary+json"
    CONTENT_TYPE_IN_RESPONSE = False

    def __init__(
        self,
        core: Core,
        options: VertexAiOptions,
        openai: AsgiApp | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        super().__init__(core, options, openai, limits)
        self._redirects = self._make_redirects()
        self._router.add("GET", options.health_route, self.restricted("health", self._health))
        self._router.add("POST", options.predict_route, self._predict)

    def _make_redirects(self) -> Router:
        """Return a router of the operations that a POST can be redirected to."""
        redirects = Router()
        allowed = []
        for route in routes(self._service, self.http.max_input_size, self.http.request_limits):
            if route.pattern.endswith("/infer"):
                allowed.append((route.pattern, self._operations["infer"]))
            elif (
                route.group == "inference"
                or route.pattern.endswith("/index")
                or (route.method == "GET" and route.group not in ("trace", "logging"))
            ):
                allowed.append((route.pattern, self.restricted(route.group, route.handler)))
            else:
                redirects.add("POST", route.pattern, _forbidden)
        for pattern, handler in allowed:
            redirects.add("POST", pattern, handler)
        redirects.add("POST", "/metrics", self._metrics)
        if self._openai is not None:
            for path in _OPENAI_PATHS.values():
                redirects.add("POST", path.decode(), self._openai)
        return redirects

    def _health(self, request: Request) -> Response:
        return Response(status=200 if self._service.ready() else 400)

    def _predict(self, request: Request) -> Result:
        path = request.headers.get(self.REDIRECT)
        if path is None:
            return self.run(request, "infer", "")
        request.raw_path = b"/" + path.removeprefix(b"/")
        return self._redirects(request)

    async def _metrics(self, request: Request) -> Response:
        return Response(await self._core.render_metrics(), 200, CONTENT_TYPE)


def _forbidden(request: Request) -> Response:
    return error_response(
        403, "requests of Vertex AI cannot be redirected to operations that change the server"
    )


def sagemaker_error(error: ServerError) -> Response:
    """Return an error with the status that SageMaker expects: 409 if the model exists, 507 if memory is short."""
    if isinstance(error, AlreadyExists):
        return error_response(409, error.message)
    if any(text in error.message.lower() for text in _OUT_OF_MEMORY):
        return error_response(507, error.message)
    return error_to_response(error)


def _is_ensemble(folder: Path) -> bool:
    try:
        config: Any = read_config(folder)
    except ServerError:
        return False  # reported when the model is loaded
    return config is not None and (config.platform == "ensemble" or config.HasField("ensemble_scheduling"))
