"""HTTP/1.1 client: an `asyncio.Protocol` on the parser of httptools, without a task or a stream object per response.

A token event costs one call of the parser and one of the endpoint; the clock is read once for each TCP segment.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from itertools import cycle
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import orjson

from neso.perf.client.target import OnFirstOutput
from neso.perf.endpoints.base import History, HttpEndpoint, ResponseError, error_text
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.endpoints.sse import ServerSentEvents
from neso.perf.errors import PerfError
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest

_UNEXPECTED = (ValueError, KeyError, IndexError, TypeError, AttributeError)
"""Exceptions of reading an unexpected response."""
_MAX_ERROR_MESSAGE = 500
CONNECT_TIMEOUT_SECONDS = 10.0


class HttpTarget:
    """Sends requests to one or more servers in turn."""

    def __init__(self, endpoint: HttpEndpoint, options: EndpointOptions) -> None:
        """Raises `PerfError` for invalid URLs, unknown hosts and invalid certificates."""
        self._endpoint = endpoint
        self._timeout = options.request_timeout
        self._reuse = options.connections
        self._servers = [_Server(url, options) for url in options.server_urls]
        self._turns = cycle(range(len(self._servers)))
        self._heads: dict[tuple[int, str], bytes] = {}
        self._headers = "".join(
            f"{name}: {value}\r\n" for name, value in (*endpoint.headers(), *options.header_list)
        )
        self._sticky: dict[str, _Connection] = {}
        self._active: dict[_Connection, float] = {}
        """Connections with a request in flight and its deadline, in the order of the deadlines."""
        self._expiry: asyncio.TimerHandle | None = None

    async def send(
        self,
        request: PerfRequest,
        record: RequestRecord,
        history: History,
        cancel_after: float | None = None,
        on_first_output: OnFirstOutput | None = None,
    ) -> None:
        number = next(self._turns)
        try:
            lines, body = self._endpoint.wire(request, record.model, history)
        except PerfError as error:
            record.start_ns = record.end_ns = time.monotonic_ns()
            record.error_kind, record.error_message = "build", str(error)
            return
        data = b"%bContent-Length: %d\r\n%b\r\n%b" % (
            self._head(number, record.model),
            len(body),
            lines,
            body,
        )
        record.request_bytes = len(data)
        record.items = self._endpoint.items(request)
        server = self._servers[number]
        while True:
            connection = self._sticky.pop(record.session, None) or server.idle_connection()
            reused = connection is not None
            if connection is None:
                connection = await self._connect(server, record)
                if connection is None:
                    return
            await self._exchange(connection, data, record, cancel_after, on_first_output)
            if reused and record.error_kind == "disconnect" and not record.first_byte_ns:
                # The server closed an idle connection while the request was on its way: send it again.
                record.error_kind = record.error_message = ""
                continue
            self._release(server, connection, record)
            return

    async def _exchange(
        self,
        connection: _Connection,
        data: bytes,
        record: RequestRecord,
        cancel_after: float | None,
        on_first_output: OnFirstOutput | None,
    ) -> None:
        """Send a request and wait for the end of its response."""
        done = connection.start(data, record, on_first_output)
        loop = asyncio.get_running_loop()
        self._active[connection] = deadline = loop.time() + self._timeout
        if self._expiry is None:
            self._expiry = loop.call_at(deadline, self._expire)
        cancellation = None if cancel_after is None else loop.call_later(cancel_after, connection.cancel)
        try:
            await done
        finally:
            del self._active[connection]
            if cancellation is not None:
                cancellation.cancel()

    def _expire(self) -> None:
        """Fail the requests whose time is over. One timer for all requests costs less than a timer for each."""
        loop = asyncio.get_running_loop()
        self._expiry = None
        for connection, deadline in list(self._active.items()):
            if deadline > loop.time():
                self._expiry = loop.call_at(deadline, self._expire)
                return
            connection.time_out(self._timeout)

    def _head(self, number: int, model: str) -> bytes:
        head = self._heads.get((number, model))
        if head is None:
            server, endpoint = self._servers[number], self._endpoint
            text = (
                f"POST {server.base}{endpoint.url_path(model)} HTTP/1.1\r\nHost: {server.authority}\r\n"
                f"Content-Type: {endpoint.content_type}\r\n{self._headers}"
            )
            if self._reuse == "never":
                text += "Connection: close\r\n"
            head = self._heads[number, model] = text.encode("latin-1")
        return head

    async def _connect(self, server: _Server, record: RequestRecord) -> _Connection | None:
        started = time.monotonic_ns()
        try:
            connection = await server.connect(self._endpoint)
        except (OSError, asyncio.TimeoutError, ssl.SSLError) as error:
            record.start_ns, record.end_ns = started, time.monotonic_ns()
            record.error_kind, record.error_message = "connect", _connect_message(server, error)
            return None
        record.connect_ns = time.monotonic_ns() - started
        return connection

    def _release(self, server: _Server, connection: _Connection, record: RequestRecord) -> None:
        if not connection.usable or self._reuse == "never":
            connection.close()
        elif self._reuse == "sticky-user-sessions" and record.session:
            self._sticky[record.session] = connection
        else:
            server.idle.append(connection)

    def message(self, request: PerfRequest) -> dict[str, Any]:
        return self._endpoint.message(request)

    def cancel_all(self) -> None:
        for connection in list(self._active):
            connection.cancel()

    def end_session(self, session: str) -> None:
        connection = self._sticky.pop(session, None)
        if connection is not None:
            connection.close()

    async def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        for connection in (
            *self._sticky.values(),
            *self._active,
            *(c for s in self._servers for c in s.idle),
        ):
            connection.close()


class _Server:
    """One URL, its resolved address and its idle connections."""

    def __init__(self, url: str, options: EndpointOptions) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PerfError(f"--url: expected http://HOST:PORT or https://HOST:PORT, got '{url}'")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            raise PerfError(f"--url: '{url}': {error}") from None
        self.url = url
        self.base = parts.path.rstrip("/")
        self.authority = parts.netloc.rpartition("@")[2]
        self.idle: list[_Connection] = []
        self._host = parts.hostname
        self._addresses = [(str(address[0]), int(address[1])) for *_, address in found]
        self._ssl = options.ssl_context() if parts.scheme == "https" else None

    def idle_connection(self) -> _Connection | None:
        """Return the connection used last that is still open."""
        while self.idle:
            connection = self.idle.pop()
            if connection.usable:
                return connection
        return None

    async def connect(self, endpoint: HttpEndpoint) -> _Connection:
        """Open a connection to the first address that accepts it. Raises `OSError`, `TimeoutError`."""
        loop = asyncio.get_running_loop()
        for position, (host, port) in enumerate(self._addresses):
            try:
                _, connection = await asyncio.wait_for(
                    loop.create_connection(
                        lambda: _Connection(loop, endpoint),
                        host,
                        port,
                        ssl=self._ssl,
                        server_hostname=self._host if self._ssl else None,
                    ),
                    CONNECT_TIMEOUT_SECONDS,
                )
            except OSError:
                if position == len(self._addresses) - 1:
                    raise
            else:
                # Later connections go to this address first.
                self._addresses.insert(0, self._addresses.pop(position))
                return connection
        raise OSError("no address")


def _connect_message(server: _Server, error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return f"{server.url}: no connection within {CONNECT_TIMEOUT_SECONDS:g} s"
    return f"{server.url}: {error}"


class _Connection(asyncio.Protocol):
    """A connection with at most one request in flight.

    The parser calls the `on_...` methods. `usable`: whether another request can be sent.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, endpoint: HttpEndpoint) -> None:
        self.usable = True
        self._loop = loop
        self._endpoint = endpoint
        self._transport: asyncio.Transport
        self._record: RequestRecord | None = None
        self._on_first_output: OnFirstOutput | None = None
        self._done: asyncio.Future[None]
        self._now = 0
        self._status = 0
        self._is_stream = False
        self._has_length = False
        self._is_complete = False
        self._events = ServerSentEvents(endpoint)
        self._parts: list[bytes] = []
        # The parser calls the list's method: a Python function for each chunk would cost more than the parser.
        self.on_body = self._parts.append
        self._parser: Any = httptools.HttpResponseParser(self)

    def start(
        self, data: bytes, record: RequestRecord, on_first_output: OnFirstOutput | None
    ) -> asyncio.Future[None]:
        """Send a request; the result is set when its response is complete or failed."""
        self._record = record
        self._on_first_output = on_first_output
        self._is_stream = self._has_length = self._is_complete = False
        self._done = done = self._loop.create_future()
        record.start_ns = time.monotonic_ns()
        self._transport.write(data)
        return done

    def cancel(self) -> None:
        """Close the connection and mark the request as cancelled."""
        record = self._record
        if record is not None:
            record.cancelled = True
            self._fail("", "")

    def time_out(self, seconds: float) -> None:
        """Close the connection and fail the request."""
        self._fail("timeout", f"no complete response within {seconds:g} s")

    def close(self) -> None:
        self.usable = False
        self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        record = self._record
        if record is None:  # data that nothing asked for
            self.close()
            return
        self._now = now = time.monotonic_ns()
        if not record.first_byte_ns:
            record.first_byte_ns = now
        record.response_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("protocol", f"not an HTTP response: {error}")
            return
        try:
            if self._is_stream and self._parts:
                data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                self._events.read(data, record, now)
                if self._on_first_output is not None and record.arrivals_ns:
                    self._on_first_output()
                    self._on_first_output = None
            if self._is_complete:
                self._finish(record)
        except (ResponseError, *_UNEXPECTED) as error:
            self._fail(*_failure(error))

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._record is None:
            return
        self._now = time.monotonic_ns()
        if self._record.status and not self._has_length and error is None:
            try:
                self._finish(self._record)  # the end of the connection is the end of the body
            except (ResponseError, *_UNEXPECTED) as failure:
                self._fail(*_failure(failure))
            return
        what = "in the middle of the response" if self._record.first_byte_ns else "without a response"
        self._fail("disconnect", f"the server closed the connection {what}" + (f": {error}" if error else ""))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")
        elif name == b"content-length" or name == b"transfer-encoding":
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._status = status = self._parser.get_status_code()
        assert self._record is not None
        self._record.status = status
        if status >= 300:
            self._is_stream = False

    def on_message_complete(self) -> None:
        if self._status >= 200:  # not after 100 Continue
            self._is_complete = True
            self.usable = self.usable and self._parser.should_keep_alive()

    # The end of a request

    def _finish(self, record: RequestRecord) -> None:
        body = b"".join(self._parts)
        if self._status >= 300:
            self._end("http", _error_message(self._status, body))
            return
        if not self._is_stream:
            self._endpoint.response(record, body, self._now)
        if not record.arrivals_ns:
            self._end("empty", "the response has no output")
        else:
            self._end("", "")

    def _fail(self, kind: str, message: str) -> None:
        self._now = time.monotonic_ns()
        self.close()
        self._end(kind, message)

    def _end(self, kind: str, message: str) -> None:
        record, self._record = self._record, None
        if record is None:
            return
        record.end_ns = self._now
        record.error_kind, record.error_message = kind, message[:_MAX_ERROR_MESSAGE]
        self._parts.clear()
        self._events.clear()
        if not self._done.done():
            self._done.set_result(None)


def _failure(error: BaseException) -> tuple[str, str]:
    """Return the kind and message of an error while a response was read."""
    if isinstance(error, ResponseError):
        return "stream", str(error)
    return "protocol", f"unexpected response: {type(error).__name__}: {error}"


def _error_message(status: int, body: bytes) -> str:
    """Return the status and the message of an error response."""
    text = body[:_MAX_ERROR_MESSAGE].decode("utf-8", "replace").strip()
    try:
        content = orjson.loads(body)
        if isinstance(content, dict):
            text = error_text(
                content.get("error") or content.get("message") or content.get("detail") or content
            )
    except ValueError:
        pass
    return f"HTTP {status}: {text}"
