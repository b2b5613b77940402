"""HTTP requests, responses and the handler interface between them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httptools
import orjson

if TYPE_CHECKING:
    from neso.frontends.transport.http1.connection import HttpConnection

Headers = Sequence[tuple[str, str]]
JSON = "application/json"

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


class Request:
    """An HTTP request with its complete body.

    `headers`: by lower-case name; repeated headers are joined by commas. `params`: path variables set by the router,
    percent-decoded. `received_ns`: monotonic time of the first byte, 0 if not measured. `trace`: set and used by
    handlers. `held`: bytes of the memory for bodies that the connection releases after the response.
    """

    __slots__ = (
        "body",
        "connection",
        "headers",
        "held",
        "http_version",
        "keep_alive",
        "method",
        "params",
        "query",
        "raw_path",
        "received_ns",
        "trace",
    )

    connection: HttpConnection

    def __init__(
        self,
        method: str,
        raw_path: bytes,
        query: bytes,
        headers: dict[bytes, bytes],
        body: bytes,
        http_version: str = "1.1",
        keep_alive: bool = True,
    ) -> None:
        self.method = method
        self.raw_path = raw_path
        self.query = query
        self.headers = headers
        self.body = body
        self.http_version = http_version
        self.keep_alive = keep_alive
        self.params: dict[str, str] = {}
        self.received_ns = 0
        self.held = 0
        self.trace: Any = None

    @property
    def path(self) -> str:
        """The percent-decoded path, for logs and ASGI. The router decodes each segment separately."""
        return decode_path(self.raw_path)

    def header(self, name: str) -> str | None:
        """Return the value of a header, or None if it is absent."""
        value = self.headers.get(name.lower().encode())
        return None if value is None else value.decode("latin-1")

    def header_items(self) -> Iterator[tuple[str, str]]:
        """Yield name and value of every header."""
        for name, value in self.headers.items():
            yield name.decode("latin-1"), value.decode("latin-1")

    def __repr__(self) -> str:
        return f"<Request {self.method} {self.path} body={len(self.body)}>"


class Response:
    """A response with a complete body. A list of buffers as `body` is written without joining them."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        body: bytes | list[bytes | memoryview] = b"",
        status: int = 200,
        content_type: str | None = JSON,
        headers: Headers = (),
    ) -> None:
        self.body = body
        self.status = status
        self.content_type = content_type
        self.headers = headers

    @property
    def size(self) -> int:
        """Size of the body in bytes."""
        body = self.body
        return len(body) if isinstance(body, bytes) else sum(memoryview(part).nbytes for part in body)


class StreamingResponse:
    """A response that its handler writes incrementally.

    The first `write` sends the head. The body is chunked unless `content_length` is given. The handler returns the
    response, or calls `finish`, after the last write.
    """

    __slots__ = ("_request", "_started", "content_length", "content_type", "headers", "status")

    def __init__(
        self,
        request: Request,
        status: int = 200,
        content_type: str | None = JSON,
        headers: Headers = (),
        content_length: int | None = None,
    ) -> None:
        self._request = request
        self._started = False
        self.status = status
        self.content_type = content_type
        self.headers = headers
        self.content_length = content_length

    def write(self, data: bytes) -> None:
        """Send a part of the body. Has no effect after the client disconnected."""
        self._start()
        self._request.connection.write_chunk(self._request, data)

    async def drain(self) -> None:
        """Wait for room in the write buffer. Raises `ConnectionResetError` if the client disconnected."""
        await self._request.connection.drain()

    def finish(self) -> None:
        """End the response and let the connection process its next request. Idempotent."""
        self._start()
        self._request.connection.finish(self._request)

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._request.connection.start(self._request, self)


class PendingResponse:
    """Returned by a handler that responds later from a callback, without a task.

    `on_disconnect`, if set, is called if the client disconnects before `send`. A later `send` has no effect.
    """

    __slots__ = ("_request", "on_disconnect")

    def __init__(self, request: Request) -> None:
        self._request = request
        self.on_disconnect: Callable[[], None] | None = None

    def send(self, response: Response) -> None:
        """Send the response and let the connection process its next request."""
        self._request.connection.send(self._request, response)

    def fail(self) -> None:
        """Log the exception being handled and respond with status 500."""
        self._request.connection.fail(self._request)


HandlerResult = Response | StreamingResponse | None
Handler = Callable[[Request], Response | PendingResponse | Awaitable[HandlerResult]]
"""Handles a request: returns a response, a pending response, or a coroutine.

A coroutine returns None or a `StreamingResponse` if it has written the response itself. Its task is cancelled when the
client disconnects before the response is complete.
"""


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """Return path and query of a request target, which may be absolute (`http://host/path`). Raises `ValueError`."""
    if not target.startswith(b"/") and target != b"*":
        try:
            url = httptools.parse_url(target)
        except httptools.HttpParserError as error:
            raise ValueError("malformed request target") from error
        return url.path or b"/", url.query or b""
    path, _, query = target.partition(b"?")
    return path, query.partition(b"#")[0]


def decode_path(raw: bytes) -> str:
    """Percent-decode; bytes that are not UTF-8 become U+FFFD."""
    text = raw.decode("utf-8", "replace")
    return unquote(text) if "%" in text else text


def response_head(
    status: int, content_type: str | None, headers: Headers, length: int | None, date: str, connection: str
) -> bytes:
    """Return the status line and headers. Raises `ValueError` for a header with a line break (header injection)."""
    line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} Unknown\r\n"
    text = f"{line}date: {date}\r\n{connection}"
    if content_type is not None:
        text += f"content-type: {content_type}\r\n"
    if length is not None:
        text += f"content-length: {length}\r\n"
    return text.encode("latin-1") + header_lines(headers) + b"\r\n"


def header_lines(headers: Headers) -> bytes:
    """Encode header lines. Raises `ValueError` for a header with a line break (header injection)."""
    text = ""
    for name, value in headers:
        if "\n" in value or "\r" in value or "\n" in name or "\r" in name:
            raise ValueError(f"header {name!r} contains a line break")
        text += f"{name}: {value}\r\n"
    return text.encode("latin-1")


def json_response(value: object, status: int = 200, headers: Headers = ()) -> Response:
    """Create a JSON response with `value`."""
    return Response(orjson.dumps(value), status, JSON, headers)


def error_response(status: int, message: str, headers: Headers = ()) -> Response:
    """Create a JSON response for an error."""
    return Response(error_body(message), status, JSON, headers)


def error_body(message: str) -> bytes:
    """Return the body of an error response: `{"error": message}`."""
    return orjson.dumps({"error": message})
