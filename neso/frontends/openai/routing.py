"""An ASGI endpoint that generates text: reads the request, answers, and stops when the client has gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from neso.frontends.openai.errors import ApiError, to_api_error, validation_error
from neso.server.tracing import Trace

if TYPE_CHECKING:
    from neso.server.core import Core


Body = TypeVar("Body", bound=BaseModel)


class ClientGone(Exception):
    """The client hung up before its request was complete."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises `ApiError`: 413 for more than `limit` bytes, 415 if compressed; and `ClientGone`."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise ApiError(
                415,
                f"Bodies in the encoding '{value.decode('latin-1')}' are not read: send them as they are.",
                code="unsupported_content_encoding",
            )
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def parse_body(body: bytes, schema: type[Body]) -> Body:
    """The body as a `schema`. Raises `ApiError` 400 that names the field at fault."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise validation_error(error) from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, but cancel it when the client goes away or this task is cancelled.

    Returns after the work's clean-up has run, so whatever it had asked of an engine is aborted by then. Servers
    differ in whether they cancel the task of a client that hung up; all of them deliver `http.disconnect`.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes, the limit that --http-max-input-size sets.",
        code="content_too_large",
    )


Create = Callable[[Body, Trace | None], Awaitable[Any]]


class GenerationEndpoint(Generic[Body]):
    """Hands the body, checked against `schema`, to `create`, whose result is an ASGI application."""

    def __init__(self, core: Core, schema: type[Body], create: Create[Body], max_body_size: int) -> None:
        self._core = core
        self._schema = schema
        self._create = create
        self._max_body_size = max_body_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic_ns()
        try:
            request = parse_body(await read_body(scope, receive, self._max_body_size), self._schema)
        except ClientGone:
            return
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        trace = self._begin_trace(request, scope, began) if self._core.tracing.enabled else None
        try:
            await while_connected(receive, self._answer(request, trace, scope, receive, send))
        finally:
            if trace is not None:
                trace.sent("HTTP")

    async def _answer(
        self, request: Body, trace: Trace | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            response = await self._create(request, trace)
        except Exception as error:
            response = error_response(to_api_error(error))
        if trace is not None:
            trace.sending("HTTP")
        await response(scope, receive, send)

    def _begin_trace(self, request: Body, scope: Scope, began: int) -> Trace | None:
        model: str = request.model  # type: ignore[attr-defined]  # every schema of these has it
        if not self._core.model_ready(model):
            return None
        trace = self._core.tracing.sample(model, Headers(scope=scope).get, began)
        if trace is not None:
            trace.stamp("HTTP_RECV_START", trace.started)
            trace.stamp("HTTP_RECV_END")
        return trace


def error_response(error: ApiError) -> Response:
    """The error as a response."""
    return Response(error.body(), error.status, media_type="application/json")


async def answer_to_body(
    request: Request,
    schema: type[Body],
    do: Callable[[Body], Awaitable[str | dict[str, Any]]],
    max_body_size: int,
    *,
    empty: bytes = b"",
) -> Response:
    """Do what a body asks for; the answer is a line of text, or an object. `empty` stands for a body of nothing."""
    try:
        body = parse_body(await read_body(request.scope, request.receive, max_body_size) or empty, schema)
        answer = await do(body)
    except ClientGone:
        return Response()
    except Exception as error:
        return error_response(to_api_error(error))
    if isinstance(answer, str):
        return Response(answer, media_type="text/plain")
    return Response(orjson.dumps(answer), media_type="application/json")
