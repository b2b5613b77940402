"""gRPC calls with frames that grpcio's clients never send, written with h2."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Sequence

import h2.config
import h2.connection
import h2.events
import pytest
from eventually import until

HEADERS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/t.Test/Echo",
    ":authority": "test",
    "content-type": "application/grpc",
    "te": "trailers",
}


def framed(message: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + len(message).to_bytes(4, "big") + message


class Answer:
    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.body = b""
        self.ended = False

    @property
    def status(self) -> int:
        return int(self.headers["grpc-status"])


async def call(server, pieces: Sequence[bytes], **changes: str | None) -> Answer:
    """Send a call, one frame per piece. `_` in header names stands for `-`; None omits a header."""
    changed = {name.replace("_", "-"): value for name, value in changes.items()}
    fields = {**HEADERS, **{(f":{n}" if f":{n}" in HEADERS else n): v for n, v in changed.items()}}
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    client = h2.connection.H2Connection(
        h2.config.H2Configuration(header_encoding="utf-8", validate_outbound_headers=False)
    )
    client.initiate_connection()
    client.send_headers(1, [(n, v) for n, v in fields.items() if v is not None], end_stream=not pieces)
    for i, piece in enumerate(pieces):
        client.send_data(1, piece, end_stream=i == len(pieces) - 1)
    answer = Answer()
    writer.write(client.data_to_send())
    while not answer.ended:
        data = await asyncio.wait_for(reader.read(65_536), 60)
        assert data, "closed without an answer"
        for event in client.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                answer.headers |= dict(event.headers)
            elif isinstance(event, h2.events.DataReceived):
                answer.body += event.data
            answer.ended |= isinstance(event, h2.events.StreamEnded | h2.events.StreamReset)
        writer.write(client.data_to_send())
    writer.close()
    return answer


async def test_call(server):
    answer = await call(server, [framed(b"hello")])
    assert answer.headers == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-accept-encoding": "identity, deflate, gzip",
        "grpc-status": "0",
    }
    assert answer.body == framed(b"hello")


@pytest.mark.parametrize("size", [1, 2, 5, 7])
@pytest.mark.parametrize("path", ["/t.Test/Echo", "/t.Test/Callback"])
async def test_messages_split_over_frames(server, size, path):
    data = framed(b"a message")
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert (await call(server, [*pieces, b""], path=path)).body == data


async def test_several_messages_in_one_frame(server):
    data = b"".join(framed(b"%d" % i * i) for i in range(60)) + framed(b"")
    answer = await call(server, [data], path="/t.Test/Chat")
    assert (answer.body, answer.status) == (data, 0)


@pytest.mark.parametrize("path", ["/t.Test/Echo", "/t.Test/Callback"])
@pytest.mark.parametrize("pieces", [[], [framed(b"a"), framed(b"b")], [framed(b"cut")[:-1]], [b"\0\0"]])
async def test_unary_call_needs_exactly_one_message(server, path, pieces):
    assert (await call(server, pieces, path=path)).status == 13


async def test_truncated_stream(server):
    answer = await call(server, [framed(b"whole"), framed(b"cut")[:-1]], path="/t.Test/Chat")
    assert answer.status == 13 and "truncated" in answer.headers["grpc-message"]


@pytest.mark.parametrize(
    ("message", "encoding", "status"),
    [
        (framed(gzip.compress(b"x", mtime=0), 1), "gzip", 0),
        (framed(zlib.compress(b"x"), 1), "deflate", 0),
        (framed(b"x"), "gzip", 0),
        (framed(b"x"), "identity", 0),
        (framed(gzip.compress(b"x", mtime=0), 1), None, 13),
        (framed(gzip.compress(b"x", mtime=0), 1), "identity", 13),
        (framed(b"no gzip", 1), "gzip", 13),
        (framed(gzip.compress(b"x", mtime=0)[:-1], 1), "gzip", 13),
        (framed(b"x", 2), "gzip", 13),
        (framed(b"x"), "snappy", 12),
    ],
)
async def test_encodings(server, message, encoding, status):
    answer = await call(server, [message], grpc_encoding=encoding)
    assert answer.status == status
    assert answer.headers["grpc-accept-encoding"] == "identity, deflate, gzip"
    if status == 0:
        assert answer.body == framed(b"x")


@pytest.mark.parametrize("accepted", ["gzip", "identity,gzip", "identity, deflate , gzip"])
async def test_responses_are_compressed_if_accepted(serve, accepted):
    server = await serve(compress_level=6)
    answer = await call(server, [framed(b"x")], grpc_accept_encoding=accepted)
    assert answer.headers["grpc-encoding"] == "gzip"
    assert answer.body[:1] == b"\1" and gzip.decompress(answer.body[5:]) == b"x"
    answer = await call(server, [framed(b"x")], grpc_accept_encoding="identity,deflate")
    assert answer.body == framed(b"x") and "grpc-encoding" not in answer.headers


@pytest.mark.parametrize("path", ["/t.Test/Echo", "/t.Test/Callback", "/t.Test/Join"])
async def test_decompressed_messages_count_as_memory(serve, path):
    server = await serve({"max_connection_memory": 1 << 20})
    bomb = framed(gzip.compress(bytes(2 << 20), 1), 1)
    answer = await call(server, [bomb], path=path, grpc_encoding="gzip")
    assert answer.status == 8 and "memory" in answer.headers["grpc-message"]


@pytest.mark.parametrize("path", ["/t.Test/Echo", "/t.Test/Callback", "/t.Test/Chat"])
async def test_message_that_does_not_arrive_in_time(serve, path, monkeypatch):
    monkeypatch.setattr("neso.frontends.transport.grpc.call._MIN_RATE", 1 << 30)
    server = await serve(message_timeout=0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    client.initiate_connection()
    client.send_headers(1, [*{**HEADERS, ":path": path}.items()])
    client.send_data(1, framed(b"unfinished")[:-1])
    writer.write(client.data_to_send())
    headers: dict[str, str] = {}
    while "grpc-status" not in headers:
        for event in client.receive_data(await asyncio.wait_for(reader.read(65_536), 60)):
            if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                headers |= dict(event.headers)
        writer.write(client.data_to_send())
    assert headers["grpc-status"] == "8" and "took too long" in headers["grpc-message"]
    writer.close()


@pytest.mark.parametrize("path", ["/t.Test/Echo", "/t.Test/Callback"])
async def test_message_larger_than_the_memory_of_a_connection(serve, path):
    server = await serve({"max_connection_memory": 1 << 20, "stream_window": 65_535})
    answer = await call(server, [b"\0" + (2 << 20).to_bytes(4, "big"), bytes(1000)], path=path)
    assert answer.status == 8 and "memory for requests" in answer.headers["grpc-message"]


async def test_methods_with_a_deserializer_have_a_smaller_limit(serve):
    server = await serve(max_parsed_message=1000)
    answer = await call(server, [framed(bytes(1001))], path="/t.Test/Unreadable")
    assert answer.status == 8
    answer = await call(server, [framed(bytes(1000))], path="/t.Test/Unreadable")
    assert answer.status == 13  # its deserializer fails


async def test_decompressed_size_limit(serve):
    server = await serve(max_message=10_000)
    bomb = framed(gzip.compress(bytes(10_000_000)), 1)
    assert len(bomb) < 10_000
    assert (await call(server, [bomb], grpc_encoding="gzip")).status == 8
    assert (await call(server, [framed(gzip.compress(bytes(10_000)), 1)], grpc_encoding="gzip")).status == 0


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"content_type": "application/grpc+proto"}, "200"),
        ({"content_type": "application/grpc;charset=utf-8"}, "200"),
        ({"content_type": "Application/GRPC"}, "200"),
        ({"te": None}, "200"),
        ({"content_type": "application/grpc-web"}, "415"),
        ({"content_type": "application/json"}, "415"),
        ({"content_type": None}, "415"),
        ({"method": "GET"}, "405"),
        ({"method": "PUT"}, "405"),
    ],
)
async def test_invalid_calls_are_rejected(server, changes, status):
    answer = await call(server, [framed(b"x")], **changes)
    assert answer.headers[":status"] == status
    assert ("grpc-status" in answer.headers) == (status == "200")


@pytest.mark.parametrize("path", ["/", "/t.Test", "/t.Test/", "/t.Test/Nowhere", "no slash", "/a/b/c?d"])
async def test_unknown_methods(server, path):
    assert (await call(server, [framed(b"x")], path=path)).status == 12


@pytest.mark.parametrize("timeout", ["", "S", "1", "1s", "-1S", "1.5S", "123456789S", "1 S"])
async def test_malformed_timeouts(server, timeout):
    answer = await call(server, [framed(b"x")], grpc_timeout=timeout)
    assert answer.status == 13 and "grpc-timeout" in answer.headers["grpc-message"]


@pytest.mark.parametrize(
    ("timeout", "status"), [("0n", 4), ("99999999H", 0), ("1M", 0), ("20m", 4), ("10S", 0)]
)
async def test_timeouts(server, timeout, status):
    path = "/t.Test/Echo" if status == 0 else "/t.Test/Wait"
    assert (await call(server, [framed(b"x")], path=path, grpc_timeout=timeout)).status == status


async def test_binary_metadata(server):
    padded = await call(
        server, [framed(b"")], path="/t.Test/Metadata", **{"a-bin": "YWI=,YWI , Yw", "b": "  text "}
    )
    assert eval(padded.body[5:]) == [("a-bin", b"ab"), ("a-bin", b"ab"), ("a-bin", b"c"), ("b", "text")]
    broken = await call(server, [framed(b"")], **{"a-bin": "!!"})
    assert broken.status == 13


async def test_trailers_end_the_request(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    client.initiate_connection()
    client.send_headers(1, list(HEADERS.items()))
    client.send_data(1, framed(b"x"))
    client.send_headers(1, [("checksum", "1")], end_stream=True)
    writer.write(client.data_to_send())
    body = b""
    while body != framed(b"x"):
        events = client.receive_data(await asyncio.wait_for(reader.read(65_536), 60))
        body += b"".join(each.data for each in events if isinstance(each, h2.events.DataReceived))
    writer.close()


async def test_http1_client_gets_an_error_response(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.endswith(b"This port speaks HTTP/2 only, gRPC\n")
    writer.close()


async def test_half_closed_connection_is_closed(server, methods):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    client.initiate_connection()
    client.send_headers(1, [*{**HEADERS, ":path": "/t.Test/Wait"}.items()])
    client.send_data(1, framed(b"x"), end_stream=True)
    writer.write(client.data_to_send())
    await until(lambda: methods.log)
    writer.write_eof()
    await asyncio.wait_for(reader.read(), 60)
    await until(lambda: methods.log == ["waits", "cancelled"])
    writer.close()
