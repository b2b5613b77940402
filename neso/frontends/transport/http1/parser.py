"""HTTP/1.x request parser with size limits, independent of I/O."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import httptools

from neso._wire import parse_plain_request
from neso.frontends.transport.http1.messages import Request, split_target

if TYPE_CHECKING:
    from neso.frontends.transport.http1.server import HttpServerOptions


class Phase(Enum):
    """Part of a request that is expected next."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"


IDLE, HEAD, BODY = Phase  # globals, since lookup of enum members is slow

# `uri-host [":" port]` of RFC 9110, section 7.2, without the comma, which joins repeated fields. Can be empty.
_HOST = re.compile(rb"(?:[A-Za-z0-9\-._~!$&'()*+;=%]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")


@dataclass(frozen=True, slots=True)
class Rejection:
    """Error response to the next request of a connection. No bytes after that request are parsed.

    `target` and `headers`: those of the request, if it was rejected after its headers were received.
    """

    status: int
    message: str
    target: bytes = field(default=b"", compare=False)
    headers: Mapping[bytes, bytes] = field(default_factory=dict, compare=False)


_SMALL_PART = 4096
"""Parts of a body below this size, in bytes, are joined as they arrive."""


class RequestParser:
    """Incremental parser: `feed` appends complete requests to `requests`, in order.

    `rejection` is set by the first invalid or unsupported request; the requests before it stay in `requests`. Bytes
    after a request that closes the connection are ignored.
    """

    def __init__(self, options: HttpServerOptions) -> None:
        self.requests: deque[Request] = deque()
        self.rejection: Rejection | None = None
        self.phase = IDLE
        self.expects_continue = False
        self._max_body = options.max_body
        self._max_head = options.max_head
        self._parser: Any = httptools.HttpRequestParser(self)
        # httptools may hold part of the next request after it has received bytes.
        self._use_fast_path = True
        self._ended = False
        self._valid_host = b""  # the last valid value of Host; clients repeat it in every request
        self._head_started = False
        self._received_ns = 0
        self._fed = 0
        self._head_size = 0
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes | bytearray] = []
        self.body_size = 0
        """Bytes of the current body, or of the last one, that have arrived."""
        self.body_length: int | None = None
        """Content-Length of the current body, or of the last one; None if the request has none."""
        self.num_bodies = 0
        """Number of requests whose body has begun."""
        self._version = "1.1"
        self._upgrade = False

    def feed(self, data: bytes) -> None:
        """Parse received bytes. Never raises; sets `rejection` on errors."""
        if self._ended or self.rejection is not None:
            return
        if self._use_fast_path and (fast := parse_plain_request(data, self._max_head, self._max_body)):
            method, target, headers, body = fast
            if headers[b"host"] != self._valid_host and not self._is_valid_host(headers[b"host"]):
                self._reject(400, "malformed Host header")
                return
            self.requests.append(Request(method, target, b"", headers, body))
            return
        self._use_fast_path = False
        in_head = self.phase is HEAD
        self._head_started = False
        self._fed = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._upgrade:
                self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if self.rejection is None and not self._ended:
                self._reject(400, "malformed HTTP request")
        if in_head and self.phase is HEAD and not self._head_started:
            # The exact check runs at the end of the head. Until then the C parser buffers a growing field
            # internally, so only received bytes that certainly belong to this head are counted.
            self._head_size += len(data)
            if self._head_size > 2 * self._max_head and self.rejection is None:
                self._reject(431, "request header fields too large")

    def close(self) -> None:
        """Drop pending requests and ignore further bytes."""
        self._ended = True
        self.requests.clear()
        self._body.clear()
        self._parser = None  # refers to this object

    def reject(self, rejection: Rejection) -> None:
        """Reject the current request."""
        self.rejection = rejection
        self._body.clear()

    def _reject(self, status: int, message: str) -> None:
        self.reject(Rejection(status, message, self._target, self._headers))

    def _stop(self, status: int, message: str) -> NoReturn:
        """Reject from within a callback; the exception stops the C parser."""
        self._reject(status, message)
        raise ValueError(message)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Continue without the upgrade. Java's HTTP client offers h2c in its first request, which may have a body.

        The C parser skips the body of an upgrade request, so a new parser parses the head without the Upgrade header.
        """
        method = self._parser.get_method()
        self._parser = httptools.HttpRequestParser(self)
        fields = b"".join(
            name + b": " + value + b"\r\n" for name, value in self._headers.items() if name != b"upgrade"
        )
        head = method + b" " + self._target + b" HTTP/1.1\r\n" + fields + b"\r\n"
        self.phase = IDLE
        self.feed(head + rest)

    # Callbacks of the C parser, in the order of a request.

    def on_url(self, part: bytes) -> None:
        if self.phase is HEAD:
            self._target += part
            return
        self.phase = HEAD
        self._head_started = True
        self._received_ns = time.monotonic_ns()
        self._head_size = 0
        self._target = part
        self._headers = {}
        self.body_size = 0
        self.body_length = None
        self._upgrade = False

    def on_header(self, name: bytes, value: bytes | None) -> None:
        if self.phase is not HEAD:
            return  # trailers of a chunked body are ignored
        headers = self._headers
        name = name.lower()
        value = value.rstrip() if value else b""  # the C parser strips leading whitespace only
        if name not in headers:
            headers[name] = value
        elif name == b"host":
            self._stop(400, "more than one Host header")
        elif value:
            headers[name] += (b"; " if name == b"cookie" else b", ") + value

    def on_headers_complete(self) -> None:
        headers = self._headers
        if self._head_size + self._fed > self._max_head:
            self._check_head_size()
        self._version = self._parser.get_http_version()
        if b"upgrade" in headers and self._parser.should_upgrade():
            self._upgrade = True
            return
        if self._version != "1.1":
            if self._version != "1.0":
                self._stop(505, "HTTP version not supported")
        elif b"host" not in headers:
            self._stop(400, "missing Host header")
        if b"host" in headers and not self._is_valid_host(headers[b"host"]):
            self._stop(400, "malformed Host header")
        if b"transfer-encoding" in headers:
            # Proxies and servers that disagree on the end of such a request enable request smuggling.
            if self._version == "1.0":
                self._stop(400, "Transfer-Encoding in an HTTP/1.0 request")
            if headers[b"transfer-encoding"].lower() != b"chunked":
                self._stop(400, "unsupported Transfer-Encoding, expected 'chunked'")
        if b"content-length" in headers:
            length = int(headers[b"content-length"])
            if length > self._max_body:
                self._stop(413, f"request body of {length} bytes exceeds the limit of {self._max_body}")
            self.body_length = length
        if b"expect" in headers and self._version == "1.1":
            if headers[b"expect"].lower() != b"100-continue":
                self._stop(417, "unknown expectation")
            self.expects_continue = True
        self.phase = BODY
        self.num_bodies += 1

    def _is_valid_host(self, host: bytes) -> bool:
        if _HOST.fullmatch(host) is None:
            return False
        self._valid_host = host
        return True

    def _check_head_size(self) -> None:
        """Check the exact size of the header fields; the received bytes are only an upper bound."""
        size = len(self._target)
        for name, value in self._headers.items():
            size += len(name) + len(value) + 3
        if size > self._max_head:
            self._stop(431, "request header fields too large")

    def on_body(self, part: bytes) -> None:
        self.expects_continue = False
        self.body_size += len(part)
        if self.body_size > self._max_body:
            self._stop(413, f"request body exceeds the limit of {self._max_body} bytes")
        body = self._body
        if body and len(part) < _SMALL_PART:
            # An object for each tiny chunk would take many times the memory of the body.
            if isinstance(body[-1], bytearray):
                body[-1] += part
            else:
                body.append(bytearray(part))
        else:
            body.append(part)

    def on_message_complete(self) -> None:
        if self._upgrade:
            return
        self.phase = IDLE
        self.expects_continue = False
        parser = self._parser
        method = parser.get_method().decode()
        path, query = self._target, b""
        if path[:1] != b"/" or b"?" in path or b"#" in path:
            path, query = self._split_target(method)
        body = self._body
        keep_alive = parser.should_keep_alive()
        request = Request(
            method,
            path,
            query,
            self._headers,
            b"" if not body else bytes(body[0]) if len(body) == 1 else b"".join(body),
            self._version,
            keep_alive,
        )
        request.received_ns = self._received_ns
        self.requests.append(request)
        if body:
            self._body = []
        if not keep_alive:
            self._ended = True

    def _split_target(self, method: str) -> tuple[bytes, bytes]:
        if method == "CONNECT":
            self._stop(501, "CONNECT is not supported")
        try:
            return split_target(self._target)
        except ValueError:
            self._stop(400, "malformed request target")
