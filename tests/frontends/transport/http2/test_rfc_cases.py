"""The cases that the conformance suites of RFC 9113 and RFC 7541 (h2spec) check, by section.

A case is the bytes that a client sends after the handshake, in steps, and the frame that must be among the responses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import hpack
import pytest
from http2_client import HEAD, TRAILERS, Client, frame

from neso.frontends.transport.http2 import ErrorCode as E
from neso.frontends.transport.http2 import Http2Stream, StreamEvents, frames
from neso.frontends.transport.http2.frames import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    FrameReader,
    window_update,
)
from neso.frontends.transport.http2.headers import Headers

END, END_HEADERS, PADDED, PRIO = 1, 4, 8, 0x20
MAX = 2**31 - 1

COMMON = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "127.0.0.1")]
POST = [(":method", "POST"), *COMMON[1:]]


def block(fields: list[tuple[str, str]], *, extra: bytes = b"", before: bytes = b"") -> bytes:
    encoder = hpack.Encoder()
    encoder.header_table_size = 0  # every block stands alone
    encoded: bytes = encoder.encode(fields)
    return before + encoded.removeprefix(b"\x20") + extra


def headers(
    number: int = 1,
    fields: list[tuple[str, str]] = COMMON,
    flags: int = END | END_HEADERS,
    extra: bytes = b"",
    before: bytes = b"",
) -> bytes:
    return frame(HEADERS, flags, number, block(fields, extra=extra, before=before))


def post(number: int = 1, *more: tuple[str, str]) -> bytes:
    """HEADERS of a request whose body follows."""
    return headers(number, [*POST, *more], END_HEADERS)


def continuation(number: int = 1, flags: int = END_HEADERS) -> bytes:
    return frame(CONTINUATION, flags, number, block([("x-dummy0", "x" * 50)]))


def data(number: int = 1, payload: bytes = b"test", flags: int = END) -> bytes:
    return frame(DATA, flags, number, payload)


def reset(number: int = 1, code: int = E.CANCEL) -> bytes:
    return frame(RST_STREAM, 0, number, code.to_bytes(4, "big"))


def setting(*pairs: tuple[int, int]) -> bytes:
    return frame(
        SETTINGS, 0, 0, b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in pairs)
    )


def priority(number: int = 1, depends_on: int = 0, weight: int = 255) -> bytes:
    return frame(PRIORITY, 0, number, depends_on.to_bytes(4, "big") + bytes([weight]))


def ping(payload: bytes = b"h2spec\0\0", flags: int = 0) -> bytes:
    return frame(PING, flags, 0, payload)


Frame = tuple[int, int, int, bytes]
Expected = Callable[[list[Frame], Client], bool]


def goaway(*codes: E) -> Expected:
    """The connection ends with one of the codes."""

    def check(got: list[Frame], client: Client) -> bool:
        found = [E(int.from_bytes(payload[4:8], "big")) for kind, _, _, payload in got if kind == GOAWAY]
        return client.transport.eof and bool(found) and found[-1] in codes

    return check


def stream_error(code: E, number: int = 1) -> Expected:
    def check(got: list[Frame], client: Client) -> bool:
        return (RST_STREAM, 0, number, code.to_bytes(4, "big")) in got and not client.transport.eof

    return check


def responds(number: int = 1) -> Expected:
    return lambda got, client: any(kind == HEADERS and stream == number for kind, _, stream, _ in got)


def acknowledges(payload: bytes = b"h2spec\0\0") -> Expected:
    return lambda got, client: (PING, 1, 0, payload) in got and not client.transport.eof


def sends_data(*sizes: int) -> Expected:
    return lambda got, client: [len(payload) for kind, _, _, payload in got if kind == DATA] == [*sizes]


def acknowledges_settings(got: list[Frame], client: Client) -> bool:
    return (SETTINGS, 1, 0, b"") in got and not client.transport.eof


@dataclass
class Case:
    section: str
    description: str
    steps: tuple[bytes, ...]
    expected: Expected
    max_streams: int = 256


def case(section: str, description: str, expected: Expected, *steps: bytes, max_streams: int = 256) -> Case:
    return Case(section, description, steps, expected, max_streams)


PROTOCOL, SIZE, FLOW = goaway(E.PROTOCOL_ERROR), goaway(E.FRAME_SIZE_ERROR), goaway(E.FLOW_CONTROL_ERROR)
COMPRESSION = goaway(E.COMPRESSION_ERROR)
MALFORMED = stream_error(E.PROTOCOL_ERROR)
UNKNOWN = frame(0x16, 0, 0, bytes(8))
NAME, NAME_HUFFMAN = b"\x06x-test", b"\x85\xf2\xb2\x4a\x84\xff"
VALUE, VALUE_HUFFMAN = b"\x06h2spec", b"\x84\x9c\x48\xac\xa4"
USER_AGENT, USER_AGENT_HUFFMAN = b"\x0auser-agent", b"\x87\xb5\x05\xb1\x61\xcc\x5a\x93"

CASES = [
    # Frames.
    case("4.1", "frame of unknown type", acknowledges(), UNKNOWN, ping()),
    case("4.1", "undefined flag", acknowledges(bytes(8)), frame(PING, 0x16, 0, bytes(8))),
    case("4.1", "reserved bit", acknowledges(bytes(8)), b"\0\0\x08\x06\0\x80\0\0\0" + bytes(8)),
    case("4.2", "DATA of 2^14 bytes", responds(), post(), data(payload=bytes(1 << 14))),
    case("4.2", "DATA beyond MAX_FRAME_SIZE", SIZE, post(), data(payload=bytes((128 << 10) + 1))),
    case("4.2", "HEADERS beyond MAX_FRAME_SIZE", SIZE, frame(HEADERS, 5, 1, bytes((128 << 10) + 1))),
    case("4.3", "invalid header block", COMPRESSION, frame(HEADERS, 5, 1, b"\x40")),
    case("4.3", "PRIORITY within a header block", PROTOCOL, headers(flags=0) + priority() + continuation()),
    case("4.3", "HEADERS within a header block", PROTOCOL, headers(flags=0) + headers(3) + continuation()),
    # Stream states.
    case("5.1", "idle: DATA", PROTOCOL, data()),
    case("5.1", "idle: RST_STREAM", PROTOCOL, reset()),
    case("5.1", "idle: WINDOW_UPDATE", PROTOCOL, window_update(1, 100)),
    case("5.1", "idle: CONTINUATION", PROTOCOL, continuation()),
    case("5.1", "half-closed: DATA", stream_error(E.STREAM_CLOSED), setting((4, 0)), headers() + data()),
    case(
        "5.1", "half-closed: HEADERS", stream_error(E.STREAM_CLOSED), setting((4, 0)), headers() + headers()
    ),
    case("5.1", "half-closed: CONTINUATION", PROTOCOL, setting((4, 0)), headers() + continuation()),
    case("5.1", "closed by RST_STREAM: DATA", stream_error(E.STREAM_CLOSED), post() + reset() + data()),
    case("5.1", "closed by RST_STREAM: HEADERS", goaway(E.STREAM_CLOSED), post() + reset() + headers()),
    case("5.1", "closed by RST_STREAM: CONTINUATION", PROTOCOL, post() + reset() + continuation()),
    case("5.1", "closed: DATA", stream_error(E.STREAM_CLOSED), headers(), data()),
    case("5.1", "closed: HEADERS", goaway(E.STREAM_CLOSED), headers(), headers()),
    case("5.1", "closed: CONTINUATION", PROTOCOL, headers(), continuation()),
    case("5.1.1", "even stream id", PROTOCOL, headers(2)),
    case("5.1.1", "smaller stream id", goaway(E.PROTOCOL_ERROR, E.STREAM_CLOSED), headers(5) + headers(3)),
    case(
        "5.1.2",
        "too many concurrent streams",
        stream_error(E.REFUSED_STREAM, 7),
        setting((4, 0)),
        headers(1) + headers(3) + headers(5) + headers(7),
        max_streams=3,
    ),
    case(
        "5.3.1",
        "HEADERS depends on itself",
        MALFORMED,
        frame(HEADERS, END | END_HEADERS | PRIO, 1, b"\0\0\0\1\xff" + block(COMMON)),
    ),
    case("5.3.1", "PRIORITY depends on itself", MALFORMED, priority(1, 1)),
    case("5.4.1", "connection errors close the connection", PROTOCOL, frame(PING, 0, 3, bytes(8))),
    case("5.5", "unknown extension frame", acknowledges(), UNKNOWN, ping()),
    case("5.5", "unknown frame within a header block", PROTOCOL, headers(flags=END) + UNKNOWN),
    # DATA and HEADERS.
    case("6.1", "DATA on stream 0", PROTOCOL, data(0)),
    case(
        "6.1",
        "DATA in a half-closed stream",
        stream_error(E.STREAM_CLOSED),
        setting((4, 0)),
        headers() + data(),
    ),
    case(
        "6.1",
        "DATA with invalid padding",
        PROTOCOL,
        post(1, ("content-length", "4")),
        frame(DATA, END | PADDED, 1, b"\x06Test"),
    ),
    case("6.2", "PRIORITY after HEADERS without END_HEADERS", PROTOCOL, headers(flags=0) + priority()),
    case("6.2", "HEADERS of another stream within a block", PROTOCOL, headers(flags=0) + headers(3)),
    case("6.2", "HEADERS on stream 0", PROTOCOL, headers(0)),
    case(
        "6.2",
        "HEADERS with invalid padding",
        PROTOCOL,
        frame(HEADERS, END | END_HEADERS | PADDED, 1, bytes([len(block(COMMON)) + 2]) + block(COMMON)),
    ),
    case("6.3", "PRIORITY on stream 0", PROTOCOL, priority(0)),
    case(
        "6.3",
        "PRIORITY of invalid length",
        stream_error(E.FRAME_SIZE_ERROR),
        headers() + frame(PRIORITY, 0, 1, b"\x80\0\0\1"),
    ),
    case("6.4", "RST_STREAM on stream 0", PROTOCOL, reset(0)),
    case("6.4", "RST_STREAM on an idle stream", PROTOCOL, reset(1)),
    case("6.4", "RST_STREAM of invalid length", SIZE, headers() + frame(RST_STREAM, 0, 1, bytes(3))),
    # SETTINGS.
    case("6.5", "ACK with a payload", SIZE, frame(SETTINGS, 1, 0, b"\0")),
    case("6.5", "SETTINGS on a stream", PROTOCOL, frame(SETTINGS, 0, 1, b"\0\3\0\0\0\x64")),
    case("6.5", "SETTINGS of invalid length", SIZE, frame(SETTINGS, 0, 0, b"\0\3\0")),
    case("6.5.2", "ENABLE_PUSH is 2", PROTOCOL, setting((2, 2))),
    case("6.5.2", "INITIAL_WINDOW_SIZE too large", FLOW, setting((4, 1 << 31))),
    case("6.5.2", "MAX_FRAME_SIZE too small", PROTOCOL, setting((5, 16_383))),
    case("6.5.2", "MAX_FRAME_SIZE too large", PROTOCOL, setting((5, 1 << 24))),
    case("6.5.2", "unknown setting", acknowledges(), setting((0xFF, 1)), ping()),
    case("6.5.3", "the last of several values applies", sends_data(1), setting((4, 100), (4, 1)), headers()),
    case("6.5.3", "SETTINGS are acknowledged", acknowledges_settings, setting((2, 0))),
    # PUSH_PROMISE, PING, GOAWAY.
    case("6.7", "PING", acknowledges(), ping()),
    case("6.7", "PING on a stream", PROTOCOL, frame(PING, 0, 1, bytes(8))),
    case("6.7", "PING of invalid length", SIZE, frame(PING, 0, 0, bytes(6))),
    case("6.8", "GOAWAY on a stream", PROTOCOL, frame(GOAWAY, 0, 1, bytes(8))),
    case("8.2", "PUSH_PROMISE of a client", PROTOCOL, frame(PUSH_PROMISE, 4, 1, b"\0\0\0\3" + block(COMMON))),
    # Flow control.
    case("6.9", "WINDOW_UPDATE of 0", PROTOCOL, window_update(0, 0)),
    case("6.9", "WINDOW_UPDATE of 0 on a stream", MALFORMED, post() + window_update(1, 0)),
    case("6.9", "WINDOW_UPDATE of invalid length", SIZE, frame(WINDOW_UPDATE, 0, 0, b"\0\0\1")),
    case("6.9.1", "responses stay within the window", sends_data(1), setting((4, 1)), headers()),
    case("6.9.1", "connection window too large", FLOW, window_update(0, MAX) + window_update(0, MAX)),
    case(
        "6.9.1",
        "stream window too large",
        stream_error(E.FLOW_CONTROL_ERROR),
        post() + window_update(1, MAX) + window_update(1, MAX),
    ),
    case(
        "6.9.2",
        "INITIAL_WINDOW_SIZE changes open streams",
        sends_data(1),
        setting((4, 0)),
        headers(),
        setting((4, 1)),
    ),
    case(
        "6.9.2",
        "windows become negative",
        sends_data(3, 1),
        setting((4, 3)),
        headers(),
        setting((4, 2)),
        window_update(1, 2),
    ),
    case("6.9.2", "INITIAL_WINDOW_SIZE too large", FLOW, frame(SETTINGS, 0, 0, b"\0\x04\x80\0\0\0")),
    # CONTINUATION.
    case(
        "6.10",
        "several CONTINUATION frames",
        responds(),
        headers(flags=END) + continuation(flags=0) + continuation(),
    ),
    case(
        "6.10", "DATA instead of CONTINUATION", PROTOCOL, headers(1, POST, 0) + continuation(flags=0) + data()
    ),
    case("6.10", "CONTINUATION on stream 0", PROTOCOL, headers(flags=END) + continuation(0)),
    case("6.10", "CONTINUATION after END_HEADERS", PROTOCOL, headers() + continuation()),
    case(
        "6.10",
        "CONTINUATION after CONTINUATION with END_HEADERS",
        PROTOCOL,
        headers(flags=END) + continuation() + continuation(),
    ),
    case("6.10", "CONTINUATION after DATA", PROTOCOL, post() + data() + continuation(flags=0)),
    case(
        "7",
        "GOAWAY with an unknown code",
        lambda got, client: client.transport.eof,
        frame(GOAWAY, 0, 0, bytes(7) + b"\xff"),
    ),
    case("7", "RST_STREAM with an unknown code", acknowledges(), post() + reset(1, 0xFF), ping()),
    # Requests.
    case(
        "8.1",
        "second HEADERS without END_STREAM",
        MALFORMED,
        post() + data(flags=0),
        headers(1, [("x-test", "ok")], 4),
    ),
    case("8.1.2", "upper-case header name", MALFORMED, headers(1, [*COMMON, ("X-TEST", "ok")])),
    case("8.1.2.1", "unknown pseudo-header", MALFORMED, headers(1, [*COMMON, (":test", "ok")])),
    case("8.1.2.1", "pseudo-header of responses", MALFORMED, headers(1, [*COMMON, (":status", "200")])),
    case(
        "8.1.2.1",
        "pseudo-header in trailers",
        MALFORMED,
        post() + data(flags=0),
        headers(1, [(":method", "POST")]),
    ),
    case("8.1.2.1", "pseudo-header after a header", MALFORMED, headers(1, [("x-test", "ok"), *COMMON])),
    case("8.1.2.2", "connection header", MALFORMED, headers(1, [*COMMON, ("connection", "keep-alive")])),
    case("8.1.2.2", "te other than trailers", MALFORMED, headers(1, [*COMMON, ("te", "trailers, deflate")])),
    case("8.1.2.3", "empty :path", MALFORMED, headers(1, [*COMMON[:2], (":path", ""), COMMON[3]])),
    case("8.1.2.3", "no :method", MALFORMED, headers(1, COMMON[1:])),
    case("8.1.2.3", "no :scheme", MALFORMED, headers(1, [COMMON[0], *COMMON[2:]])),
    case("8.1.2.3", "no :path", MALFORMED, headers(1, [*COMMON[:2], COMMON[3]])),
    case("8.1.2.3", "two :method", MALFORMED, headers(1, [*COMMON, COMMON[0]])),
    case("8.1.2.3", "two :scheme", MALFORMED, headers(1, [*COMMON, COMMON[1]])),
    case("8.1.2.3", "two :path", MALFORMED, headers(1, [*COMMON, COMMON[2]])),
    case("8.1.2.6", "content-length differs", MALFORMED, post(1, ("content-length", "1")) + data()),
    case(
        "8.1.2.6",
        "content-length differs from several frames",
        MALFORMED,
        post(1, ("content-length", "1")) + data(flags=0) + data(),
    ),
    # Frames that a server must accept.
    case("generic 2", "PRIORITY on an idle stream", acknowledges(), priority(), ping()),
    case(
        "generic 2",
        "WINDOW_UPDATE on a half-closed stream",
        sends_data(1),
        setting((4, 0)),
        headers(),
        window_update(1, 1),
    ),
    case(
        "generic 2",
        "PRIORITY on a half-closed stream",
        sends_data(1),
        setting((4, 0)),
        headers(),
        priority() + window_update(1, 1),
    ),
    case(
        "generic 2",
        "RST_STREAM on a half-closed stream",
        acknowledges(),
        setting((4, 0)),
        headers() + reset(),
        ping(),
    ),
    case("generic 2", "PRIORITY on a closed stream", acknowledges(), headers(), priority(), ping()),
    case("generic 3.1", "DATA", responds(), post() + data()),
    case("generic 3.1", "several DATA frames", responds(), post() + data(flags=0) + data()),
    case(
        "generic 3.1",
        "padded DATA",
        responds(),
        post() + frame(DATA, END | PADDED, 1, b"\x05test" + bytes(5)),
    ),
    case("generic 3.2", "HEADERS", responds(), headers()),
    case(
        "generic 3.2",
        "padded HEADERS",
        responds(),
        frame(HEADERS, END | END_HEADERS | PADDED, 1, b"\x08" + block(COMMON) + bytes(8)),
    ),
    case(
        "generic 3.2",
        "HEADERS with priority",
        responds(),
        frame(HEADERS, END | END_HEADERS | PRIO, 1, bytes(4) + b"\xff" + block(COMMON)),
    ),
    case("generic 3.3", "PRIORITY with weight 1", responds(), priority(weight=0) + headers()),
    case("generic 3.3", "PRIORITY with weight 256", responds(), priority(weight=255) + headers()),
    case("generic 3.3", "PRIORITY with a dependency", responds(), priority(3, 1, 0) + headers()),
    case("generic 3.3", "exclusive PRIORITY", responds(), priority(1, 1 << 31, 0) + headers()),
    case("generic 3.3", "PRIORITY of a later idle stream", responds(), priority(3) + headers(1)),
    case("generic 3.4", "RST_STREAM", acknowledges(), post() + reset(), ping()),
    case(
        "generic 3.5",
        "SETTINGS with all parameters",
        acknowledges_settings,
        setting((1, 4096), (2, 1), (3, 100), (4, 65_535), (5, 16_384), (6, 100)),
    ),
    case("generic 3.7", "PING with ACK gets no response", acknowledges(), ping(b"invalid\0", 1), ping()),
    case("generic 3.9", "WINDOW_UPDATE of the connection", acknowledges(), window_update(0, 1), ping()),
    case("generic 3.9", "WINDOW_UPDATE of a stream", responds(), headers() + window_update(1, 1)),
    case(
        "generic 3.10",
        "CONTINUATION",
        responds(),
        frame(HEADERS, END, 1, block(COMMON)[:5]) + frame(CONTINUATION, 4, 1, block(COMMON)[5:]),
    ),
    case(
        "generic 3.10",
        "two CONTINUATION frames",
        responds(),
        frame(HEADERS, END, 1, block(COMMON)[:5])
        + frame(CONTINUATION, 0, 1, block(COMMON)[5:10])
        + frame(CONTINUATION, 4, 1, block(COMMON)[10:]),
    ),
    case("generic 4", "HEAD request", responds(), headers(1, [(":method", "HEAD"), *COMMON[1:]])),
    case(
        "generic 4",
        "POST with trailers",
        responds(),
        post(1, ("trailer", "x-test")) + data(flags=0) + headers(1, [("x-test", "ok")]),
    ),
    # HPACK.
    case("hpack", "indexed field", responds(), headers(extra=b"\xba")),
    *(
        case("hpack", f"literal {kind}: {name}", responds(), headers(extra=bytes([first]) + representation))
        for kind, first in (("with indexing", 0x40), ("without indexing", 0x00), ("never indexed", 0x10))
        for name, representation in (
            ("known name", USER_AGENT + VALUE),
            ("known name, Huffman", USER_AGENT_HUFFMAN + VALUE_HUFFMAN),
            ("new name", NAME + VALUE),
            ("new name, Huffman", NAME_HUFFMAN + VALUE_HUFFMAN),
        )
    ),
    case("hpack", "table size update", responds(), headers(before=b"\x3f\x61")),
    case("hpack", "two table size updates", responds(), headers(before=b"\x3f\x61\x3f\xe1\x1f")),
    case("hpack 2.3.3", "indexed field with an invalid index", COMPRESSION, headers(extra=b"\xc6")),
    case("hpack 2.3.3", "literal with an invalid index", COMPRESSION, headers(extra=b"\x7f\x07\x00")),
    case("hpack 4.2", "table size update at the end of a block", COMPRESSION, headers(extra=b"\x21")),
    case(
        "hpack 5.2",
        "Huffman padding longer than 7 bits",
        COMPRESSION,
        headers(extra=b"\x00" + NAME_HUFFMAN + b"\x84\x49\x50\x9f\xff"),
    ),
    case(
        "hpack 5.2",
        "Huffman padding with zeros",
        COMPRESSION,
        headers(extra=b"\x00" + NAME_HUFFMAN + b"\x83\x49\x50\x90"),
    ),
    case(
        "hpack 5.2",
        "Huffman with EOS",
        COMPRESSION,
        headers(extra=b"\x00" + NAME_HUFFMAN + b"\x87\x49\x51\xff\xff\xff\xfa\x7f"),
    ),
    case("hpack 6.1", "index 0", COMPRESSION, headers(extra=b"\x80")),
    case("hpack 6.3", "table size beyond HEADER_TABLE_SIZE", COMPRESSION, headers(before=b"\x3f\xe2\x1f")),
]


class Answer:
    """Application that answers every request with five bytes."""

    def __call__(self, stream: Http2Stream, fields: Headers) -> StreamEvents:
        return AnswerEvents(stream)


class AnswerEvents:
    def __init__(self, stream: Http2Stream) -> None:
        self.stream = stream

    def on_data(self, data: bytes) -> None:
        self.stream.consumed(len(data))

    def on_end(self) -> None:
        self.stream.send(HEAD, b"hello", TRAILERS)

    def on_reset(self) -> None: ...


def received(client: Client) -> list[Frame]:
    reader = FrameReader(1 << 24)
    reader.preface_received = True
    return list(reader.feed(client.transport.take()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.section} {case.description}")
async def test_case(make, case):
    client = make(max_streams=case.max_streams)
    client.context.application = Answer()
    client.server.data_received(frames.PREFACE + setting())
    kind, flags, stream, _ = received(client)[0]
    assert (kind, flags, stream) == (SETTINGS, 0, 0)  # 3.5: the first frame of the server
    client.server.data_received(frame(SETTINGS, 1, 0))
    got: list[Frame] = []
    for step in case.steps:
        client.server.data_received(step)
        got += received(client)
    assert case.expected(got, client), [
        (kind, flags, stream, payload[:20]) for kind, flags, stream, payload in got
    ]


async def test_invalid_preface_closes_the_connection(make):
    client = make()
    client.server.data_received(b"INVALID CONNECTION PREFACE\r\n\r\n")
    assert client.transport.eof and not client.transport.written


def test_cases_are_distinct():
    names = [(case.section, case.description) for case in CASES]
    assert len(names) == len(set(names)) > 130
