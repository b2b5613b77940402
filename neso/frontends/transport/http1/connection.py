"""An HTTP/1.1 connection. Requests are handled one at a time, in order."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from neso.frontends.transport.http1.body_memory import BodyMemory
from neso.frontends.transport.http1.messages import (
    JSON,
    HandlerResult,
    PendingResponse,
    Request,
    Response,
    StreamingResponse,
    error_response,
    header_lines,
    response_head,
)
from neso.frontends.transport.http1.parser import BODY, HEAD, IDLE, Rejection, RequestParser
from neso.frontends.transport.tcp import LARGE_READ, Admission, WriteProgress, enable_tcp_keepalive

if TYPE_CHECKING:
    from neso.frontends.transport.http1.server import ServerContext

logger = logging.getLogger(__name__)

_SMALL = 64 << 10  # bytes; smaller bodies are copied and sent together with the head
_BODYLESS_STATUSES = (204, 304)
_BACKLOG, _TURN, _MEMORY = 1, 2, 4
_EAGER: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}

NO_MEMORY = Rejection(503, "the server has no memory for the request body, retry the request later")
MIN_BODY_RATE = 64 << 10
"""Bytes per second at which a body must arrive on average, beyond `body_timeout`."""


class HttpConnection(asyncio.Protocol):
    """Parses requests, runs the handler for one request at a time and writes the responses.

    While the write buffer is full, the next pipelined request is not started, so a connection buffers at most
    `write_buffer` bytes and one response. A client that stops reading is disconnected, see `WriteProgress`.

    EOF from the client counts as a disconnect: clients that half-close are rare, clients that disconnect while a
    model generates are not.
    """

    def __init__(self, context: ServerContext, admission: Admission | None = None) -> None:
        self._context = context
        self._options = context.options
        self._admission = admission  # None before `connection_made`, unless the connection uses TLS
        self._parser = RequestParser(context.options)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made
        # The current request and its response.
        self._request: Request | None = None
        self._task: asyncio.Task[None] | None = None  # task of a coroutine handler
        self._pending: PendingResponse | None = None  # response of a callback handler
        self._streaming: StreamingResponse | None = None  # set once its head is sent
        self._remaining_length: int | None = None  # bytes left of its Content-Length
        self._chunked = False
        self._bodyless = False
        self._in_process_requests = False
        self._disconnected = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._progress = WriteProgress(context.options.write_timeout)
        self._lingering = False
        self._closing = False
        self._paused = 0  # why reading is paused: any of `_BACKLOG`, `_TURN` and `_MEMORY`
        self._bodies: BodyMemory | None = None  # created for the first body that arrives in parts
        self._since = context.now  # time of the last progress, for the timeouts
        self._body_since = context.now  # when the last body began
        self.address = ""
        """See `client_network`."""

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=self._options.write_buffer)
        if self._admission is None:
            self._admission = self._context.limits.admit(transport)
        if self._admission is None:
            self._refuse()
            return
        self.address = self._admission.address
        enable_tcp_keepalive(transport)
        self._context.connections.add(self)

    def data_received(self, data: bytes) -> None:
        # Reading takes time, also that of data which a closed connection drops.
        if len(data) >= LARGE_READ and self._context.turn.is_over():
            self._pause_reading(_TURN)
            self._context.loop.call_soon(self._resume_reading, _TURN)
        if self._closing:
            return
        parser = self._parser
        before, num_bodies, num_requests = parser.phase, parser.num_bodies, len(parser.requests)
        parser.feed(data)
        if parser.phase is BODY or self._bodies is not None:
            self._account_for_body(num_requests)
        if parser.num_bodies != num_bodies:
            self._body_since = self._context.now
        if parser.phase is not HEAD or before is not HEAD:
            self._since = self._context.now
        if self._request is None:
            self._process_requests()
        if parser.requests and self._has_backlog():
            self._pause_reading(_BACKLOG)

    def eof_received(self) -> None:
        self._handle_disconnect()  # not in connection_lost, which waits until the write buffer is flushed

    def connection_lost(self, exc: Exception | None) -> None:
        self._handle_disconnect()
        self._writable.set()
        self._parser.close()
        context = self._context
        context.connections.discard(self)
        if self._admission is not None:
            self._admission.release()
        if context.draining and not context.connections:
            context.idle.set()

    def pause_writing(self) -> None:
        self._writable.clear()
        self._progress.start(self._context.now, self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._progress.stop()
        self._since = self._context.now
        self._writable.set()
        if self._request is None:
            self._process_requests()

    # Called by the server.

    def drain_and_close(self) -> None:
        """Accept no further requests; close after the response to the current one."""
        if self._request is None and self._parser.phase is not BODY:
            self._closing = True
            self._transport.close()

    def abort(self) -> None:
        """Close immediately."""
        self._transport.abort()

    def check_timeout(self, now: float) -> None:
        """Close the connection if a timeout has expired at `now`."""
        options = self._options
        waited = now - self._since
        if self._closing:
            if self._lingering:
                if waited > options.linger:
                    self._transport.abort()
            elif self._is_stalled(now) if not self._writable.is_set() else waited > options.write_timeout:
                self._transport.abort()
        elif not self._writable.is_set():
            if self._is_stalled(now):
                logger.info("closed the connection of %s: it does not read its responses", self.peer)
                self._transport.abort()
        elif self._request is not None:
            return
        elif self._parser.phase is IDLE:
            if waited > options.keep_alive_timeout:
                self._close()
        elif self._parser.phase is HEAD:
            if waited > options.header_timeout:
                self._reject(Rejection(408, "request timeout"))
        elif waited > options.body_timeout or self._body_is_slow(now):
            self._reject(NO_MEMORY if self._paused & _MEMORY else Rejection(408, "request timeout"))

    def _body_is_slow(self, now: float) -> bool:
        """Whether a body arrives so slowly that its client may only want to hold the memory."""
        return now - self._body_since > self._options.body_timeout + self._parser.body_size / MIN_BODY_RATE

    # Called by responses and adapters.

    @property
    def peer(self) -> tuple[str, int] | None:
        """The client's address."""
        name = self._transport.get_extra_info("peername")
        return name[:2] if isinstance(name, tuple) else None

    @property
    def local(self) -> tuple[str, int] | None:
        """The server's address."""
        name = self._transport.get_extra_info("sockname")
        return name[:2] if isinstance(name, tuple) else None

    @property
    def scheme(self) -> str:
        """http or https."""
        return "http" if self._options.tls is None else "https"

    async def wait_disconnected(self) -> None:
        """Wait until the client disconnects."""
        await self._disconnected.wait()

    async def drain(self) -> None:
        """Wait for room in the write buffer. Raises `ConnectionResetError` if the client disconnected."""
        if not self._writable.is_set():
            await self._writable.wait()
        if self._disconnected.is_set():
            raise ConnectionResetError("client disconnected")

    def send(self, request: Request, response: Response) -> None:
        """Send the complete response and process the next request."""
        if self._request is not request or self._closing:
            return
        body = response.body
        if (
            isinstance(body, bytes)
            and len(body) < _SMALL
            and request.keep_alive
            and request.http_version == "1.1"
            and request.method != "HEAD"
            and response.status not in _BODYLESS_STATUSES
            and not self._context.draining
        ):
            head = self._context.cached_head(response.status, response.content_type)
            lines = header_lines(response.headers) if response.headers else b""
            self._transport.write(b"%b%d\r\n%b\r\n%b" % (head, len(body), lines, body))
        else:
            self._write_response(request, response)
        self._done(request)

    def start(self, request: Request, response: StreamingResponse) -> None:
        """Send the head of a streaming response."""
        if self._request is not request or self._closing:
            return
        length = response.content_length
        bodyless = self._bodyless = request.method == "HEAD" or response.status in _BODYLESS_STATUSES
        self._chunked = length is None and request.http_version == "1.1" and not bodyless
        connection = "transfer-encoding: chunked\r\n" if self._chunked else ""
        if length is None and not self._chunked and not bodyless:
            request.keep_alive = False  # HTTP/1.0: closing the connection ends the body
        connection += self._connection_header(request)
        self._transport.write(
            response_head(
                response.status,
                response.content_type,
                response.headers,
                length,
                self._context.date,
                connection,
            )
        )
        self._streaming = response
        self._remaining_length = None if bodyless else length

    def write_chunk(self, request: Request, data: bytes) -> None:
        """Send a part of a streaming body. Raises `ValueError` if the body exceeds its Content-Length."""
        if self._request is not request or self._closing or not data:
            return  # an empty chunk would end the body
        if self._chunked:
            self._write_part(b"%x\r\n%b\r\n" % (len(data), data))
        elif not self._bodyless:
            if self._remaining_length is not None:
                if len(data) > self._remaining_length:
                    raise ValueError("response body is longer than its Content-Length")
                self._remaining_length -= len(data)
            self._write_part(data)

    def finish(self, request: Request) -> None:
        """End a streaming response and process the next request."""
        if self._request is not request or self._closing:
            return
        if self._chunked:
            self._transport.write(b"0\r\n\r\n")
        elif self._remaining_length:
            request.keep_alive = False  # body shorter than Content-Length: close, so that the client notices
        self._done(request)

    def fail(self, request: Request) -> None:
        """Log the exception being handled; respond with status 500, or abort a response that has started."""
        logger.exception("error in the handler of %s %s", request.method, request.path)
        if self._request is not request or self._closing:
            return
        if self._streaming is None:
            self._write_response(request, error_response(500, "internal error"))
        else:
            request.keep_alive = False
        self._done(request)

    # Internal.

    def _process_requests(self) -> None:
        """Handle parsed requests until a response is pending. After the last request, send the parser's rejection."""
        if self._in_process_requests:
            return  # called by a handler that responded synchronously; the loop below continues
        self._in_process_requests = True
        parser = self._parser
        while self._request is None and not self._closing and self._writable.is_set():
            if parser.requests:
                self._start_request(parser.requests.popleft())
            elif parser.rejection is not None:
                self._reject(parser.rejection)
            elif self._context.draining and parser.phase is not BODY:
                self._close()
            else:
                break
        self._in_process_requests = False
        if self._closing:
            return
        if self._request is None and parser.expects_continue and not self._paused & _MEMORY:
            parser.expects_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._paused & _BACKLOG and not self._has_backlog():
            self._resume_reading(_BACKLOG)

    def _pause_reading(self, reason: int) -> None:
        if not self._paused:
            self._transport.pause_reading()
        self._paused |= reason

    def _resume_reading(self, reason: int) -> None:
        before, self._paused = self._paused, self._paused & ~reason
        if before and not self._paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def _account_for_body(self, num_requests: int) -> None:
        """Account for the body of the current request; reading waits until the server has memory for it.

        `num_requests`: number of the pending requests before the last bytes were received.
        """
        parser, bodies = self._parser, self._bodies
        if bodies is None:
            bodies = self._bodies = BodyMemory(self._context.limits.body_memory, self._on_memory)
        if len(parser.requests) > num_requests:
            parser.requests[num_requests].held = bodies.complete()
            self._resume_reading(_MEMORY)
        if parser.rejection is not None:
            bodies.clear()
        elif parser.phase is BODY:
            if not bodies.receive(parser.body_size, parser.body_length):
                parser.reject(NO_MEMORY)
                bodies.clear()
            elif bodies.waiting:
                self._pause_reading(_MEMORY)

    def _on_memory(self) -> None:
        """Continue to read a body, for which there is memory now."""
        self._since = self._body_since = self._context.now
        self._resume_reading(_MEMORY)
        if self._request is None:
            self._process_requests()

    def _release(self, request: Request) -> None:
        """Release the memory of a request's body."""
        held, request.held = request.held, 0
        if held and self._bodies is not None:
            self._bodies.release(held)

    def _is_stalled(self, now: float) -> bool:
        return self._progress.stalled(now, self._transport.get_write_buffer_size())

    def _write_part(self, data: bytes) -> None:
        if not self._writable.is_set():
            self._progress.added(len(data))
        self._transport.write(data)

    def _has_backlog(self) -> bool:
        """Whether pipelined requests exceed the limits, so that reading must pause."""
        queued = self._parser.requests
        options = self._options
        return len(queued) > options.max_pipelined or sum(len(r.body) for r in queued) > options.max_body

    def _start_request(self, request: Request) -> None:
        self._request = request
        request.connection = self
        try:
            result = self._context.handler(request)
            if isinstance(result, Response):
                self.send(request, result)
                return
        except Exception:
            self.fail(request)
            return
        if isinstance(result, PendingResponse):
            if self._request is request:
                self._pending = result
            return
        context = self._context
        task: asyncio.Task[None] = asyncio.Task(self._run(request, result), loop=context.loop, **_EAGER)
        if task.done():
            return
        context.tasks.add(task)
        if self._request is request:
            self._task = task

    async def _run(self, request: Request, result: Awaitable[HandlerResult]) -> None:
        try:
            response = await result
            if type(response) is Response:
                self.send(request, response)
            elif isinstance(response, StreamingResponse):
                response.finish()
            elif self._request is request and not self._closing:
                raise RuntimeError("the handler returned without a response")
        except ConnectionResetError:
            if not self._disconnected.is_set():
                self.fail(request)
        except Exception:
            self.fail(request)
        except asyncio.CancelledError:
            # Not cancelled by a disconnect: the client still expects a response.
            if self._request is request and not self._closing:
                self.fail(request)
            raise
        finally:
            # A done callback would cost one more event loop iteration per request.
            self._context.tasks.discard(asyncio.current_task())

    def _done(self, request: Request) -> None:
        """Complete the response. The task may continue, for example background work of an ASGI application."""
        self._request = self._task = self._pending = None
        if request.held:
            self._release(request)
        if self._streaming is not None:
            self._streaming = None
            self._chunked = self._bodyless = False
            self._remaining_length = None
        self._since = self._context.now
        if not request.keep_alive:
            self._close()
        else:
            self._process_requests()

    def _write_response(self, request: Request, response: Response) -> None:
        status = response.status
        size = None if status in _BODYLESS_STATUSES else response.size
        data = response_head(
            status,
            response.content_type,
            response.headers,
            size,
            self._context.date,
            self._connection_header(request),
        )
        body = response.body
        if not size or request.method == "HEAD":
            self._transport.write(data)
        elif not isinstance(body, bytes):
            self._transport.writelines([data, *body])
        elif size < _SMALL:
            self._transport.write(data + body)
        else:
            self._transport.writelines([data, body])

    def _connection_header(self, request: Request) -> str:
        if self._context.draining:
            request.keep_alive = False
        if not request.keep_alive:
            return "connection: close\r\n"
        return "connection: keep-alive\r\n" if request.http_version == "1.0" else ""

    def _reject(self, rejection: Rejection) -> None:
        """Send an error and close, but keep reading for up to `linger` seconds.

        Closing with unread data makes the kernel send a reset, which may discard the response at the client.
        """
        self._closing = self._lingering = True
        self._since = self._context.now
        if self._bodies is not None:
            self._bodies.clear()
            self._resume_reading(_MEMORY)
        self._write_rejection(rejection)
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _refuse(self) -> None:
        """Close a connection beyond the limits. It is not counted, so it must not linger."""
        self._closing = True
        self._write_rejection(Rejection(503, "too many connections"))
        self._transport.close()

    def _write_rejection(self, rejection: Rejection) -> None:
        status, body = self._options.rejection(rejection)
        head = response_head(status, JSON, (), len(body), self._context.date, "connection: close\r\n")
        self._transport.write(head + body)

    def _close(self) -> None:
        self._closing = True
        self._transport.close()

    def _handle_disconnect(self) -> None:
        """Cancel the handler of the current request."""
        task, pending = self._task, self._pending
        if self._bodies is not None:
            for request in (self._request, *self._parser.requests):
                if request is not None:
                    self._release(request)
            self._bodies.clear()
            self._bodies = None
        self._request = self._task = self._pending = self._streaming = None
        self._parser.requests.clear()
        self._closing = True
        self._disconnected.set()
        if task is not None and not task.done():
            task.cancel()
        if pending is not None and pending.on_disconnect is not None:
            pending.on_disconnect()
