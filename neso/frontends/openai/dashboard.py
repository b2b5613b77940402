"""The web page at `/` and the files of `neso/frontends/web`: the dashboard, and the API documentation at `/docs`.

The page uses the public API, and three operations of its own: `/dashboard/state`, `/dashboard/metrics` and
`/dashboard/models/{model}`. They are not part of the OpenAPI document.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

import neso
from neso.frontends.openai.access.api_keys import request_key
from neso.frontends.openai.access.middleware import restrict
from neso.frontends.openai.model_resolver import ModelResolver
from neso.frontends.openai.routing import TEXT, RequestContext, operation, routes_of
from neso.frontends.openai_options import OpenAIOptions
from neso.generation import SupportsImages
from neso.server.config.model_config import config_to_dict
from neso.server.metrics.registry import CONTENT_TYPE

if TYPE_CHECKING:
    from neso.server.core import Core
    from neso.server.model import Model

WEB = Path(__file__).parents[1] / "web"
"""Directory of the files that are served below `/static`."""
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Headers of pages and their files. `no-cache`: browsers ask whether the ETag has changed."""
DOCS_HEADERS = {
    **PAGE_HEADERS,
    # Swagger UI assigns HTML of its own icons and writes style attributes.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
_TAG = "Dashboard"
_GROUPS = {
    "/dashboard/state": ("model-repository",),
    "/dashboard/metrics": ("metrics", "statistics"),
    "/dashboard/models/{model:path}": ("model-repository", "model-config", "statistics"),
}
"""Restricted groups of the page's operations."""


class DashboardApi:
    """The operations of the page."""

    def __init__(self, core: Core, resolver: ModelResolver, options: OpenAIOptions) -> None:
        self._core = core
        self._resolver = resolver
        self._options = options

    @operation("GET", "/dashboard/state", tag=_TAG, group="model-repository", open_group="dashboard")
    async def state(self, context: RequestContext) -> dict[str, Any]:
        """Get the state of the server and of its models.

        Without one of the required keys, reasons of failures are left out: they contain paths.
        """
        keys = self._options.access.keys is not None
        authorized = not keys or request_key(context.scope) is not None
        loaded = {(model.name, str(model.version)): model for model in self._core.models()}
        models = []
        for entry in await self._core.list_repository():
            state = "" if entry.state is None else entry.state.value
            model: dict[str, Any] = {"name": entry.name, "version": entry.version, "state": state}
            model["reason"] = entry.reason if authorized else ""
            found = loaded.get((entry.name, entry.version))
            models.append(model if found is None else model | self._capabilities(found))
        return {
            "version": neso.__version__,
            "ready": self._core.ready(),
            "control": self._core.options.model_control_mode.value,
            "metrics": self._options.metrics,
            "keys": keys,
            "authorized": authorized,
            "models": models,
        }

    @operation("GET", "/dashboard/metrics", tag=_TAG, response=TEXT, group="metrics", open_group="dashboard")
    async def metrics(self, context: RequestContext) -> Response:
        """Get the metrics in Prometheus format."""
        return Response(await self._core.render_metrics(), headers={"content-type": CONTENT_TYPE})

    @operation("GET", "/dashboard/models/{model:path}", tag=_TAG, group="model-config")
    async def model(self, context: RequestContext) -> dict[str, Any]:
        """Get the configuration and the statistics of a loaded model."""
        name = context.path_params["model"]
        config = config_to_dict(self._resolver.find_model(name).config)
        return {"config": config, "statistics": await self._core.model_statistics(name)}

    def _capabilities(self, model: Model) -> dict[str, Any]:
        """Return what the page needs to know about a loaded model. `images`: null if unknown."""
        language_model = model.language_model
        chat = language_model is not None and language_model.text.has_chat_template
        pooling = model.pooling_model is not None and model.pooling_model.pooling is not None
        completes = language_model is not None or (not pooling and model in self._resolver.text_models())
        images = language_model.accepts_images if isinstance(language_model, SupportsImages) else None
        return {
            "backend": model.config.backend or model.config.platform,
            "chat": chat,
            "completions": completes,
            "embeddings": pooling,
            "images": images,
            "max_model_len": self._resolver.max_model_len(model),
            "in_flight": model.in_flight_count,
        }


def page_routes(core: Core, resolver: ModelResolver, options: OpenAIOptions) -> list[Route]:
    """Return the routes of the page, if `options.dashboard`, and of the files of all pages."""
    routes = [Route("/static/{path:path}", _static_file)]
    if not options.dashboard:
        return routes

    async def page(request: Request) -> Response:
        return _respond(request, "dashboard/index.html", PAGE_HEADERS)

    routes.append(Route("/", page))
    for declared, route in routes_of(DashboardApi(core, resolver, options), core, options):
        if declared.group == "metrics" and not options.metrics:
            continue
        for group in _GROUPS[route.path]:
            restrict([route], group, options)
        routes.append(route)
    return routes


async def docs(request: Request) -> Response:
    """Send the page of the API documentation."""
    return _respond(request, "docs/index.html", DOCS_HEADERS)


async def redoc(request: Request) -> Response:
    """Redirect to the API documentation."""
    return RedirectResponse("docs")


async def _static_file(request: Request) -> Response:
    return _respond(request, request.path_params["path"], PAGE_HEADERS)


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


@cache
def _names() -> frozenset[str]:
    """Return the names of the files that are served, relative to `WEB`."""
    return frozenset(path.relative_to(WEB).as_posix() for path in WEB.rglob("*") if path.suffix in _TYPES)


@cache
def _read(name: str) -> _File:
    content = (WEB / name).read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _File(content, _TYPES[Path(name).suffix], etag)


def _respond(request: Request, name: str, headers: dict[str, str]) -> Response:
    """Send a file, or 304 if the browser has it. Only names of existing files are ever opened."""
    if name not in _names():
        return Response("Not Found", 404, media_type="text/plain")
    file = _read(name)
    headers = {**headers, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
