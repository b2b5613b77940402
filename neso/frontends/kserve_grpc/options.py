"""How the gRPC front end listens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from neso.frontends.header_forwarding import HeaderForwarding
from neso.frontends.restrictions import Restrictions
from neso.frontends.tls import TlsFiles

INT_MAX = 2**31 - 1


class ResponseCompression(str, Enum):
    """How hard to compress responses, by Triton's names. Python's gRPC has gzip only, at one level."""

    none = "none"
    low = "low"
    medium = "medium"
    high = "high"


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
    http2_max_pings_without_data: int = 2
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

    def channel_arguments(self) -> list[tuple[str, int]]:
        """The same in gRPC's terms."""
        arguments = [
            # On Linux gRPC shares ports by default: a second server would get some of the first one's clients.
            ("grpc.so_reuseport", int(self.reuse_port)),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", self.keepalive_time_ms),
            ("grpc.keepalive_timeout_ms", self.keepalive_timeout_ms),
            ("grpc.keepalive_permit_without_calls", int(self.keepalive_permit_without_calls)),
            ("grpc.http2.max_pings_without_data", self.http2_max_pings_without_data),
            (
                "grpc.http2.min_ping_interval_without_data_ms",
                self.http2_min_recv_ping_interval_without_data_ms,
            ),
            ("grpc.http2.max_ping_strikes", self.http2_max_ping_strikes),
        ]
        if self.max_connection_age_ms:
            arguments.append(("grpc.max_connection_age_ms", self.max_connection_age_ms))
        if self.max_connection_age_grace_ms:
            arguments.append(("grpc.max_connection_age_grace_ms", self.max_connection_age_grace_ms))
        return arguments
