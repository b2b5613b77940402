"""One client's connection: requests in order, one answered at a time, nothing left running when it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable
from typing import Any

from neso.frontends.http.deferred import DeferredResponse
from neso.frontends.http.handler import Answer
from neso.frontends.http.parser import BODY, HEAD, IDLE, Refusal, RequestParser
from neso.frontends.http.request import Request
from neso.frontends.http.response import (
    JSON,
    Response,
    StreamingResponse,
    error_response,
    header_lines,
    response_head,
)
from neso.frontends.http.shared import Shared

logger = logging.getLogger(__name__)

_SMALL = 64 << 10
_BODYLESS = (204, 304)
_EAGER: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}


class HttpConnection(asyncio.Protocol):
    """Parses what arrives, runs the handler for one request after the other, writes what it answers.

    A closed read side means that the client is gone: clients that half-close are rare, and clients that
    vanish while a model generates for them are not.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._options = shared.options
        self._parser = RequestParser(shared.options)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made
        self._request: Request | None = None  # the one being answered
        self._task: asyncio.Task[None] | None = None  # the task that answers it
        self._deferred: DeferredResponse | None = None  # or the callback that will
        self._streaming: StreamingResponse | None = None  # its response, once the head is out
        self._piece_budget: int | None = None  # bytes that its Content-Length still promises
        self._chunked = False
        self._bodyless = False
        self._advancing = False
        self._lost = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._lingering = False
        self._closing = False
        self._reading_paused = False
        self._since = shared.clock.now

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=self._options.write_buffer)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(
                socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
            )  # notices peers that vanished without a word
        self._shared.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        parser = self._parser
        before = parser.phase
        parser.feed(data)
        if parser.phase is not HEAD or before is not HEAD:
            self._since = self._shared.clock.now
        if self._request is None:
            self._advance()
        elif not self._reading_paused and self._backlogged():
            self._reading_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self._cancel()  # not when the transport has closed: that may wait for a write buffer nobody reads

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        self._writable.set()
        self._parser.close()
        shared = self._shared
        shared.connections.discard(self)
        if shared.draining and not shared.connections:
            shared.idle.set()

    def pause_writing(self) -> None:
        self._writable.clear()
        self._since = self._shared.clock.now

    def resume_writing(self) -> None:
        self._writable.set()
        self._since = self._shared.clock.now

    # What the server calls.

    def drain_and_close(self) -> None:
        """Take no further request; close once the present one is answered."""
        if self._request is None and self._parser.phase is not BODY:
            self._closing = True
            self._transport.close()

    def abort(self) -> None:
        """Close now, whatever is being answered."""
        self._transport.abort()

    def check_timeout(self, now: float) -> None:
        """Close if the client has kept us waiting for too long."""
        options = self._options
        waited = now - self._since
        if self._closing:
            if waited > (options.linger if self._lingering else options.write_timeout):
                self._transport.abort()
        elif not self._writable.is_set():
            if waited > options.write_timeout:
                self._transport.abort()
        elif self._request is not None:
            return
        elif self._parser.phase is IDLE:
            if waited > options.keep_alive_timeout:
                self._close()
        elif waited > (options.header_timeout if self._parser.phase is HEAD else options.body_timeout):
            self._refuse(Refusal(408, "request timeout"))

    # What responses call.

    @property
    def peer(self) -> tuple[str, int] | None:
        """The client's address."""
        name = self._transport.get_extra_info("peername")
        return name[:2] if isinstance(name, tuple) else None

    @property
    def local(self) -> tuple[str, int] | None:
        """Our address, as the client sees it."""
        name = self._transport.get_extra_info("sockname")
        return name[:2] if isinstance(name, tuple) else None

    @property
    def scheme(self) -> str:
        """http or https."""
        return "http" if self._options.tls is None else "https"

    async def wait_lost(self) -> None:
        """Wait until the client has gone."""
        await self._lost.wait()

    async def drain(self) -> None:
        """Wait until the write buffer has room. Raises `ConnectionResetError` when the client has gone."""
        if not self._writable.is_set():
            await self._writable.wait()
        if self._lost.is_set():
            raise ConnectionResetError("the client has gone")

    def send(self, request: Request, response: Response) -> None:
        """Answer `request`, whole, and go on."""
        if self._request is not request or self._closing:
            return
        body = response.body
        if (
            isinstance(body, bytes)
            and len(body) < _SMALL
            and request.keep_alive
            and request.http_version == "1.1"
            and request.method != "HEAD"
            and response.status not in _BODYLESS
            and not self._shared.draining
        ):
            head = self._shared.plain_head(response.status, response.content_type)
            lines = header_lines(response.headers) if response.headers else b""
            self._transport.write(b"%b%d\r\n%b\r\n%b" % (head, len(body), lines, body))
        else:
            self._write_response(request, response)
        self._done(request)

    def start(self, request: Request, response: StreamingResponse) -> None:
        """Write the head of a response that comes in pieces."""
        if self._request is not request or self._closing:
            return
        length = response.content_length
        bodyless = self._bodyless = request.method == "HEAD" or response.status in _BODYLESS
        self._chunked = length is None and request.http_version == "1.1" and not bodyless
        connection = "transfer-encoding: chunked\r\n" if self._chunked else ""
        if length is None and not self._chunked and not bodyless:
            request.keep_alive = False  # HTTP/1.0: the end of the body is the end of the connection
        connection += self._connection_header(request)
        self._transport.write(
            response_head(
                response.status,
                response.content_type,
                response.headers,
                length,
                self._shared.clock.date,
                connection,
            )
        )
        self._streaming = response
        self._piece_budget = None if bodyless else length

    def write_piece(self, request: Request, data: bytes) -> None:
        """Write a piece of the body. Raises `ValueError` when it is more than Content-Length promised."""
        if self._request is not request or self._closing or not data:
            return  # an empty chunk would be the end
        if self._chunked:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        elif not self._bodyless:
            if self._piece_budget is not None:
                if len(data) > self._piece_budget:
                    raise ValueError("response body is longer than its Content-Length")
                self._piece_budget -= len(data)
            self._transport.write(data)

    def finish(self, request: Request) -> None:
        """End a response that came in pieces, and go on."""
        if self._request is not request or self._closing:
            return
        if self._chunked:
            self._transport.write(b"0\r\n\r\n")
        elif self._piece_budget:
            request.keep_alive = False  # fewer bytes than promised: only closing tells the client
        self._done(request)

    def fail(self, request: Request) -> None:
        """The handler raised: answer 500, or cut off the response that it had begun."""
        logger.exception("error in the handler of %s %s", request.method, request.path)
        if self._request is not request or self._closing:
            return
        if self._streaming is None:
            self._write_response(request, error_response(500, "internal error"))
        else:
            request.keep_alive = False
        self._done(request)

    # The rest is the connection's own.

    def _advance(self) -> None:
        """Answer the next request, if there is one; refuse what cannot be served, in its turn."""
        if self._advancing:
            return  # a handler that answered at once: the loop below goes on
        self._advancing = True
        parser = self._parser
        while self._request is None and not self._closing:
            if parser.requests:
                self._begin(parser.requests.popleft())
            elif parser.refusal is not None:
                self._refuse(parser.refusal)
            elif self._shared.draining and parser.phase is not BODY:
                self._close()
            else:
                break
        self._advancing = False
        if self._closing:
            return
        if self._request is None and parser.expects_continue:
            parser.expects_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._reading_paused and not self._backlogged():
            self._reading_paused = False
            self._transport.resume_reading()

    def _backlogged(self) -> bool:
        """Whether so much waits for its turn that no more shall be read."""
        waiting = self._parser.requests
        options = self._options
        return len(waiting) > options.max_pipelined or sum(len(r.body) for r in waiting) > options.max_body

    def _begin(self, request: Request) -> None:
        self._request = request
        request.connection = self
        try:
            answer = self._shared.handler(request)
            if isinstance(answer, Response):
                self.send(request, answer)
                return
        except Exception:
            self.fail(request)
            return
        if isinstance(answer, DeferredResponse):
            if self._request is request:
                self._deferred = answer
            return
        shared = self._shared
        task: asyncio.Task[None] = asyncio.Task(self._run(request, answer), loop=shared.loop, **_EAGER)
        if task.done():
            return
        shared.tasks.add(task)
        if self._request is request:
            self._task = task

    async def _run(self, request: Request, answer: Awaitable[Answer]) -> None:
        try:
            response = await answer
            if type(response) is Response:
                self.send(request, response)
            elif isinstance(response, StreamingResponse):
                response.finish()
            elif self._request is request and not self._closing:
                raise RuntimeError("the handler ended without an answer")
        except ConnectionResetError:
            if not self._lost.is_set():
                self.fail(request)
        except Exception:
            self.fail(request)
        except asyncio.CancelledError:
            # If the client is still there, this was not our doing: do not leave it waiting.
            if self._request is request and not self._closing:
                self.fail(request)
            raise
        finally:
            # Not by a callback of the task: that would be one more round of the loop for every request.
            self._shared.tasks.discard(asyncio.current_task())

    def _done(self, request: Request) -> None:
        """`request` is answered. A task that goes on (an ASGI app's background work) is no longer ours."""
        self._request = self._task = self._deferred = None
        if self._streaming is not None:
            self._streaming = None
            self._chunked = self._bodyless = False
            self._piece_budget = None
        self._since = self._shared.clock.now
        if not request.keep_alive:
            self._close()
        else:
            self._advance()

    def _write_response(self, request: Request, response: Response) -> None:
        status = response.status
        size = None if status in _BODYLESS else response.size
        data = response_head(
            status,
            response.content_type,
            response.headers,
            size,
            self._shared.clock.date,
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
        if self._shared.draining:
            request.keep_alive = False
        if not request.keep_alive:
            return "connection: close\r\n"
        return "connection: keep-alive\r\n" if request.http_version == "1.0" else ""

    def _refuse(self, refusal: Refusal) -> None:
        """Answer with an error and close, but go on reading for a moment.

        Closing with unread data makes the kernel send a reset, which may take the answer from the client.
        """
        self._closing = self._lingering = True
        self._since = self._shared.clock.now
        body = self._shared.options.refusal_body(refusal.status, refusal.message)
        date = self._shared.clock.date
        self._transport.write(
            response_head(refusal.status, JSON, (), len(body), date, "connection: close\r\n") + body
        )
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _close(self) -> None:
        self._closing = True
        self._transport.close()

    def _cancel(self) -> None:
        """The client is gone: whatever works for it shall stop."""
        task, deferred = self._task, self._deferred
        self._request = self._task = self._deferred = None
        self._parser.requests.clear()
        self._closing = True
        self._lost.set()
        if task is not None and not task.done():
            task.cancel()
        if deferred is not None:
            deferred.on_disconnect()
