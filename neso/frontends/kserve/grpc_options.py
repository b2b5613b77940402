"""How the gRPC front end listens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from neso.frontends.header_forwarding import HeaderForwarding
from neso.frontends.security import Restrictions, TlsFiles
from neso.frontends.transport.grpc import GrpcServerOptions
from neso.frontends.transport.http2 import Http2Options

INT_MAX = 2**31 - 1


class ResponseCompression(str, Enum):
    """How hard to compress responses, by gzip; Triton's names."""

    none = "none"
    low = "low"
    medium = "medium"
    high = "high"


_LEVELS = {
    ResponseCompression.none: None,
    ResponseCompression.low: 1,
    ResponseCompression.medium: 6,
    ResponseCompression.high: 9,
}


@dataclass(frozen=True)
class GrpcOptions:
    """Address, limits and keepalive of the gRPC server; the defaults are Triton's. Times are in milliseconds.

    `port` 0 lets the system choose (see `KServeGrpc.port`). `max_connection_age_ms` 0: no limit. `reuse_port`: share
    the port with other processes.
    """

    host: str = "0.0.0.0"
    port: int = 8001
    max_message_bytes: int = INT_MAX
    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_min_recv_ping_interval_without_data_ms: int = 300_000
    http2_max_ping_strikes: int = 2
    max_connection_age_ms: int = 0
    max_connection_age_grace_ms: int = 0
    response_compression: ResponseCompression = ResponseCompression.none
    reuse_port: bool = False
    tls: TlsFiles | None = None
    restrictions: Restrictions = field(default_factory=Restrictions)
    header_forwarding: HeaderForwarding | None = None

    @property
    def address(self) -> str:
        """`host:port`, an IPv6 host in brackets."""
        host = f"[{self.host}]" if ":" in self.host and not self.host.startswith("[") else self.host
        return f"{host}:{self.port}"

    def server(self) -> GrpcServerOptions:
        """The same for the server underneath. Raises `InvalidArgument` for TLS files that cannot be used."""
        return GrpcServerOptions(
            host=self.host,
            port=self.port,
            max_message=self.max_message_bytes,
            compress_level=_LEVELS[self.response_compression],
            reuse_port=self.reuse_port,
            tls=None if self.tls is None else self.tls.context("h2"),
            http2=Http2Options(
                keepalive_time=self.keepalive_time_ms / 1000,
                keepalive_timeout=self.keepalive_timeout_ms / 1000,
                min_ping_interval=self.http2_min_recv_ping_interval_without_data_ms / 1000,
                max_ping_strikes=self.http2_max_ping_strikes,
                pings_without_streams=self.keepalive_permit_without_calls,
                max_age=self.max_connection_age_ms / 1000 or None,
                max_age_grace=self.max_connection_age_grace_ms / 1000 or None,
            ),
        )
