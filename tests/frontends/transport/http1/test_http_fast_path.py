"""Fast path of the HTTP parser (C++): equal results to the full parser, and used for requests of common clients."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neso._wire import parse_plain_request
from neso.frontends.transport.http1 import HttpServerOptions
from neso.frontends.transport.http1.parser import RequestParser

LIMITS = HttpServerOptions(max_body=64, max_head=400)

_heads = st.lists(
    st.sampled_from(
        [
            b"Host: x",
            b"host:x",
            b"Content-Length: 5",
            b"content-length: 05",
            b"Content-Length: 5, 5",
            b"Content-Length: -5",
            b"Content-Length: +5",
            b"Content-Length: 99999999999999999999",
            b"Content-Length: 65",
            b"Content-Type:  application/json ",
            b"Connection: keep-alive",
            b"Connection: close",
            b"Connection: upgrade",
            b"Transfer-Encoding: chunked",
            b"Expect: 100-continue",
            b"Upgrade: h2c",
            b"X-Y: a\tb",
            b"X-Y: \xe4",
            b"X-Y: a\x00b",
            b"X-Y : a",
            b" X-Y: folded",
            b"X-Y: " + b"z" * 400,
            b": empty",
            b"no colon",
            b"X-Y:",
            b"Accept-Encoding: gzip",
        ]
    ),
    max_size=5,
)
_lines = st.sampled_from(
    [
        b"POST /v2/models/m/infer HTTP/1.1",
        b"GET /v2 HTTP/1.1",
        b"HEAD /v2 HTTP/1.1",
        b"GET /v2?x=1 HTTP/1.1",
        b"GET /a%2Fb HTTP/1.1",
        b"GET http://x/v2 HTTP/1.1",
        b"GET  /v2 HTTP/1.1",
        b"get /v2 HTTP/1.1",
        b"GET /v2 HTTP/1.0",
        b"GET /v2 HTTP/1.2",
        b"GET /v2",
        b"GET /\xe4 HTTP/1.1",
        b"",
    ]
)


def outcome(pieces: list[bytes], *, plain: bool) -> object:
    """Result of parsing `data`, in comparable form."""
    parser = RequestParser(LIMITS)
    parser._use_fast_path = plain
    for piece in pieces:
        parser.feed(piece)
    requests = [
        (r.method, r.raw_path, r.query, r.headers, r.body, r.http_version, r.keep_alive)
        for r in parser.requests
    ]
    return requests, parser.rejection, parser.phase, parser.expects_continue


@settings(max_examples=500, deadline=None)
@given(_lines, _heads, st.sampled_from([b"\r\n", b"\n"]), st.binary(max_size=8), st.integers(0, 60))
def test_fast_path_equals_full_parser(
    line: bytes, heads: list[bytes], end: bytes, body: bytes, cut: int
) -> None:
    data = end.join([line, *heads, b"", b""]) + body
    assert outcome([data], plain=True) == outcome([data], plain=False)
    pieces = [data[:cut], data[cut:]]
    assert outcome(pieces, plain=True) == outcome(pieces, plain=False)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 70), st.binary(min_size=1, max_size=2))
def test_fast_path_equals_full_parser_on_corrupted_requests(at: int, noise: bytes) -> None:
    data = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    data = data[:at] + noise + data[at + len(noise) :]
    assert outcome([data], plain=True) == outcome([data], plain=False)


def test_fast_path_is_off_after_a_partial_request() -> None:
    plain = b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n"
    pieces = [b"GE", plain]
    assert outcome(pieces, plain=True) == outcome(pieces, plain=False)


@pytest.mark.parametrize(
    "head",
    [
        b"User-Agent: python-urllib3/2\r\nConnection: keep-alive\r\nAccept: */*\r\n",
        b"Content-Type: application/json\r\n",
        b"Inference-Header-Content-Length: 3\r\n",
    ],
)
def test_common_clients_take_the_fast_path(head: bytes) -> None:
    data = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x:8000\r\n" + head + b"Content-Length: 3\r\n\r\n{ }"
    found = parse_plain_request(data, 4096, 4096)
    assert found is not None
    assert found[0] == "POST"
    assert found[1] == b"/v2/models/m/infer"
    assert found[2][b"content-length"] == b"3"
    assert found[3] == b"{ }"
