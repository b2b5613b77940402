"""What the headers of a call say."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from neso.frontends.http2.headers import Headers

Metadata = tuple[tuple[str, "str | bytes"], ...]

# Of the protocol itself; the rest is the client's metadata.
_OWN = frozenset(
    {"te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding", "accept-encoding", "host"}
)
_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


@dataclass(frozen=True, slots=True)
class CallHeaders:
    """`timeout`: seconds, None without a deadline. `encoding`: of the request's messages."""

    method: str
    path: str
    content_type: str
    encoding: str
    accepts_gzip: bool
    timeout: float | None
    metadata: Metadata

    @classmethod
    def parse(cls, headers: Headers) -> CallHeaders:
        """Raises `ValueError` for headers that no gRPC client sends."""
        own: dict[str, str] = {}
        metadata: list[tuple[str, str | bytes]] = []
        for raw_name, raw_value in headers:
            name = raw_name.decode("ascii")
            if name.endswith("-bin"):
                metadata += [(name, _decode_binary(value)) for value in raw_value.split(b",")]
                continue
            value = raw_value.decode("latin-1")
            if name in _OWN or name.startswith(":"):
                own[name] = value
            else:
                metadata.append((name, value))
        timeout = own.get("grpc-timeout")
        return cls(
            own.get(":method", ""),
            own.get(":path", ""),
            own.get("content-type", ""),
            own.get("grpc-encoding", "identity"),
            "gzip" in own.get("grpc-accept-encoding", ""),
            None if timeout is None else _parse_timeout(timeout),
            tuple(metadata),
        )


def _parse_timeout(text: str) -> float:
    unit = _SECONDS.get(text[-1:])
    if unit is None or not text[:-1].isdecimal() or len(text) > 9:
        raise ValueError(f"malformed grpc-timeout '{text}'")
    return int(text[:-1]) * unit


def _decode_binary(value: bytes) -> bytes:
    """Base64, with or without padding."""
    try:
        return base64.b64decode(value.strip() + b"=" * (-len(value.strip()) % 4))
    except binascii.Error as error:
        raise ValueError(f"malformed binary metadata: {error}") from None
