"""Triton's Python API `tritonfrontend`: HTTP, gRPC and metrics frontends of an in-process server.

Options are validated by pydantic, as in Triton.
"""

from __future__ import annotations

import warnings
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from neso import __version__ as __version__
from neso.compat.tritonserver.server import Server
from neso.frontends import inprocess_frontends as inprocess
from neso.frontends.frontend_options import (
    INT_MAX,
    GrpcOptions,
    HttpOptions,
    MetricsOptions,
    ResponseCompression,
)
from neso.frontends.header_forwarding import HeaderForwarding
from neso.frontends.security import TlsFiles
from neso.frontends.transport.http1 import BindError
from neso.server.errors import AlreadyExists as AlreadyExistsError
from neso.server.errors import InternalError, InvalidArgument, Unavailable, UnknownError
from neso.server.errors import InvalidArgument as InvalidArgumentError
from neso.server.errors import NotFound as NotFoundError
from neso.server.errors import ServerError as TritonError
from neso.server.errors import Unavailable as UnavailableError
from neso.server.errors import Unsupported as UnsupportedError

__all__ = [
    "AlreadyExistsError",
    "InternalError",
    "InvalidArgumentError",
    "KServeGrpc",
    "KServeHttp",
    "Metrics",
    "NotFoundError",
    "TritonError",
    "UnavailableError",
    "UnknownError",
    "UnsupportedError",
]

Port = Annotated[int, Field(ge=0, le=65535)]
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(gt=0)]


class CompressionLevel(IntEnum):
    """Compression level of gRPC responses."""

    NONE = 0
    LOW = 1
    MED = 2
    HIGH = 3


_STRICT = ConfigDict(extra="forbid")
_COMPRESSION = dict(zip(CompressionLevel, ResponseCompression, strict=True))


@dataclass(config=_STRICT)
class KServeHttpOptions:
    """Options of `KServeHttp`."""

    address: str = "0.0.0.0"
    port: Port = 8000
    reuse_port: bool = False
    thread_count: Count = 8
    header_forward_pattern: str = ""

    def to_neso(self) -> HttpOptions:
        """Convert to Neso's options. Warns about options without effect. Raises `InvalidArgumentError`."""
        _warn_ignored(thread_count=(self.thread_count, 8))
        return HttpOptions(
            self.address,
            self.port,
            reuse_port=self.reuse_port,
            header_forwarding=_header_forwarding(self.header_forward_pattern),
        )


@dataclass(config=_STRICT)
class KServeGrpcOptions:
    """Options of `KServeGrpc`."""

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
        """Convert to Neso's options. Warns about options without effect. Raises `InvalidArgumentError`."""
        _warn_ignored(
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
    """Options of `Metrics`."""

    address: str = "0.0.0.0"
    port: Port = 8002
    thread_count: Natural = 8

    def to_neso(self) -> MetricsOptions:
        """Convert to Neso's options. Warns about options without effect."""
        _warn_ignored(thread_count=(self.thread_count, 8))
        return MetricsOptions(self.address, self.port)


def _header_forwarding(pattern: str) -> HeaderForwarding | None:
    return HeaderForwarding(pattern) if pattern else None


def _warn_ignored(**given: tuple[Any, Any]) -> None:
    for name, (value, default) in given.items():
        if value != default:
            warnings.warn(f"tritonfrontend: {name} has no effect in Neso", stacklevel=5)


Self = TypeVar("Self", bound="Frontend")


class Frontend:
    """Frontend of a `tritonserver.Server`, listening from `start` to `stop` or within a `with` block.

    Raises `InvalidArgumentError` if the server is not running or `options` is not an instance of `Options`.
    """

    Options: ClassVar[Any]
    _kind: ClassVar[type[inprocess.InProcessFrontend[Any]]]

    def __init__(self, server: Server, options: Any = None) -> None:
        if options is None:
            options = self.Options()
        if not isinstance(options, self.Options):
            raise InvalidArgument(
                f"Incorrect type for options. options argument must be of type {type(self).__name__}.Options"
            )
        self._frontend = self._kind(server.neso, options.to_neso())

    def start(self) -> None:
        """Start listening.

        Raises `AlreadyExistsError` if already started, `UnavailableError` if the port is in use.
        """
        try:
            self._frontend.start()
        except BindError as error:
            raise Unavailable(str(error)) from None

    def stop(self) -> None:
        """Wait for requests in flight, then close. Idempotent."""
        self._frontend.stop()

    def __enter__(self: Self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class KServeHttp(Frontend):
    """KServe v2 API with Triton's extensions over HTTP."""

    Options = KServeHttpOptions
    _kind = inprocess.KServeHttp


class KServeGrpc(Frontend):
    """KServe v2 API with Triton's extensions over gRPC."""

    Options = KServeGrpcOptions
    Grpc_compression_level = CompressionLevel
    _kind = inprocess.KServeGrpc


class Metrics(Frontend):
    """Prometheus metrics over HTTP."""

    Options = MetricsHttpOptions
    _kind = inprocess.Metrics


# Names used by the first release of Triton's package.
KServeHttp.Server = KServeHttp  # type: ignore[attr-defined]
KServeGrpc.Server = KServeGrpc  # type: ignore[attr-defined]
