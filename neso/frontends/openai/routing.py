"""Declaration and dispatch of the API's operations.

A handler is declared with `@operation(...)`: method, paths, and the types of its request and response. `routes_of`
creates ASGI routes from the declaration, and `openapi.openapi_document` creates the description.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from neso._wire import count_json
from neso.frontends.decoding import LARGE_JSON, decode
from neso.frontends.openai.access.api_keys import request_key
from neso.frontends.openai.errors import ApiError, to_api_error, triton_error, validation_error
from neso.frontends.transport.tcp import client_network
from neso.server.admission import CLIENT, RESERVATION, Reservation

if TYPE_CHECKING:
    from neso.frontends.openai_options import OpenAIOptions
    from neso.server.core import Core
    from neso.server.tracing import Trace

Body = TypeVar("Body", bound=BaseModel)
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])

TEXT = "text/plain"
_CANCELS_ON_DISCONNECT = "neso.cancels_on_disconnect"
"""ASGI extension of servers that cancel the application's task when the client disconnects."""


class ClientDisconnected(Exception):
    """The client closed the connection before its request was complete."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A path or query parameter. `schema` is its JSON schema."""

    name: str
    place: Literal["path", "query"]
    schema: dict[str, Any]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of the API.

    request: pydantic model of the JSON body; None for no body.
    response: type of the JSON response, a media type for text, or None for no body.
    events: type of the stream's events, if the response may be a stream.
    errors: documented error statuses besides 401 and 403.
    group: group of routes in `--openai-restricted-api`; the group `inference` is rate limited.
    cancellable: cancel the handler when the client disconnects.
    open_group: group in `OPEN_GROUPS` that the path belongs to.
    """

    method: str
    paths: tuple[str, ...]
    tag: str
    summary: str
    request: type[BaseModel] | None = None
    response: Any = None
    events: Any = None
    parameters: Sequence[Parameter] = ()
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: Sequence[int] = (400, 404, 413, 415, 429, 499, 500, 503)
    body_required: bool = True
    group: str = "inference"
    cancellable: bool = False
    open_group: str = ""


@dataclass(slots=True)
class RequestContext:
    """A request without its body. `trace` is set for sampled requests of cancellable operations."""

    scope: Scope
    trace: Trace | None = None

    @property
    def path_params(self) -> dict[str, str]:
        return self.scope["path_params"]  # type: ignore[no-any-return]

    @property
    def query(self) -> QueryParams:
        return QueryParams(self.scope["query_string"])

    @property
    def client(self) -> str:
        """Name of the client in the limits of requests in flight: its key, or its address without keys."""
        key = request_key(self.scope)
        if key is not None:
            return f"key {key.owner}"
        host = str((self.scope.get("client") or ("",))[0])
        return client_network(host) or host

    @property
    def owner(self) -> str:
        """`ApiKey.owner` of the request's key; "" without keys."""
        key = request_key(self.scope)
        return "" if key is None else key.owner


def operation(method: str, *paths: str, tag: str, **declaration: Any) -> Callable[[Handler], Handler]:
    """Declare a handler `(self, body, context)`, or `(self, context)` if `request` is None.

    The handler returns an object that is sent as JSON, a string that is sent as text, or an ASGI application. The first
    line of its docstring is the summary. `declaration`: further fields of `Operation`.
    """

    def declare(handler: Handler) -> Handler:
        summary = (handler.__doc__ or "").strip().splitlines()[0].rstrip(".")
        handler.operation = Operation(method, paths, tag, summary, **declaration)  # type: ignore[attr-defined]
        return handler

    return declare


def operations_of(resource: type) -> Iterator[tuple[str, Operation]]:
    """Yield the names of a class's handlers and their operations, in the order of definition."""
    for name, member in vars(resource).items():
        if (declared := getattr(member, "operation", None)) is not None:
            yield name, declared


def routes_of(resource: Any, core: Core, options: OpenAIOptions) -> list[tuple[Operation, Route]]:
    """Return the routes of `resource`'s operations."""
    return [
        (declared, Route(path, endpoint, methods=[declared.method]))
        for name, declared in operations_of(type(resource))
        for endpoint in [Endpoint(declared, getattr(resource, name), core, options)]
        for path in declared.paths
    ]


class Endpoint:
    """The ASGI application of an operation: reads the body, calls the handler, sends the response."""

    def __init__(
        self,
        operation: Operation,
        handler: Callable[..., Awaitable[Any]],
        core: Core,
        options: OpenAIOptions,
    ) -> None:
        self._operation = operation
        self._handler = handler
        self._core = core
        self._max_body_size = options.max_body_size
        self._max_json_values = options.max_json_values
        self._like_triton = options.triton_compatibility

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic_ns()
        operation = self._operation
        context = RequestContext(scope)
        arguments: tuple[Any, ...] = (context,)
        if operation.request is not None:
            try:
                data = await read_body(scope, receive, self._max_body_size)
                data = data if data or operation.body_required else b"{}"
                if len(data) > LARGE_JSON:
                    body = await decode(parse_body, data, operation.request, self._max_json_values)
                else:
                    body = parse_body(data, operation.request, self._max_json_values)
            except ClientDisconnected:
                return
            except ApiError as error:
                await error_response(error, like_triton=self._like_triton)(scope, receive, send)
                return
            arguments = (body, context)
            if self._core.tracing.enabled and operation.cancellable:
                context.trace = self._start_trace(body, scope, started)
        response = self._respond(arguments, context, scope, receive, send)
        client = CLIENT.set(context.client)
        reservation = Reservation()
        reserved = RESERVATION.set(reservation)
        try:
            if operation.cancellable and _CANCELS_ON_DISCONNECT not in scope.get("extensions", ()):
                await while_connected(receive, response)
            else:
                await response
        finally:
            reservation.release()
            RESERVATION.reset(reserved)
            CLIENT.reset(client)
            if context.trace is not None:
                context.trace.sent("HTTP")

    async def _respond(
        self, arguments: tuple[Any, ...], context: RequestContext, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            result = await self._handler(*arguments)
            if isinstance(result, dict):
                result = json_response(result)
            elif isinstance(result, str):
                result = Response(result, media_type=TEXT)
        except Exception as error:
            result = self._error_response(error)
        if context.trace is not None:
            context.trace.sending("HTTP")
        await result(scope, receive, send)

    def _error_response(self, error: Exception) -> Response:
        """Create the response for an exception. As a variable of the caller it would be part of a cycle."""
        api_error = to_api_error(error)
        if self._like_triton and api_error.status == 404 and self._operation.request is not None:
            api_error.status = 400  # an unknown model in a body
        return error_response(api_error, like_triton=self._like_triton)

    def _start_trace(self, body: BaseModel, scope: Scope, started: int) -> Trace | None:
        model: str = body.model  # type: ignore[attr-defined]  # all requests of cancellable operations have it
        if not self._core.model_ready(model):
            return None
        trace = self._core.tracing.sample(model, Headers(scope=scope).get, started)
        if trace is not None:
            trace.stamp("HTTP_RECV_START", trace.started)
            trace.stamp("HTTP_RECV_END")
        return trace


def error_response(error: ApiError, *, like_triton: bool = False) -> Response:
    """Create the response for an error, in OpenAI's format or in that of Triton's OpenAI frontend."""
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
    if like_triton and error.status != 413:  # Triton's frontend rejects large bodies in OpenAI's format
        status, body = triton_error(error)
        return Response(body, status, headers, media_type="application/json")
    return Response(error.body(), error.status, headers, media_type="application/json")


def json_response(body: Mapping[str, Any]) -> Response:
    """Create a JSON response; `body` may contain numpy arrays."""
    return Response(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Read the whole body.

    Raises `ApiError`: 413 above `limit` bytes, 415 for a compressed body; and `ClientDisconnected`.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _body_too_large(limit)
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise ApiError(
                415,
                f"Content encoding '{value.decode('latin-1')}' is not supported; send the body uncompressed.",
                code="unsupported_content_encoding",
            )
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _body_too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def parse_body(body: bytes, schema: type[Body], max_values: int) -> Body:
    """Validate a JSON body. Raises `ApiError` 400 naming the invalid field, or if it has too many values.

    A twentieth of `max_values` may be strings, and objects and arrays, because pydantic holds the interpreter lock and
    takes longer for them.
    """
    _check_counts(body, max_values)
    values = None
    if len(body) > LARGE_JSON:
        # Two steps, because each holds the interpreter lock. They also take half the time of one for a million tokens.
        with suppress(ValueError):  # reported below
            values = from_json(body)
    try:
        if isinstance(values, dict):
            return schema.model_validate(values)
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise validation_error(error) from None


def _check_counts(body: bytes, max_values: int) -> None:
    """Count the values outside strings. Raises `ApiError`."""
    max_parts = max_values // 20
    if len(body) <= max_parts:
        return
    values, strings, containers = count_json(body, max_values)
    for kind, count, most in (
        ("strings", strings, max_parts),
        ("values", values, max_values),
        ("objects and arrays", containers, max_parts),
    ):
        if count > most:
            raise ApiError(400, f"The body has more than {most} {kind}.")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it when the client disconnects or the current task is cancelled.

    Returns after `work` has cleaned up, when its engine requests are aborted.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
        # Retrieves the exceptions of both: that of `receive` or of a failed cleanup is of no interest any more.
        await asyncio.gather(task, watcher, return_exceptions=True)
    if not task.cancelled():
        task.result()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _body_too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes, the limit that --http-max-input-size sets.",
        code="content_too_large",
    )
