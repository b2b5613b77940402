"""What the gRPC server is told."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

from neso.frontends.http2 import Http2Options


@dataclass(frozen=True, slots=True)
class GrpcServerOptions:
    """`max_message`: bytes of a message, decompressed. `compress_level`: of gzip for responses; None: as they are."""

    host: str = "127.0.0.1"
    port: int = 0
    max_message: int = 2**31 - 1
    compress_level: int | None = None
    reuse_port: bool = False
    tls: ssl.SSLContext | None = None
    backlog: int = 2048
    http2: Http2Options = field(default_factory=Http2Options)
