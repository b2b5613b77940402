"""What the headers of a call say."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass

from neso.frontends.http2.headers import Headers

Metadata = tuple[tuple[str, "str | bytes"], ...]

# Of the protocol itself; the rest is the client's metadata.
_OWN = frozenset(
    {
        "te",
        "content-type",
        "content-length",
        "grpc-timeout",
        "grpc-encoding",
        "grpc-accept-encoding",
        "accept-encoding",
        "host",
    }
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
            value = raw_value.decode("latin-1").strip(" \t")
            if name in _OWN or name.startswith(":"):
                own[name] = value
            else:
                metadata.append((name, value))
        timeout = own.get("grpc-timeout")
        accepted = own.get("grpc-accept-encoding", "").split(",")
        return cls(
            own.get(":method", ""),
            own.get(":path", ""),
            own.get("content-type", ""),
            own.get("grpc-encoding", "identity"),
            "gzip" in (each.strip() for each in accepted),
            None if timeout is None else _parse_timeout(timeout),
            tuple(metadata),
        )

    @property
    def is_grpc(self) -> bool:
        """Whether the content type is gRPC's, of any serialization; grpc-web is not."""
        prefix, rest = self.content_type[:16].lower(), self.content_type[16:17]
        return prefix == "application/grpc" and rest in ("", "+", ";")


def encode_metadata(metadata: Metadata) -> Iterator[tuple[bytes, bytes]]:
    """As headers."""
    for name, value in metadata:
        if name.endswith("-bin"):
            data = value if isinstance(value, bytes) else value.encode()
            yield name.encode("ascii"), base64.b64encode(data).rstrip(b"=")
        else:
            yield name.encode("ascii"), value if isinstance(value, bytes) else value.encode("latin-1")


def _parse_timeout(text: str) -> float:
    unit, number = _SECONDS.get(text[-1:]), text[:-1]
    if unit is None or not (number.isascii() and number.isdigit()) or len(number) > 8:
        raise ValueError(f"malformed grpc-timeout '{text}'")
    return int(number) * unit


def _decode_binary(value: bytes) -> bytes:
    """Base64, with or without padding."""
    value = value.strip().rstrip(b"=")
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(f"malformed binary metadata: {error}") from None
