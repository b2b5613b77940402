"""Triton's options of the front ends; pydantic checks them, as it does there."""

from __future__ import annotations

import warnings
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from neso.frontends.header_forwarding import HeaderForwarding
from neso.frontends.kserve.grpc_options import INT_MAX, GrpcOptions, ResponseCompression
from neso.frontends.kserve.http_options import HttpOptions
from neso.frontends.metrics import MetricsOptions
from neso.frontends.security import TlsFiles

Port = Annotated[int, Field(ge=0, le=65535)]
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(gt=0)]


class CompressionLevel(IntEnum):
    """Of gRPC responses."""

    NONE = 0
    LOW = 1
    MED = 2
    HIGH = 3


_STRICT = ConfigDict(extra="forbid")
_COMPRESSION = dict(zip(CompressionLevel, ResponseCompression, strict=True))


@dataclass(config=_STRICT)
class KServeHttpOptions:
    address: str = "0.0.0.0"
    port: Port = 8000
    reuse_port: bool = False
    thread_count: Count = 8
    header_forward_pattern: str = ""

    def to_neso(self) -> HttpOptions:
        """The same for Neso's front end. Warns of what has no effect, raises `InvalidArgumentError`."""
        _ignore(thread_count=(self.thread_count, 8))
        return HttpOptions(
            self.address,
            self.port,
            reuse_port=self.reuse_port,
            header_forwarding=_header_forwarding(self.header_forward_pattern),
        )


@dataclass(config=_STRICT)
class KServeGrpcOptions:
    address: str = "0.0.0.0"
    port: Port = 8001
    reuse_port: bool = False
    use_ssl: bool = False
    server_cert: str = ""
    server_key: str = ""
    root_cert: str = ""
    use_mutual_auth: bool = False
    keepalive_time_ms: Natural = 7_200_000
    keepalive_timeout_ms: Natural = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: Natural = 2
    http2_min_recv_ping_interval_without_data_ms: Natural = 300_000
    http2_max_ping_strikes: Natural = 2
    max_connection_age_ms: Natural = 0
    max_connection_age_grace_ms: Natural = 0
    infer_compression_level: CompressionLevel = CompressionLevel.NONE
    infer_thread_count: Count = 2
    infer_allocation_pool_size: Natural = 8
    max_response_pool_size: Natural = INT_MAX
    forward_header_pattern: str = ""

    def to_neso(self) -> GrpcOptions:
        """The same for Neso's front end. Warns of what has no effect, raises `InvalidArgumentError`."""
        _ignore(
            http2_max_pings_without_data=(self.http2_max_pings_without_data, 2),
            infer_thread_count=(self.infer_thread_count, 2),
            infer_allocation_pool_size=(self.infer_allocation_pool_size, 8),
            max_response_pool_size=(self.max_response_pool_size, INT_MAX),
        )
        return GrpcOptions(
            self.address,
            self.port,
            keepalive_time_ms=self.keepalive_time_ms,
            keepalive_timeout_ms=self.keepalive_timeout_ms,
            keepalive_permit_without_calls=self.keepalive_permit_without_calls,
            http2_min_recv_ping_interval_without_data_ms=self.http2_min_recv_ping_interval_without_data_ms,
            http2_max_ping_strikes=self.http2_max_ping_strikes,
            max_connection_age_ms=self.max_connection_age_ms,
            max_connection_age_grace_ms=self.max_connection_age_grace_ms,
            response_compression=_COMPRESSION[self.infer_compression_level],
            reuse_port=self.reuse_port,
            tls=self._tls(),
            header_forwarding=_header_forwarding(self.forward_header_pattern),
        )

    def _tls(self) -> TlsFiles | None:
        if not (self.use_ssl or self.use_mutual_auth):
            return None
        root = Path(self.root_cert) if self.use_mutual_auth else None
        return TlsFiles(Path(self.server_cert), Path(self.server_key), root)


@dataclass(config=_STRICT)
class MetricsHttpOptions:
    address: str = "0.0.0.0"
    port: Port = 8002
    thread_count: Natural = 8

    def to_neso(self) -> MetricsOptions:
        """The same for Neso's front end. Warns of what has no effect."""
        _ignore(thread_count=(self.thread_count, 8))
        return MetricsOptions(self.address, self.port)


def _header_forwarding(pattern: str) -> HeaderForwarding | None:
    return HeaderForwarding(pattern) if pattern else None


def _ignore(**given: tuple[Any, Any]) -> None:
    for name, (value, default) in given.items():
        if value != default:
            warnings.warn(f"tritonfrontend: {name} has no effect in Neso", stacklevel=5)
