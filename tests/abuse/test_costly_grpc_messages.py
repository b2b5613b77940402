"""gRPC messages that cost more to parse than to send."""

from __future__ import annotations

import gzip
import struct
import threading
import time

import grpc
import pytest
from attack import AttackedServer
from raw_http2 import INFER, RawHttp2, body, request

from neso.frontends.transport.http2.frames import HEADERS

pytestmark = pytest.mark.alone

LARGE = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"


def rejection(
    server: AttackedServer, message: bytes, path: str = INFER, gzipped: bool = False
) -> grpc.StatusCode:
    """Send a message; return the status of the call."""
    compression = grpc.Compression.Gzip if gzipped else grpc.Compression.NoCompression
    with (
        grpc.insecure_channel(server.address("grpc"), LARGE) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(path)(message, timeout=200, compression=compression)
    return caught.value.code()  # type: ignore[no-any-return]


def test_long_varint(identity_server):
    """A varint of a megabyte: its cost must not be quadratic."""
    flood = b"\xff" * (1 << 20)
    report = identity_server.attack(lambda: rejection(identity_server, flood), "varint of 1 MiB")
    report.check()


FIELDS = {
    "inputs": b"\x2a\x00",
    "outputs": b"\x32\x00",
    "parameters": b"\x22\x00",
    "raw_input_contents": b"\x3a\x00",
    "unknown": b"\x78\x00",
    "contents": b"\x2a\x02\x2a\x00",
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("gzipped", [False, True], ids=["plain", "gzip"])
def test_millions_of_small_fields(identity_server, field, gzipped):
    """60 MB of tiny fields, which gzip compresses to 60 KB."""
    message = FIELDS[field] * (60_000_000 // len(FIELDS[field]))

    def run() -> None:
        assert rejection(identity_server, message, gzipped=gzipped) is grpc.StatusCode.INVALID_ARGUMENT

    identity_server.attack(run, f"60 MB of {field}").check(limit_mib=2 * 64)


@pytest.mark.parametrize("path", [LOAD, "/inference.GRPCInferenceService/LogSettings"])
def test_small_fields_in_management(identity_server, path):
    message = b"\x1a\x02\x0a\x00" * 15_000_000
    report = identity_server.attack(
        lambda: rejection(identity_server, message, path, gzipped=True), f"60 MB of fields to {path}"
    )
    report.check(limit_mib=2 * 64)


def test_elements_within_the_limit_do_not_block(identity_server):
    """Almost a million elements in typed contents, of every kind, by four clients at once."""
    count = 990_000
    contents = {
        "INT64": b"\x1a" + length(count) + b"\x01" * count,
        "FP32": b"\x32" + length(4 * count) + bytes(4 * count),
        "BYTES": b"\x42\x01x" * count,
    }

    def one(datatype: str) -> None:
        inner = contents[datatype]
        tensor = field(1, b"INPUT") + field(2, datatype.encode()) + b"\x18" + length(count) + field(5, inner)
        message = field(1, b"no such model") + field(5, tensor)
        assert rejection(identity_server, message) is grpc.StatusCode.NOT_FOUND

    def run() -> None:
        threads = [threading.Thread(target=one, args=(name,)) for name in contents for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    identity_server.attack(run, "990,000 elements, 6 times").check(limit_mib=256)


def test_compressed_message_beyond_the_limit(identity_server):
    """1 MB that inflates to 1 GiB."""
    bomb = gzip.compress(bytes(1 << 30), 9)
    assert len(bomb) < 2 << 20

    def run() -> None:
        with RawHttp2(identity_server.ports["grpc"]) as client:
            client.send(request(1, grpc_encoding="gzip"))
            client.send(body(1, b"\x01" + struct.pack(">I", len(bomb)) + bomb))
            deadline = time.monotonic() + 60
            while not (trailers := [f for f in client.frames if f[0] == HEADERS]):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert b"grpc-status\x018" in trailers[0][3]  # RESOURCE_EXHAUSTED

    identity_server.attack(run, "1 MB of gzip inflates to 1 GiB").check(limit_mib=64)


def test_compressed_messages_of_many_calls(identity_server):
    """40 calls with 60 KB that inflate to the limit of 64 MiB each."""
    bomb = gzip.compress(bytes(64 << 20), 9)

    def run() -> None:
        with RawHttp2(identity_server.ports["grpc"]) as client:
            for number in range(1, 81, 2):
                client.send(
                    request(number, grpc_encoding="gzip")
                    + body(number, b"\x01" + struct.pack(">I", len(bomb)) + bomb)
                )
            deadline = time.monotonic() + 250
            while len({f[2] for f in client.frames if f[0] in (HEADERS, 3)}) < 40:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    identity_server.attack(run, "40 calls inflate to 64 MiB each").check(limit_mib=256)


def test_stream_of_empty_messages(identity_server):
    """A million messages of 5 bytes, each of which is answered with an error."""
    flood = bytes(5 * 1_000_000)

    def run() -> None:
        with RawHttp2(identity_server.ports["grpc"], settings=b"\0\4\x7f\xff\xff\xff") as client:
            client.send(b"\0\0\4\x08\0\0\0\0\0\x7f\xff\0\0" + request(1, STREAM))
            threading.Thread(target=client.send, args=(body(1, flood),), daemon=True).start()
            time.sleep(5)

    identity_server.attack(run, "1,000,000 empty messages in a stream").check(limit_mib=64)


def length(size: int) -> bytes:
    encoded = bytearray()
    while size > 127:
        encoded.append(size & 127 | 128)
        size >>= 7
    return bytes([*encoded, size])


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + length(len(content)) + content
