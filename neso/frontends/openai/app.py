"""The application: which route leads where."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import neso
from neso.frontends.openai.access.middleware import add_middleware, limit_rates, restrict
from neso.frontends.openai.chat.chat_completions import ChatApi
from neso.frontends.openai.chat.image_fetcher import Media
from neso.frontends.openai.completions import CompletionsApi
from neso.frontends.openai.errors import ApiError, to_api_error
from neso.frontends.openai.model_resolver import Targets
from neso.frontends.openai.models_api import (
    AdaptersApi,
    LoadAdapterRequest,
    ModelsApi,
    UnloadAdapterRequest,
    control_routes,
    metrics_route,
)
from neso.frontends.openai.pooling import (
    EmbeddingRequest,
    EmbeddingsApi,
    RerankRequest,
    ScoreRequest,
    ScoresApi,
)
from neso.frontends.openai.responses import ResponsesApi
from neso.frontends.openai.responses.api import response_routes
from neso.frontends.openai.routing import Body, GenerationEndpoint, answer_to_body, error_response
from neso.frontends.openai.schemas import ChatCompletionRequest, CompletionRequest
from neso.frontends.openai.tokenization import DetokenizeRequest, TokenizeRequest, TokensApi
from neso.frontends.openai_options import AccessOptions, OpenAIOptions

if TYPE_CHECKING:
    from neso.server.core import Core

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(core: Core, options: OpenAIOptions) -> FastAPI:
    """The ASGI application. Raises `ValueError` for options that name what there is not.

    The routes are Starlette's, not FastAPI's: those would validate, convert and serialize what is to pass
    through as it is, and would describe themselves in an OpenAPI document at start. That one is made when
    somebody reads it.
    """
    targets = Targets(core, options)
    media = Media(options.allowed_media_domains)
    responses = ResponsesApi(targets, media, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await responses.close()
        await media.close()

    app = FastAPI(title="Neso", version=neso.__version__, redirect_slashes=False, lifespan=lifespan)
    inference = [
        *_generation_routes(core, targets, media, options),
        *response_routes(core, responses, options.max_body_size),
    ]
    for group, routes in (
        ("inference", limit_rates(inference, options.access)),
        ("model-repository", [*control_routes(core, options.max_body_size), *_model_routes(targets)]),
        ("model-repository", _adapter_routes(targets, options)),
        ("metrics", [metrics_route(core)] if options.metrics else []),
        ("health", _health_routes(core)),
    ):
        app.router.routes.extend(restrict(routes, group, options))
    app.openapi = lambda: _description(options.access)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _on_http_exception)
    add_middleware(app, options.access)
    return app


def _generation_routes(core: Core, targets: Targets, media: Media, options: OpenAIOptions) -> list[Route]:
    completions, chat = CompletionsApi(targets, options), ChatApi(targets, media, options)
    limit = options.max_body_size
    return [
        _post("/v1/chat/completions", GenerationEndpoint(core, ChatCompletionRequest, chat.create, limit)),
        _post("/v1/completions", GenerationEndpoint(core, CompletionRequest, completions.create, limit)),
        *_pooling_routes(core, targets, options),
        *_token_routes(targets, options),
    ]


def _pooling_routes(core: Core, targets: Targets, options: OpenAIOptions) -> list[Route]:
    embeddings, scores = EmbeddingsApi(targets), ScoresApi(targets)
    limit = options.max_body_size
    score = GenerationEndpoint(core, ScoreRequest, scores.score, limit)
    rerank = GenerationEndpoint(core, RerankRequest, scores.rerank, limit)
    return [
        _post("/v1/embeddings", GenerationEndpoint(core, EmbeddingRequest, embeddings.create, limit)),
        _post("/v1/score", score),
        _post("/score", score),
        # Jina's and Cohere's clients have their own paths.
        _post("/v1/rerank", rerank),
        _post("/v2/rerank", rerank),
        _post("/rerank", rerank),
    ]


def _token_routes(targets: Targets, options: OpenAIOptions) -> list[Route]:
    tokens = TokensApi(targets)
    tokenize = _answering(TokenizeRequest, tokens.tokenize, options)
    detokenize = _answering(DetokenizeRequest, tokens.detokenize, options)
    # Under /v1, too, where the base URL of clients ends.
    return [
        _post(prefix + path, endpoint)
        for prefix in ("", "/v1")
        for path, endpoint in (("/tokenize", tokenize), ("/detokenize", detokenize))
    ]


def _model_routes(targets: Targets) -> list[Route]:
    models = ModelsApi(targets, created=int(time.time()))

    async def list_models(request: Request) -> Response:
        return _answer(models.list_all)

    async def get_model(request: Request) -> Response:
        return _answer(lambda: models.one(request.path_params["model"]))

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", get_model, methods=["GET"]),
    ]


def _adapter_routes(targets: Targets, options: OpenAIOptions) -> list[Route]:
    adapters = AdaptersApi(targets)
    return [
        _post("/v1/load_lora_adapter", _answering(LoadAdapterRequest, adapters.load, options)),
        _post("/v1/unload_lora_adapter", _answering(UnloadAdapterRequest, adapters.unload, options)),
    ]


def _health_routes(core: Core) -> list[Route]:
    async def live(request: Request) -> Response:
        return Response(status_code=200 if core.live() else 503)

    async def ready(request: Request) -> Response:
        return Response(status_code=200 if core.ready() else 503)

    async def version(request: Request) -> Response:
        return _answer(lambda: {"version": neso.__version__})

    return [
        Route("/health/live", live, methods=["GET"]),
        Route("/health/ready", ready, methods=["GET"]),
        Route("/health", ready, methods=["GET"]),
        Route("/ping", ready, methods=["GET", "POST"]),
        Route("/version", version, methods=["GET"]),
    ]


def _post(path: str, endpoint: Callable[..., Any]) -> Route:
    return Route(path, endpoint, methods=["POST"])


def _answering(
    schema: type[Body], do: Callable[[Body], Awaitable[str | dict[str, Any]]], options: OpenAIOptions
) -> Endpoint:
    """The endpoint whose body is a `schema`, which `do` answers."""

    async def endpoint(request: Request) -> Response:
        return await answer_to_body(request, schema, do, options.max_body_size)

    return endpoint


def _answer(make: Callable[[], dict[str, Any]]) -> Response:
    try:
        return Response(orjson.dumps(make()), media_type="application/json")
    except Exception as error:
        return error_response(to_api_error(error))


def _description(access: AccessOptions) -> dict[str, Any]:
    from neso.frontends.openai.description import openapi_document

    return openapi_document(access)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """A path or a method that there is not, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"Unknown request URL: {request.method} {request.url.path}.",
        405: f"Method {request.method} is not allowed for {request.url.path}.",
    }.get(error.status_code, str(error.detail))
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    response = error_response(ApiError(error.status_code, message, type="invalid_request_error", code=code))
    response.headers.update(error.headers or {})
    return response
