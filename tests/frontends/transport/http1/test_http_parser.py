"""HTTP/1.x parser: independence of how bytes are split, and limits."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neso.frontends.transport.http1.parser import Phase, RequestParser
from neso.frontends.transport.http1.server import HttpServerOptions

SMALL = HttpServerOptions(max_body=1000, max_head=500)

GET = b"GET /a%20b?x=1 HTTP/1.1\r\nHost: h\r\nX-Y:  z \r\nX-Y: w\r\n\r\n"
POST = b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTrailer: T\r\n\r\n"
    b"3\r\nabc\r\nA;ext=1\r\n0123456789\r\n0\r\nT: trailer\r\n\r\n"
)
CONTINUE = b"PUT /e HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok"
EMPTY = b"GET /empty HTTP/1.1\r\nHost:\r\nAccept: */*\r\n\r\n"
UPGRADE = (
    b"POST /u HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAM\r\nContent-Length: 4\r\n\r\nbody"
)
ABSOLUTE = b"GET http://h:80/abs?q HTTP/1.1\r\nHost: h\r\n\r\n"
OLD = b"GET /old HTTP/1.0\r\n\r\n"
MALFORMED = b"NONSENSE\r\n\r\n"
TOO_LARGE = b"POST /l HTTP/1.1\r\nHost: h\r\nContent-Length: 1001\r\n\r\n" + b"x" * 1001


def parse(pieces: list[bytes], options: HttpServerOptions = SMALL) -> tuple[Any, ...]:
    parser = RequestParser(options)
    for piece in pieces:
        parser.feed(piece)
    requests = [
        (r.method, r.path, r.query, r.headers, r.body, r.http_version, r.keep_alive) for r in parser.requests
    ]
    return requests, parser.rejection, parser.phase


def test_complete_requests() -> None:
    requests, rejection, phase = parse([GET + POST + CHUNKED + CONTINUE + EMPTY + ABSOLUTE])
    assert rejection is None and phase is Phase.IDLE
    assert requests[0] == (
        "GET",
        "/a b",
        b"x=1",
        {b"host": b"h", b"x-y": b"z, w"},
        b"",
        "1.1",
        True,
    )
    assert requests[1][4] == b"hello"
    assert requests[2][4] == b"abc0123456789" and b"t" not in requests[2][3]
    assert requests[3][4] == b"ok"
    assert requests[4][3] == {b"host": b"", b"accept": b"*/*"}
    assert requests[5][1:3] == ("/abs", b"q")


def test_upgrade_is_ignored_and_its_body_is_read() -> None:
    requests, rejection, _ = parse([UPGRADE + GET])
    assert rejection is None
    assert [r[1] for r in requests] == ["/u", "/a b"]
    assert requests[0][4] == b"body"


@given(
    st.lists(st.sampled_from([GET, POST, CHUNKED, CONTINUE, EMPTY, ABSOLUTE, UPGRADE]), max_size=4),
    st.sampled_from([b"", OLD, MALFORMED, TOO_LARGE, GET[:20], POST[:-2]]),
    st.lists(st.integers(0, 2000), max_size=12),
)
def test_parsing_does_not_depend_on_splits(messages: list[bytes], end: bytes, cuts: list[int]) -> None:
    data = b"".join(messages) + end
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(places) if a < b]
    assert parse(pieces) == parse([data])
    assert parse([data[i : i + 1] for i in range(len(data))]) == parse([data])


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (MALFORMED, 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),  # TLS ClientHello
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/3.0\r\nHost: h\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: abc\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        # Two framings at once: request smuggling.
        (
            b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"GET / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        (
            b"GET / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nHost:\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: user@h\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h/path\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h:80x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: [::1\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nHost: a, b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nA\x00B: c\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
        (b"CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: h\r\nExpect: tea\r\n\r\n", 417),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 600 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 600 + b" HTTP/1.1\r\nHost: h\r\n\r\n", 431),
        (TOO_LARGE, 413),
        (
            b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3E9\r\n"
            + b"x" * 1001
            + b"\r\n",
            413,
        ),
    ],
)
def test_rejections(data: bytes, status: int) -> None:
    requests, rejection, _ = parse([data])
    assert requests == []
    assert rejection is not None and rejection.status == status
    # Requests before a rejection are kept, bytes after it are ignored.
    requests, rejection, _ = parse([GET + data + GET])
    assert len(requests) == 1 and rejection is not None and rejection.status == status


@pytest.mark.parametrize(
    "host", [b"h", b"", b"h:8000", b"[::1]:8000", b"a-b_c.example.com.", b"1.2.3.4:80", b"h:"]
)
def test_valid_hosts_are_accepted(host: bytes) -> None:
    request = b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"
    for pieces in ([request], [request[:20], request[20:]]):  # the fast path and the full parser
        requests, rejection, _ = parse(pieces)
        assert rejection is None and requests[0][3] == {b"host": host}


def test_endless_head_is_rejected() -> None:
    parser = RequestParser(SMALL)
    parser.feed(b"GET / HTTP/1.1\r\nHost: h\r\nX: ")
    fed = 0
    while parser.rejection is None and fed < 10_000:
        parser.feed(b"x" * 50)
        fed += 50
    assert parser.rejection is not None and parser.rejection.status == 431
    assert fed < 1500


def test_bytes_after_a_closing_request_are_ignored() -> None:
    requests, rejection, _ = parse([b"GET /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" + GET])
    assert [r[1] for r in requests] == ["/x"] and rejection is None


@given(st.binary(max_size=400))
def test_feed_never_raises(data: bytes) -> None:
    parse([data, data])


def test_memory_of_a_body_in_tiny_chunks() -> None:
    parser = RequestParser(HttpServerOptions())
    parser.feed(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"2\r\nab\r\n" * 1000
    tracemalloc.start()
    try:
        for _ in range(100):
            parser.feed(chunk)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 2 * 200_000
    parser.feed(b"0\r\n\r\n")
    assert parser.requests[0].body == b"ab" * 100_000
