"""One HTTP request, complete with its body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httptools

if TYPE_CHECKING:
    from neso.frontends.http.connection import HttpConnection


class Request:
    """What a client sent. Header names are lower case; a repeated header is one value, joined by commas.

    `begun`: when its first bytes came, in ns of the monotonic clock; 0: not told. `params` holds what the router took
    from the path, percent-decoded. `trace` is for those who handle it to use. `connection` is where the answer goes.
    """

    __slots__ = (
        "begun",
        "body",
        "connection",
        "headers",
        "http_version",
        "keep_alive",
        "method",
        "params",
        "query",
        "raw_path",
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
        self.begun = 0
        self.trace: Any = None

    @property
    def path(self) -> str:
        """The path, percent-decoded: for people and for ASGI. The router decodes segment by segment."""
        return decode_path(self.raw_path)

    def header(self, name: str) -> str | None:
        """The value of a header, None where it is absent."""
        value = self.headers.get(name.lower().encode())
        return None if value is None else value.decode("latin-1")

    def header_items(self) -> Iterator[tuple[str, str]]:
        """Name and value of every header."""
        for name, value in self.headers.items():
            yield name.decode("latin-1"), value.decode("latin-1")

    def __repr__(self) -> str:
        return f"<Request {self.method} {self.path} body={len(self.body)}>"


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """Path and query of a request target, absolute ones (`http://host/path`) too. Raises `ValueError`."""
    if not target.startswith(b"/") and target != b"*":
        try:
            url = httptools.parse_url(target)
        except httptools.HttpParserError as error:
            raise ValueError("malformed request target") from error
        return url.path or b"/", url.query or b""
    path, _, query = target.partition(b"?")
    return path, query.partition(b"#")[0]


def decode_path(raw: bytes) -> str:
    """Percent-decode; bytes that are no UTF-8 become U+FFFD."""
    text = raw.decode("utf-8", "replace")
    return unquote(text) if "%" in text else text
