"""The ASGI application of the OpenAI API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from neso.frontends.openai.access.middleware import (
    add_middleware,
    limit_rates,
    refuse_cross_site,
    restrict,
)
from neso.frontends.openai.chat.chat_completions import ChatCompletionsApi
from neso.frontends.openai.chat.image_fetcher import ImageFetcher
from neso.frontends.openai.completions import CompletionsApi
from neso.frontends.openai.dashboard import docs, page_routes, redoc
from neso.frontends.openai.errors import ApiError
from neso.frontends.openai.health import HealthApi
from neso.frontends.openai.main_process import share_routes
from neso.frontends.openai.model_resolver import ModelResolver
from neso.frontends.openai.models_api import LoraAdaptersApi, ModelControlApi, ModelsApi
from neso.frontends.openai.pooling import PoolingApi
from neso.frontends.openai.responses.api import ResponsesApi
from neso.frontends.openai.routing import error_response, routes_of
from neso.frontends.openai.tokenization import TokenizationApi
from neso.frontends.openai_options import OpenAIOptions

if TYPE_CHECKING:
    from neso.server.core import Core

RESOURCES = (
    ChatCompletionsApi,
    CompletionsApi,
    ResponsesApi,
    PoolingApi,
    TokenizationApi,
    ModelControlApi,
    ModelsApi,
    LoraAdaptersApi,
    HealthApi,
)
"""Classes that define the operations of the API, in the order of the OpenAPI document."""
STATEFUL = (ResponsesApi, ModelControlApi, LoraAdaptersApi)
"""Classes whose operations the main process executes if there are several server processes."""


CONTROL = (ModelControlApi, LoraAdaptersApi)
"""Classes whose operations change the server. They refuse requests of other sites' pages."""


def create_app(core: Core, options: OpenAIOptions) -> Starlette:
    """Create the application. Raises `ValueError` for an unknown parser, tokenizer or chat template in `options`."""
    resolver = ModelResolver(core, options)
    images = ImageFetcher(options.allowed_media_domains)
    responses = ResponsesApi(resolver, images, options)
    resources = (
        ChatCompletionsApi(resolver, images, options),
        CompletionsApi(resolver, options),
        responses,
        PoolingApi(resolver),
        TokenizationApi(resolver),
        ModelControlApi(core),
        ModelsApi(resolver, like_triton=options.triton_compatibility),
        LoraAdaptersApi(resolver),
        HealthApi(core),
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await responses.close()
        await images.close()

    groups: dict[str, list[Route]] = {}
    stateful: list[Route] = []
    control: list[Route] = []
    for resource in resources:
        for operation, route in routes_of(resource, core, options):
            if operation.group != "metrics" or options.metrics:
                groups.setdefault(operation.group, []).append(route)
            if isinstance(resource, STATEFUL):
                stateful.append(route)
            if isinstance(resource, CONTROL):
                control.append(route)
    limit_rates(groups["inference"], core, options.access)
    share_routes(stateful, core, options)
    for group, routes in groups.items():
        restrict(routes, group, options)
    refuse_cross_site(control, options.access.origins)
    app = Starlette(
        routes=[
            *(route for routes in groups.values() for route in routes),
            *_document_routes(options),
            *page_routes(core, resolver, options),
        ],
        exception_handlers={
            HTTPException: _on_http_exception_like_triton
            if options.triton_compatibility
            else _on_http_exception
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    add_middleware(app, options.access)
    return app


def _document_routes(options: OpenAIOptions) -> list[Route]:
    """Return the routes `/openapi.json`, `/docs` and `/redoc`. The document is generated on the first request."""
    document = b""

    async def openapi(request: Request) -> Response:
        from neso.frontends.openai.openapi import openapi_document

        nonlocal document
        document = document or orjson.dumps(openapi_document(options.access))
        return Response(document, media_type="application/json")

    return [Route("/openapi.json", openapi), Route("/docs", docs), Route("/redoc", redoc)]


async def _on_http_exception_like_triton(request: Request, error: Exception) -> Response:
    """Send errors of unknown paths and methods in the format of Triton's OpenAI frontend."""
    assert isinstance(error, HTTPException)
    response = error_response(ApiError(error.status_code, str(error.detail)), like_triton=True)
    response.headers.update(error.headers or {})
    return response


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Convert errors of unknown paths and methods to OpenAI's format."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"Unknown request URL: {request.method} {request.url.path}.",
        405: f"Method {request.method} is not allowed for {request.url.path}.",
    }.get(error.status_code, str(error.detail))
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    response = error_response(ApiError(error.status_code, message, type="invalid_request_error", code=code))
    response.headers.update(error.headers or {})
    return response
