"""Options of the frontends, with the flags of `neso serve` that set them.

Port 0 selects a free port. Times of the gRPC server are in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from neso.flags import PORT, Flag, FlagGroup, SameAs, integer, number
from neso.frontends.header_forwarding import HeaderForwarding
from neso.frontends.security import GRPC_HEADER_PREFIX, Restrictions, TlsFiles
from neso.server.errors import InvalidArgument

if TYPE_CHECKING:
    from neso.frontends.kserve.request_limits import RequestLimits
    from neso.frontends.transport.grpc import GrpcServerOptions
    from neso.frontends.transport.http1 import HttpServerOptions
    from neso.frontends.transport.tcp import ConnectionLimits
    from neso.server.shared_counts import SharedCounts

INT_MAX = 2**31 - 1


def _header_forwarding(pattern: str) -> HeaderForwarding | None:
    return HeaderForwarding(pattern) if pattern else None


def tls_files(
    prefix: str, certificate: Path | None, key: Path | None, client_root: Path | None
) -> TlsFiles | None:
    """Return the checked PEM files of an HTTP server, or None without TLS. Raises `InvalidArgument`."""
    if certificate is None and key is None and client_root is None:
        return None
    if certificate is None or key is None:
        raise InvalidArgument(f"--{prefix}-server-cert and --{prefix}-server-key must be given together")
    return _checked(TlsFiles(certificate, key, client_root), prefix, "http/1.1")


def _checked(files: TlsFiles, prefix: str, protocol: str) -> TlsFiles:
    try:
        files.context(protocol)
    except InvalidArgument as error:
        raise InvalidArgument(f"--{prefix}-server-cert: {error.message}") from None
    return files


def http_tls(
    certificate: Annotated[
        Path | None,
        Flag(
            "http-server-cert",
            "PEM file of the server certificate; enables HTTPS for HTTP and the OpenAI API.",
        ),
    ] = None,
    key: Annotated[Path | None, Flag("http-server-key", "PEM file of the certificate's key.")] = None,
    client_root: Annotated[
        Path | None,
        Flag("http-root-cert", "PEM file of the CA bundle used to verify client certificates (mutual TLS)."),
    ] = None,
) -> TlsFiles | None:
    return tls_files("http", certificate, key, client_root)


def grpc_tls(
    use_ssl: Annotated[bool, Flag("grpc-use-ssl", "Serve gRPC over TLS.")] = False,
    mutual: Annotated[
        bool, Flag("grpc-use-ssl-mutual", "Serve gRPC over TLS and require a client certificate.")
    ] = False,
    certificate: Annotated[
        Path | None, Flag("grpc-server-cert", "PEM file of the server certificate.")
    ] = None,
    key: Annotated[Path | None, Flag("grpc-server-key", "PEM file of the certificate's key.")] = None,
    client_root: Annotated[
        Path | None, Flag("grpc-root-cert", "PEM file of the CA bundle used to verify client certificates.")
    ] = None,
) -> TlsFiles | None:
    if not (use_ssl or mutual):
        return None
    if certificate is None or key is None:
        raise InvalidArgument("--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key")
    if mutual and client_root is None:
        raise InvalidArgument("--grpc-use-ssl-mutual needs --grpc-root-cert")
    return _checked(TlsFiles(certificate, key, client_root if mutual else None), "grpc", "h2")


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Processes and limits of the connections of all frontends together."""

    max_connections: Annotated[
        int, Flag("max-connections", "Maximum number of connections to all ports together.", integer(1))
    ] = 4096
    max_per_address: Annotated[
        int,
        Flag(
            "max-connections-per-address",
            "Maximum number of connections of one client address to all ports together.",
            integer(1),
        ),
    ] = 1024
    max_body_memory: Annotated[
        int,
        Flag(
            "http-max-memory",
            "Maximum memory for the bodies of the HTTP requests in flight of all connections in bytes.",
            integer(1),
        ),
    ] = 1 << 30
    num_processes: Annotated[
        int,
        Flag(
            "server-processes",
            "Number of processes that serve HTTP, gRPC and the OpenAI API on the same ports.",
            integer(1, 64),
            topic="Process",
        ),
    ] = 1

    def limits(self, shared: SharedCounts | None = None) -> ConnectionLimits:
        """Return limits for servers to share; `shared`: the connections of all server processes."""
        from neso.frontends.transport.tcp import ConnectionLimits

        return ConnectionLimits(self.max_connections, self.max_per_address, self.max_body_memory, shared)


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Options of KServe over HTTP. `tls`: PEM files for HTTPS; `reuse_port`: share the port with other processes."""

    host: Annotated[
        str,
        Flag(
            "http-address",
            "Address of the HTTP frontend.",
            metavar="HOST",
            default_text="that of --host",
            fallback="host",
        ),
    ] = "0.0.0.0"
    port: Annotated[
        int,
        Flag(
            "http-port",
            "Port of the HTTP frontend: KServe, and the OpenAI API under /v1.",
            PORT,
            aliases=("port", "kserve-http-port"),
        ),
    ] = 8000
    max_input_size: Annotated[
        int, Flag("http-max-input-size", "Maximum size of a request body in bytes.", integer(1))
    ] = 64 << 20
    max_json_values: Annotated[
        int,
        Flag(
            "http-max-json-values",
            "Maximum number of JSON values of an infer request, except tensors of numbers and plain strings.",
            integer(1),
        ),
    ] = 500_000
    max_request_members: Annotated[
        int,
        Flag(
            "max-request-tensors",
            "Maximum number of inputs, outputs and parameters of an infer request; over HTTP, of each.",
            integer(1),
            topic="Limits",
        ),
    ] = 10_000
    max_strings: Annotated[
        int,
        Flag(
            "max-tensor-strings",
            "Maximum number of elements of a BYTES tensor in the binary format.",
            integer(1),
            topic="Limits",
        ),
    ] = 1_000_000
    max_head: Annotated[
        int,
        Flag(
            "http-max-header-size",
            "Maximum size of the request line and headers of a request in bytes.",
            integer(1024),
            topic="Limits",
        ),
    ] = 64 << 10
    header_timeout: Annotated[
        float,
        Flag(
            "http-header-timeout-secs",
            "Seconds in which the headers of a request must arrive, and a TLS handshake must end.",
            number(0.001),
            topic="Limits",
        ),
    ] = 20.0
    body_timeout: Annotated[
        float,
        Flag(
            "http-body-timeout-secs",
            "Longest pause in a request body in seconds; a body may take this long and 1 s per 64 KiB.",
            number(0.001),
            topic="Limits",
        ),
    ] = 60.0
    keep_alive_timeout: Annotated[
        float,
        Flag(
            "http-idle-timeout-secs",
            "Seconds after which a connection without a request is closed.",
            number(0.001),
            topic="Limits",
        ),
    ] = 75.0
    write_timeout: Annotated[
        float,
        Flag(
            "http-write-timeout-secs",
            "Seconds in which a client must read at least 64 KiB of a response that waits for it.",
            number(0.001),
            topic="Limits",
        ),
    ] = 60.0
    reuse_port: Annotated[
        bool, Flag("reuse-http-port", "Share the port with other servers that set this option.")
    ] = False
    tls: Annotated[TlsFiles | None, FlagGroup(http_tls)] = None
    restrictions: Annotated[
        Restrictions,
        Flag(
            "http-restricted-api",
            "Require the header KEY: VALUE for these groups of requests, in the OpenAI API too: health, metadata, "
            "inference, shared-memory, model-config, model-repository, statistics, trace, logging.",
            repeated=True,
            metavar="GROUP[,GROUP...]:KEY=VALUE",
            convert=Restrictions.parse,
        ),
    ] = field(default_factory=Restrictions)
    header_forwarding: Annotated[
        HeaderForwarding | None,
        Flag(
            "http-header-forward-pattern",
            "Forward headers whose names match this regular expression as parameters of inference requests.",
            metavar="REGEX",
            convert=_header_forwarding,
        ),
    ] = None

    @property
    def request_limits(self) -> RequestLimits:
        """Limits on infer requests."""
        from neso.frontends.kserve.request_limits import RequestLimits

        return RequestLimits(self.max_json_values, self.max_request_members, self.max_strings)

    def server(self) -> HttpServerOptions:
        """Return the options of the HTTP server. Raises `InvalidArgument` for TLS files that cannot be used."""
        from neso.frontends.kserve.errors import rejection_response
        from neso.frontends.transport.http1 import HttpServerOptions

        return HttpServerOptions(
            self.host,
            self.port,
            max_body=self.max_input_size,
            rejection=lambda rejection: rejection_response(rejection, self.max_input_size),
            max_head=self.max_head,
            keep_alive_timeout=self.keep_alive_timeout,
            header_timeout=self.header_timeout,
            body_timeout=self.body_timeout,
            write_timeout=self.write_timeout,
            reuse_port=self.reuse_port,
            tls=None if self.tls is None else self.tls.context("http/1.1"),
        )


class ResponseCompression(str, Enum):
    """Gzip compression levels of gRPC responses, with Triton's names."""

    none = "none"
    low = "low"
    medium = "medium"
    high = "high"


_GZIP_LEVELS = {
    ResponseCompression.none: None,
    ResponseCompression.low: 1,
    ResponseCompression.medium: 6,
    ResponseCompression.high: 9,
}


def _grpc_restrictions(texts: list[str]) -> Restrictions:
    return Restrictions.parse(texts, GRPC_HEADER_PREFIX)


@dataclass(frozen=True)
class GrpcOptions:
    """Address, limits and keepalive of KServe over gRPC; the defaults of keepalive are Triton's.

    `max_connection_age_ms`: 0 means no limit.
    """

    host: Annotated[
        str,
        Flag(
            "grpc-address",
            "Address of the gRPC frontend.",
            metavar="HOST",
            default_text="that of --host",
            fallback="host",
        ),
    ] = "0.0.0.0"
    port: Annotated[
        int, Flag("grpc-port", "Port of the gRPC frontend.", PORT, aliases=("kserve-grpc-port",))
    ] = 8001
    write_timeout_ms: Annotated[
        int,
        Flag(
            "grpc-write-timeout",
            "Milliseconds in which a client must read at least 64 KiB of the messages that wait for it.",
            integer(1),
            topic="Limits",
        ),
    ] = 60_000
    max_message_bytes: Annotated[
        int,
        Flag(
            "grpc-max-message-size",
            "Maximum size of a request message in bytes, also when decompressed.",
            integer(1, INT_MAX),
        ),
    ] = 64 << 20
    max_message_values: Annotated[
        int,
        Flag(
            "grpc-max-message-values",
            "Maximum number of fields of an infer request, and of elements of its typed contents.",
            integer(1),
        ),
    ] = 1_000_000
    max_request_members: Annotated[int, SameAs("max-request-tensors")] = 10_000
    max_strings: Annotated[int, SameAs("max-tensor-strings")] = 1_000_000
    max_header_bytes: Annotated[
        int,
        Flag(
            "grpc-max-header-size",
            "Maximum size of the metadata of a call in bytes.",
            integer(1024, INT_MAX),
            topic="Limits",
        ),
    ] = 16 << 10
    message_timeout_ms: Annotated[
        int,
        Flag(
            "grpc-message-timeout",
            "Milliseconds in which a message must arrive, beyond 1 s per 64 KiB.",
            integer(1),
            topic="Limits",
        ),
    ] = 60_000
    max_streams: Annotated[
        int,
        Flag("grpc-max-concurrent-streams", "Maximum number of calls in flight of a connection.", integer(1)),
    ] = 256
    max_connection_memory: Annotated[
        int,
        Flag(
            "grpc-max-connection-memory",
            "Maximum memory for the requests in flight of a connection in bytes.",
            integer(1),
        ),
    ] = 256 << 20
    max_memory: Annotated[
        int,
        Flag("grpc-max-memory", "Maximum memory for the requests in flight of all connections.", integer(1)),
    ] = 1 << 30
    reuse_port: Annotated[
        bool, Flag("reuse-grpc-port", "Share the port with other servers that set this option.")
    ] = False
    tls: Annotated[TlsFiles | None, FlagGroup(grpc_tls)] = None
    restrictions: Annotated[
        Restrictions,
        Flag(
            "grpc-restricted-protocol",
            "Require the metadata triton-grpc-protocol-KEY: VALUE for these groups of calls; the groups are those of "
            "--http-restricted-api.",
            repeated=True,
            metavar="GROUP[,GROUP...]:KEY=VALUE",
            convert=_grpc_restrictions,
        ),
    ] = field(default_factory=Restrictions)
    header_forwarding: Annotated[
        HeaderForwarding | None,
        Flag(
            "grpc-header-forward-pattern",
            "Forward metadata whose keys match this regular expression as parameters of inference requests.",
            metavar="REGEX",
            convert=_header_forwarding,
        ),
    ] = None
    response_compression: Annotated[
        ResponseCompression,
        Flag("grpc-infer-response-compression-level", "Gzip compression of gRPC responses."),
    ] = ResponseCompression.none
    keepalive_time_ms: Annotated[
        int, Flag("grpc-keepalive-time", "Milliseconds between two keepalive pings.", integer(1))
    ] = 7_200_000
    keepalive_timeout_ms: Annotated[
        int,
        Flag("grpc-keepalive-timeout", "Milliseconds to wait for the reply to a keepalive ping.", integer(1)),
    ] = 20_000
    keepalive_permit_without_calls: Annotated[
        bool, Flag("grpc-keepalive-permit-without-calls", "Ping clients without calls in flight.")
    ] = False
    http2_min_recv_ping_interval_without_data_ms: Annotated[
        int,
        Flag(
            "grpc-http2-min-recv-ping-interval-without-data",
            "Minimum milliseconds between two pings of a client without data.",
            integer(0),
        ),
    ] = 300_000
    http2_max_ping_strikes: Annotated[
        int,
        Flag(
            "grpc-http2-max-ping-strikes",
            "Number of pings sent too early before the connection is closed (0 = no limit).",
            integer(0),
        ),
    ] = 2
    max_connection_age_ms: Annotated[
        int,
        Flag(
            "grpc-max-connection-age",
            "Milliseconds after which a connection is closed.",
            integer(0),
            default_text="no limit",
        ),
    ] = 0
    max_connection_age_grace_ms: Annotated[
        int,
        Flag(
            "grpc-max-connection-age-grace",
            "Milliseconds that calls have to finish on a connection that has reached its age.",
            integer(0),
            default_text="no limit",
        ),
    ] = 0

    @property
    def request_limits(self) -> RequestLimits:
        """Limits on infer requests."""
        from neso.frontends.kserve.request_limits import RequestLimits

        return RequestLimits(self.max_message_values, self.max_request_members, self.max_strings)

    @property
    def address(self) -> str:
        """`host:port`, an IPv6 host in brackets."""
        host = f"[{self.host}]" if ":" in self.host and not self.host.startswith("[") else self.host
        return f"{host}:{self.port}"

    def server(self) -> GrpcServerOptions:
        """Return the options of the gRPC server. Raises `InvalidArgument` for TLS files that cannot be used."""
        from neso.frontends.transport.grpc import GrpcServerOptions
        from neso.frontends.transport.http2 import Http2Options

        return GrpcServerOptions(
            host=self.host,
            port=self.port,
            max_message=self.max_message_bytes,
            message_timeout=self.message_timeout_ms / 1000,
            compress_level=_GZIP_LEVELS[self.response_compression],
            reuse_port=self.reuse_port,
            tls=None if self.tls is None else self.tls.context("h2"),
            http2=Http2Options(
                max_header_list=self.max_header_bytes,
                write_timeout=self.write_timeout_ms / 1000,
                max_streams=self.max_streams,
                max_connection_memory=self.max_connection_memory,
                max_server_memory=self.max_memory,
                keepalive_time=self.keepalive_time_ms / 1000,
                keepalive_timeout=self.keepalive_timeout_ms / 1000,
                min_ping_interval=self.http2_min_recv_ping_interval_without_data_ms / 1000,
                max_ping_strikes=self.http2_max_ping_strikes,
                pings_without_streams=self.keepalive_permit_without_calls,
                max_age=self.max_connection_age_ms / 1000 or None,
                max_age_grace=self.max_connection_age_grace_ms / 1000 or None,
            ),
        )


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Address of the metrics frontend."""

    host: Annotated[
        str,
        Flag(
            "metrics-address",
            "Address of the metrics frontend.",
            metavar="HOST",
            default_text="that of HTTP",
            fallback="http-address",
        ),
    ] = "0.0.0.0"
    port: Annotated[int, Flag("metrics-port", "Port of the Prometheus metrics.", PORT)] = 8002
