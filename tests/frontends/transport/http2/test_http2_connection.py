"""HTTP/2 connections with h2 as the client: streams, flow control, settings, errors and graceful shutdown."""

from __future__ import annotations

import asyncio
import gc
import weakref

import h2.events
import h2.settings
import pytest
from eventually import until
from http2_client import HEAD, POST, REQUEST, TRAILERS, frame

from neso.frontends.transport.http2 import ErrorCode, encode_headers, frames
from neso.frontends.transport.http2.frames import MAX_WINDOW, frame_header, window_update
from neso.frontends.transport.memory import MemoryAccount
from neso.frontends.transport.tcp import Turn

Code = h2.settings.SettingCodes
pytestmark = pytest.mark.usefixtures("virtual_time")


async def test_requests_get_responses(client):
    numbers = [client.request(b"%d" % i) for i in range(100)]
    assert [client.body(number) for number in numbers] == [b"%d" % i for i in range(100)]
    assert len(client.of(h2.events.TrailersReceived)) == len(client.of(h2.events.StreamEnded)) == 100
    assert not client.server.streams


async def test_frames_sent_byte_by_byte(client):
    client.h2.send_headers(1, REQUEST)
    client.h2.send_data(1, b"hello", end_stream=True)
    for byte in client.h2.data_to_send():
        client.server.data_received(bytes([byte]))
    client.pump()
    assert client.body(1) == b"hello"


async def test_responses_to_one_read_are_sent_in_one_write(client, monkeypatch):
    writes = []
    monkeypatch.setattr(client.transport, "write", writes.append)
    for number in range(1, 21, 2):
        client.h2.send_headers(number, REQUEST)
        client.h2.send_data(number, b"x", end_stream=True)
    client.server.data_received(client.h2.data_to_send())
    assert len(writes) == 1


async def test_trailers_and_padding_and_priority(client):
    client.h2.send_headers(1, REQUEST, priority_weight=3)
    client.h2.send_data(1, b"abc", pad_length=200)
    client.h2.send_headers(1, [("checksum", "1")], end_stream=True)
    client.pump()
    assert client.body(1) == b"abc"


async def test_large_bodies_within_the_windows(client):
    body = bytes(range(256)) * 40_000  # 10 MB: more than the stream's window
    client.h2.send_headers(1, REQUEST)
    at = 0
    while at < len(body):
        size = min(client.h2.local_flow_control_window(1), client.h2.max_outbound_frame_size, len(body) - at)
        assert size > 0
        client.h2.send_data(1, body[at : at + size])
        at += size
        client.pump()
    client.h2.end_stream(1)
    client.pump()
    while not client.of(h2.events.StreamEnded):
        client.h2.increment_flow_control_window(65_535)
        client.h2.increment_flow_control_window(65_535, 1)
        client.pump()
    assert client.body(1) == body
    assert client.server.queued == 0


async def test_negative_stream_window(client):
    client.h2.increment_flow_control_window(1 << 20)
    number = client.request(bytes(50_000), end=False)
    client.h2.update_settings({Code.INITIAL_WINDOW_SIZE: 10})
    client.pump()
    client.h2.end_stream(number)
    client.pump()
    assert len(client.body(number)) == 10
    client.h2.update_settings({Code.INITIAL_WINDOW_SIZE: 0})
    client.pump()
    assert client.server.streams[number].send_window == -10
    client.h2.increment_flow_control_window(10, number)
    client.pump()
    assert len(client.body(number)) == 10
    client.h2.increment_flow_control_window(60_000, number)
    client.pump()
    assert len(client.body(number)) == 50_000


async def test_streams_send_round_robin(client):
    client.h2.update_settings({Code.INITIAL_WINDOW_SIZE: 1 << 20})
    client.pump()
    numbers = [client.request(bytes(60_000)) for _ in range(4)]
    client.h2.increment_flow_control_window(500_000)
    client.pump()
    assert [len(client.body(number)) for number in numbers] == [60_000] * 4


async def test_response_before_the_end_of_the_request_resets_the_stream(client):
    number = client.request(b"x", end=False)
    client.echo.streams[number].send(HEAD, b"early", TRAILERS)
    client.pump()
    assert client.body(number) == b"early"
    assert client.resets() == {number: ErrorCode.NO_ERROR}
    assert not client.server.streams


async def test_a_smaller_header_table_is_acknowledged(client):
    client.h2.update_settings({Code.HEADER_TABLE_SIZE: 0})
    client.pump()
    assert client.body(client.request(b"1")) == b"1"  # h2's decoder raises without the update
    assert client.body(client.request(b"2")) == b"2"


async def test_large_header_blocks_use_continuation_frames(client):
    number = client.request(b"", end=False)
    large = encode_headers([(b":status", b"200"), (b"x", b"v" * 40_000)])
    client.echo.streams[number].send(large, b"", encode_headers([(b"a", b"b")]))
    client.pump()
    [response] = client.of(h2.events.ResponseReceived)
    assert dict(response.headers)["x"] == "v" * 40_000


# Stream errors.


@pytest.mark.parametrize(
    "headers",
    [
        [(":method", "POST"), (":path", "/")],
        [(":method", "POST"), (":scheme", "http")],
        [(":method", "POST"), (":scheme", "http"), (":path", "")],
        [(":method", "POST"), (":method", "GET"), (":scheme", "http"), (":path", "/")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":status", "200")],
        [(":method", "POST"), (":scheme", "http"), ("a", "b"), (":path", "/")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("Upper", "x")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("", "x")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("a", "x\r\nb: c")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("connection", "close")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("transfer-encoding", "chunked")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("te", "gzip")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("content-length", "-1")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("content-length", "3")],
    ],
)
async def test_malformed_request_resets_only_its_stream(client, headers):
    block = encode_headers([(name.encode(), value.encode()) for name, value in headers])
    client.server.data_received(frame(frames.HEADERS, 5, 1, block))
    assert client.transport.take() == frames.reset_frame(1, ErrorCode.PROTOCOL_ERROR)
    client.h2.highest_outbound_stream_id = 1
    assert client.echo.log == []
    assert client.body(client.request(b"next")) == b"next"


@pytest.mark.parametrize(("length", "body"), [(2, b"abc"), (4, b"abc")])
async def test_body_length_differs_from_content_length(client, length, body):
    number = client.request(b"", [*REQUEST, ("content-length", str(length))], end=False)
    client.raw(frame(frames.DATA, 1, number, body))
    assert client.resets() == {number: ErrorCode.PROTOCOL_ERROR}
    assert client.echo.of("reset") == [number]


async def test_data_and_headers_after_end_stream(client):
    client.echo.hold = True
    first, second = client.request(b"x"), client.request(b"x")
    client.raw(frame(frames.DATA, 0, first, b"y"))
    client.raw(frame(frames.HEADERS, 5, second, POST))
    assert client.resets() == {first: ErrorCode.STREAM_CLOSED, second: ErrorCode.STREAM_CLOSED}
    client.echo.hold = False
    assert client.body(client.request(b"next")) == b"next"


async def test_stream_window_exceeded(make):
    client = make(stream_window=65_535).greet()
    number = client.request(b"", end=False)
    piece = bytes(16_384)
    client.echo.streams[number].events.on_data = lambda data: None  # consumes nothing
    client.raw(*(frame(frames.DATA, 0, number, piece) for _ in range(4)))
    assert client.resets() == {number: ErrorCode.FLOW_CONTROL_ERROR}


async def test_stream_window_overflow(client):
    client.echo.hold = True
    first, second = client.request(b"x"), client.request(b"x")
    client.raw(window_update(first, 0))
    client.raw(window_update(second, MAX_WINDOW))
    assert client.resets() == {first: ErrorCode.PROTOCOL_ERROR, second: ErrorCode.FLOW_CONTROL_ERROR}
    assert client.echo.of("reset") == [first, second]


async def test_reset_drops_queued_data(client):
    number = client.request(bytes(60_000), end=False)
    client.h2.send_data(number, bytes(5000), end_stream=True)
    client.pump()
    client.h2.increment_flow_control_window(1 << 20)
    client.pump()
    waiting = client.request(bytes(65_000), end=False)
    client.h2.increment_flow_control_window(1 << 20, waiting)
    client.h2.reset_stream(waiting, 8)
    client.pump()
    assert client.echo.of("reset") == [waiting]
    assert not client.server.streams and not client.server.queued


async def test_late_frames_on_closed_streams_are_ignored(client):
    number = client.request(b"x")
    client.raw(
        window_update(number, 5),
        frames.reset_frame(number, ErrorCode.CANCEL),
        frame(frames.DATA, 1, number, b"x"),
    )
    block = encode_headers([(b"late", b"trailer")])
    client.raw(frame(frames.HEADERS, 5, number, block))
    assert client.body(client.request(b"next")) == b"next"


async def test_stream_limit(make):
    client = make(max_streams=2).greet()
    assert client.h2.remote_settings.max_concurrent_streams == 2
    client.echo.hold = True
    client.server.data_received(b"".join(frame(frames.HEADERS, 5, number, POST) for number in (1, 3, 5)))
    assert client.transport.take() == frames.reset_frame(5, ErrorCode.REFUSED_STREAM)
    assert client.echo.of("begin") == [1, 3]


async def test_requests_are_refused_while_too_much_data_is_queued(make):
    client = make(max_queued=100_000).greet()
    client.h2.update_settings({Code.INITIAL_WINDOW_SIZE: 0})
    client.pump()
    for _ in range(3):
        client.request(bytes(50_000))
        client.h2.increment_flow_control_window(50_000)
    assert client.server.queued == 150_000
    refused = client.request(b"one more")
    assert client.resets() == {refused: ErrorCode.REFUSED_STREAM}
    for number in (1, 3, 5):
        client.h2.increment_flow_control_window(50_000, number)
    client.h2.increment_flow_control_window(1 << 20)
    client.pump()
    assert client.server.queued == 0
    again = client.request(b"again")
    client.h2.increment_flow_control_window(10, again)
    client.pump()
    assert client.body(again) == b"again"


# Connection errors.


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(frames.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.DATA, frames.PADDED, 1, b""), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.DATA, frames.PADDED, 1, b"\x05abc"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 5, 0, POST), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 5, 2, POST), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 5, 1, b"\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (frame(frames.HEADERS, 5, 1, b"\x3f\xff\xff\x03" + POST), ErrorCode.COMPRESSION_ERROR),
        (frame(frames.HEADERS, 5 | frames.HAS_PRIORITY, 1, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.HEADERS, 1, 1, POST) + frame(frames.PING, 0, 0, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 1, 1, POST) + frame(frames.CONTINUATION, 4, 3), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.CONTINUATION, 4, 1), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.RST_STREAM, 0, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.RST_STREAM, 0, 1, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, frames.ACK, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, 0, 0, b"\0\2\0\0\0\2"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.SETTINGS, 0, 0, b"\0\4\xff\0\0\0"), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(frames.SETTINGS, 0, 0, b"\0\5\0\0\0\1"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PUSH_PROMISE, 4, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 1, b"\0\0\0\1"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), ErrorCode.FLOW_CONTROL_ERROR),
        (frame_header(200_000, frames.DATA, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
    ],
)
async def test_invalid_frames_close_the_connection(client, data, code):
    client.raw(data)
    assert client.goaway()[0] == code
    assert client.transport.eof


async def test_stream_ids_must_increase(client):
    client.request(b""), client.request(b"")
    client.raw(frame(frames.HEADERS, 5, 1, POST))
    assert client.goaway()[0] == ErrorCode.STREAM_CLOSED


async def test_window_overflow_by_settings(client):
    client.echo.hold = True
    number = client.request(b"x")
    client.raw(window_update(number, MAX_WINDOW - 65_535))
    client.raw(frame(frames.SETTINGS, 0, 0, b"\0\4\0\1\0\0"))
    assert client.goaway()[0] == ErrorCode.FLOW_CONTROL_ERROR
    assert client.echo.of("reset") == [number]


async def test_connection_window_exceeded(make):
    client = make(connection_window=65_535, stream_window=1 << 20).greet()
    number = client.request(b"", end=False)
    client.raw(frame(frames.DATA, 0, number, bytes(70_000)))
    assert client.goaway()[0] == ErrorCode.FLOW_CONTROL_ERROR


async def test_first_frame_must_be_settings(make):
    client = make()
    client.h2.initiate_connection()
    client.raw(frames.PREFACE + frame(frames.PING, 0, 0, bytes(8)))
    assert client.goaway()[0] == ErrorCode.PROTOCOL_ERROR


async def test_http1_client_gets_an_error_response(make):
    client = make()
    for byte in b"POST /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n":
        client.server.data_received(bytes([byte]))
    head, _, text = bytes(client.transport.written).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"Content-Length: %d" % len(text) in head
    assert client.transport.eof


async def test_non_http_connection_is_closed_silently(make):
    client = make()
    client.server.data_received(b"\x16\x03\x01\x02\x00")  # TLS ClientHello
    assert client.transport.eof and not client.transport.written


# Abuse limits.


@pytest.mark.parametrize(
    ("flood", "words"),
    [
        (frame(frames.SETTINGS, 0, 0), b"frames without effect"),
        (frame(frames.PRIORITY, 0, 1, bytes(5)), b"frames without effect"),
        (frame(0x42, 0, 0, b"unknown"), b"frames without effect"),
        (frame(frames.PING, 0, 0, bytes(8)), b"too_many_pings"),
    ],
)
async def test_floods_of_useless_frames(client, flood, words):
    client.raw(flood * 1500)
    code, message = client.goaway()
    assert code == ErrorCode.ENHANCE_YOUR_CALM and words in message


async def test_flood_of_empty_data_frames(client):
    number = client.request(b"", end=False)
    client.raw(frame(frames.DATA, 0, number) * 1500)
    assert client.goaway()[0] == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("piece", [b"", b"x" * 1000])
async def test_flood_of_continuation_frames(client, piece):
    client.raw(frame(frames.HEADERS, 1, 1, POST) + frame(frames.CONTINUATION, 0, 1, piece) * 1500)
    assert client.goaway()[0] == ErrorCode.ENHANCE_YOUR_CALM


async def test_small_block_with_oversized_header_list(client):
    large = b"\x40\x01a\x7f\xa1\x1e" + b"v" * 4000  # added to the dynamic table
    client.raw(frame(frames.HEADERS, 5, 1, POST + large + b"\xbe" * 30))  # referenced thirty times
    code, message = client.goaway()
    assert code == ErrorCode.ENHANCE_YOUR_CALM and b"header list" in message


@pytest.mark.parametrize("by", ["client", "server"])
async def test_rapid_reset(client, by):
    client.echo.hold = True
    flood = b"".join(
        frame(frames.HEADERS, 5, number, POST)
        + (frames.reset_frame(number, ErrorCode.CANCEL) if by == "client" else window_update(number, 0))
        for number in range(1, 24_001, 2)
    )
    client.server.data_received(flood)
    client.transport.written.clear()
    assert client.transport.eof
    assert len(client.echo.of("begin")) < 600
    assert len(client.echo.of("begin")) == len(client.echo.of("reset"))


async def test_cancelling_is_free_beside_completed_requests(client):
    for number in range(1, 4001, 4):
        client.echo.hold = False
        client.server.data_received(frame(frames.HEADERS, 5, number, POST))
        client.echo.hold = True
        client.server.data_received(frame(frames.HEADERS, 5, number + 2, POST))
        client.server.data_received(frames.reset_frame(number + 2, ErrorCode.CANCEL))
    client.transport.take()
    assert not client.transport.eof
    assert len(client.echo.of("reset")) == 1000


async def test_requests_beyond_the_stream_limit_are_refused_then_end_the_connection(make):
    client = make(max_streams=10).greet()
    client.echo.hold = True
    client.server.data_received(b"".join(frame(frames.HEADERS, 5, n, POST) for n in range(1, 101, 2)))
    assert len(client.echo.of("begin")) == 10
    assert not client.transport.eof
    client.server.data_received(b"".join(frame(frames.HEADERS, 5, n, POST) for n in range(101, 2001, 2)))
    assert client.transport.eof


async def test_settings_cost_depends_on_the_open_streams(client):
    client.echo.hold = True
    client.server.data_received(b"".join(frame(frames.HEADERS, 4, n, POST) for n in range(1, 511, 2)))
    assert len(client.server.streams) == 255
    changes = [frame(frames.SETTINGS, 0, 0, b"\0\4\0\0\0" + bytes([n % 2])) for n in range(100)]
    client.server.data_received(b"".join(changes))
    assert client.transport.eof  # 100 frames would be allowed without streams


async def test_work_is_split_into_turns(make):
    client = make().greet()
    client.server._turn = Turn(asyncio.get_running_loop(), 0.0)
    client.server.data_received(b"".join(frame(frames.HEADERS, 5, n, POST) for n in range(1, 21, 2)))
    assert len(client.echo.of("begin")) == 8  # then the time is checked
    assert not client.transport.reading
    client.server.data_received(frame(frames.HEADERS, 5, 21, POST))  # was received before the pause
    await until(lambda: client.transport.reading)
    assert client.echo.of("begin") == list(range(1, 22, 2))


async def test_header_block_larger_than_the_list_is_not_decoded(client):
    client.raw(frame(frames.HEADERS, 5, 1, POST + bytes(17 << 10)))
    code, message = client.goaway()
    assert code == ErrorCode.ENHANCE_YOUR_CALM and message == b"header block too large"


# Memory of requests.


async def test_unconsumed_data_is_accounted_until_the_stream_ends(client):
    number = client.request(b"", end=False)
    client.echo.streams[number].events.on_data = lambda data: None
    client.raw(
        frame(frames.DATA, 0, number, bytes(10_000)), frame(frames.DATA, 8, number, b"\x09x" + bytes(9))
    )
    assert client.server.memory.used == 10_001
    assert client.context.memory.used >= 10_001
    client.raw(frames.reset_frame(number, ErrorCode.CANCEL))
    assert client.server.memory.used == 0
    assert client.context.memory.used <= 32 << 10  # leased for the next requests


async def test_data_beyond_the_memory_of_the_connection_resets_its_stream(make):
    client = make(max_connection_memory=15_000).greet()
    first, second = client.request(b"", end=False), client.request(b"", end=False)
    for number in (first, second):
        client.echo.streams[number].events.on_data = lambda data: None
        client.raw(frame(frames.DATA, 0, number, bytes(10_000)))
    assert client.resets() == {second: ErrorCode.ENHANCE_YOUR_CALM}
    assert client.server.memory.used == 10_000
    client.raw(frame(frames.DATA, 1, first, b"x"))
    assert client.body(first) == b""  # the echo got nothing; the response is complete
    assert client.server.memory.used == 0


async def test_expected_message_opens_the_window_when_there_is_memory(make):
    client = make(stream_window=65_535, max_connection_memory=800_000).greet()
    first, second = client.request(b"", end=False), client.request(b"", end=False)
    streams = client.echo.streams
    streams[first].expect(600_000)
    assert client.server.memory.used == 600_000
    client.pump()
    assert client.h2.local_flow_control_window(first) == 600_000
    streams[second].expect(200_000)  # does not fit
    client.pump()
    assert client.h2.local_flow_control_window(second) == 65_535
    streams[second].expect(200_000)  # idempotent
    client.raw(frames.reset_frame(first, ErrorCode.CANCEL))
    client.pump()
    assert client.h2.local_flow_control_window(second) == 200_000
    assert client.server.memory.used == 200_000
    with pytest.raises(OverflowError):
        streams[second].expect(1_000_000)


async def test_window_shrinks_after_an_expected_message(make):
    client = make(stream_window=100_000, max_frame=1 << 20).greet()
    number = client.request(b"", end=False)
    stream = client.echo.streams[number]
    stream.events.on_data = lambda data: None
    stream.expect(300_000)
    client.pump()
    for _ in range(3):
        client.h2.send_data(number, bytes(16_384))
        client.pump()
    client.raw(frame(frames.DATA, 0, number, bytes(300_000 - 3 * 16_384)))
    stream.consumed(300_000)
    assert client.server.memory.used == 0
    client.raw(frame(frames.DATA, 0, number, bytes(100_000)))
    assert not client.resets()
    client.raw(frame(frames.DATA, 0, number, b"x"))
    assert client.resets() == {number: ErrorCode.FLOW_CONTROL_ERROR}


async def test_memory_of_the_server_is_shared_in_order(make):
    options = {"stream_window": 65_535, "max_server_memory": 800_000}
    client = make(**options).greet()
    other = make(**options).greet()
    other.server.memory = MemoryAccount(1 << 30, client.context.memory)  # the same server
    number, waiting = client.request(b"", end=False), other.request(b"", end=False)
    client.echo.streams[number].expect(500_000)
    other.echo.streams[waiting].expect(500_000)
    other.pump()
    assert other.h2.local_flow_control_window(waiting) == 65_535
    client.raw(frames.reset_frame(number, ErrorCode.CANCEL))
    other.pump()
    assert other.h2.local_flow_control_window(waiting) == 500_000
    other.raw(frames.reset_frame(waiting, ErrorCode.CANCEL))
    assert client.context.memory.used <= 64 << 10
    other.server.connection_lost(None)
    client.server.connection_lost(None)
    assert not client.context.memory.used


def test_cancelled_reservation_lets_other_connections_continue():
    server, granted = MemoryAccount(1000), []
    first, second = MemoryAccount(1000, server), MemoryAccount(1000, server)
    assert server.take(800)
    cancelled = first.reserve(300, lambda: granted.append("first"))
    assert cancelled is not None
    assert second.reserve(150, lambda: granted.append("second")) is not None
    server.release(100)
    assert not granted  # reservations are granted in order, the first does not fit
    cancelled.cancel()
    assert granted == ["second"]


async def test_client_that_never_reads_is_aborted(make):
    client = make(write_timeout=0.05).greet()
    client.transport.stalled = True
    client.h2.update_settings({Code.INITIAL_WINDOW_SIZE: MAX_WINDOW})
    client.server.data_received(client.h2.data_to_send() + window_update(0, 1 << 30))
    client.server.data_received(frame(frames.HEADERS, 4, 1, POST))
    for _ in range(32):
        client.server.data_received(frame(frames.DATA, 0, 1, bytes(1 << 17)))
    stream = client.server.streams[1]
    stream.send(HEAD, bytes(4 << 20), None)
    drain = asyncio.ensure_future(stream.drain())
    assert client.transport.unsent < 600_000  # the rest is in the streams' queues
    assert client.server.queued > 3 << 20
    await asyncio.sleep(0.2)
    assert client.transport.aborted and not drain.done()
    client.server.connection_lost(None)
    with pytest.raises(ConnectionResetError):
        await drain


async def test_client_that_floods_without_reading_is_aborted(make):
    client = make(max_streams=0, reset_burst=1 << 30).greet()
    client.transport.stalled = True
    number = 1
    while not client.transport.aborted:  # each refusal is a 13-byte RST_STREAM
        client.server.data_received(
            b"".join(frame(frames.HEADERS, 5, number + 2 * i, POST) for i in range(10_000))
        )
        number += 20_000
        assert client.transport.unsent < 20 << 20


async def test_slow_client_gets_the_whole_response(client):
    client.transport.stalled = True
    client.h2.increment_flow_control_window(1 << 24)
    client.h2.update_settings({Code.INITIAL_WINDOW_SIZE: 1 << 24})
    client.server.data_received(client.h2.data_to_send())
    client.h2.send_headers(1, REQUEST)
    client.server.data_received(client.h2.data_to_send())
    stream = client.server.streams[1]
    stream.send(HEAD, bytes(2 << 20), TRAILERS)
    drain = asyncio.ensure_future(stream.drain())
    await asyncio.sleep(0)
    assert not drain.done()
    for _ in range(20):
        client.transport.flow()
        client.transport.stalled = True
    client.transport.flow()
    client.pump()
    assert len(client.body(1)) == 2 << 20
    with pytest.raises(ConnectionResetError):  # closed by the trailers
        await drain


# Graceful shutdown.


async def test_graceful_goaway_accepts_requests_in_flight(client):
    client.echo.hold = True
    first = client.request(b"1")
    client.server.go_away()
    ping = frames.ping_frame(b"shutdown")
    assert client.transport.take() == frames.goaway_frame(MAX_WINDOW, ErrorCode.NO_ERROR) + ping
    client.server.data_received(frame(frames.HEADERS, 5, 3, POST))  # sent before the GOAWAY arrived
    client.server.data_received(frame(frames.PING, frames.ACK, 0, b"shutdown"))
    assert client.transport.take() == frames.goaway_frame(3, ErrorCode.NO_ERROR)
    client.server.data_received(frame(frames.HEADERS, 5, 5, POST))
    assert client.transport.take() == frames.reset_frame(5, ErrorCode.REFUSED_STREAM)
    assert not client.transport.eof
    for number in (first, 3):
        client.echo.streams[number].send(HEAD, b"", TRAILERS)
    assert client.transport.eof


async def test_graceful_goaway_without_ping_ack(client):
    client.server.go_away()
    assert not client.transport.eof
    await asyncio.sleep(1.1)
    assert client.transport.eof


async def test_goaway_of_the_client_lets_streams_end(client):
    client.echo.hold = True
    number = client.request(b"x")
    client.raw(frames.goaway_frame(0, ErrorCode.NO_ERROR))
    assert not client.transport.eof
    client.echo.streams[number].send(HEAD, b"", TRAILERS)
    assert client.transport.eof


async def test_lost_connection_resets_its_streams(client):
    client.echo.hold = True
    number = client.request(b"x")
    client.server.eof_received()
    assert client.transport.closed
    assert client.echo.of("reset") == [number]
    client.echo.streams[number].send(HEAD, b"too late", TRAILERS)


async def test_closed_streams_are_freed(client):
    kept = weakref.WeakSet()
    real = client.context.application
    client.context.application = lambda stream, headers: (kept.add(events := real(stream, headers)), events)[
        1
    ]
    for number in range(1, 20_001, 2):
        client.server.data_received(
            frame(frames.HEADERS, 4, number, POST) + frame(frames.DATA, 1, number, b"x")
        )
        client.transport.written.clear()
    assert len(client.echo.of("end")) == 10_000
    client.echo.streams.clear()
    gc.collect()
    assert len(kept) == 0
