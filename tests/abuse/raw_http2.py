"""A blocking HTTP/2 connection that sends any bytes, for attacks."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

from neso.frontends.transport.http2 import encode_headers
from neso.frontends.transport.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    SETTINGS,
    FrameReader,
    frame_header,
)

INFER = "/inference.GRPCInferenceService/ModelInfer"
Frame = tuple[int, int, int, bytes]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return frame_header(len(payload), kind, flags, stream) + payload


def request(stream: int, path: str = INFER, flags: int = END_HEADERS, **more: str) -> bytes:
    """HEADERS of a gRPC call; `_` in names stands for `-`."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        "content-type": "application/grpc",
        "te": "trailers",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    block = encode_headers([(name.encode(), value.encode()) for name, value in fields.items()])
    return frame(HEADERS, flags, stream, block)


def body(stream: int, data: bytes, end: bool = True) -> bytes:
    """DATA frames of 16 KiB."""
    pieces = [data[at : at + 16_384] for at in range(0, len(data), 16_384)] or [b""]
    flags = [0] * (len(pieces) - 1) + [END_STREAM if end else 0]
    return b"".join(frame(DATA, flag, stream, piece) for flag, piece in zip(flags, pieces, strict=True))


class RawHttp2:
    """The handshake is done by the constructor; a thread reads the server's frames until the connection ends.

    `source`: own address, for example "127.0.0.2".
    """

    def __init__(self, port: int, source: str = "127.0.0.1", settings: bytes = b"") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 60, (source, 0))
        self.frames: list[Frame] = []
        self.closed = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self.send(PREFACE + frame(SETTINGS, 0, 0, settings))
        self._reader.start()

    def send(self, data: bytes) -> bool:
        """Return False if the server has closed the connection."""
        try:
            self._socket.sendall(data)
        except OSError:
            return False
        return True

    @property
    def goaway(self) -> int | None:
        """Error code of the server's GOAWAY."""
        codes = [payload for kind, _, _, payload in self.frames if kind == GOAWAY]
        return int.from_bytes(codes[-1][4:8], "big") if codes else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader
        self._socket.close()
        self._reader.join(10)

    def __enter__(self) -> RawHttp2:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        reader = FrameReader(1 << 24)
        reader.preface_received = True
        try:
            while data := self._socket.recv(1 << 16):
                self.frames += reader.feed(data)
        except OSError:
            pass
        self.closed.set()
