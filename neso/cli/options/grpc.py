"""KServe over gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neso.cli.options.errors import OptionError, about
from neso.cli.options.http import header_forwarding
from neso.cli.options.kinds import BOOLEAN, PATH, PORT, choice, integer
from neso.cli.options.option import Option, Topic
from neso.cli.options.values import Values

if TYPE_CHECKING:
    from neso.frontends.kserve.grpc_options import GrpcOptions
    from neso.frontends.security import Restrictions, TlsFiles

_NO_POOLS = "requests and responses are not pooled"

GRPC = Topic(
    "gRPC",
    (
        Option("allow-grpc", "Serve gRPC.", BOOLEAN, True),
        Option("grpc-address", "Where gRPC listens.", metavar="HOST", default_text="that of --host"),
        Option("grpc-port", "KServe over gRPC.", PORT, 8001, aliases=("kserve-grpc-port",)),
        Option(
            "reuse-grpc-port", "Share the port with other servers that have this option set.", BOOLEAN, False
        ),
        Option("grpc-use-ssl", "Serve gRPC over TLS.", BOOLEAN, False),
        Option("grpc-use-ssl-mutual", "Serve gRPC over TLS, to clients with a certificate.", BOOLEAN, False),
        Option("grpc-server-cert", "PEM file of the certificate.", PATH),
        Option("grpc-server-key", "PEM file of the certificate's key.", PATH),
        Option("grpc-root-cert", "PEM file of the certificates that clients must show one below.", PATH),
        Option(
            "grpc-restricted-protocol",
            "Answer these groups only to calls with the metadata triton-grpc-protocol-KEY of this VALUE; the groups "
            "are those of --http-restricted-api.",
            repeated=True,
            metavar="GROUP[,GROUP...]:KEY=VALUE",
        ),
        Option(
            "grpc-header-forward-pattern",
            "Metadata in whose keys this regular expression is found become parameters of inference requests.",
            metavar="REGEX",
        ),
        Option(
            "grpc-infer-response-compression-level",
            "Compress gRPC responses by gzip, as hard as this says.",
            choice("none", "low", "medium", "high"),
            "none",
        ),
        Option("grpc-keepalive-time", "Milliseconds between two keepalive pings.", integer(1), 7_200_000),
        Option(
            "grpc-keepalive-timeout",
            "Milliseconds that a client has to answer a keepalive ping.",
            integer(1),
            20_000,
        ),
        Option(
            "grpc-keepalive-permit-without-calls", "Ping clients that have no call in flight.", BOOLEAN, False
        ),
        Option(
            "grpc-http2-max-pings-without-data",
            "Pings that may be sent without data between them.",
            integer(0),
            2,
            ignored="pings are as far apart as --grpc-keepalive-time says",
        ),
        Option(
            "grpc-http2-min-recv-ping-interval-without-data",
            "Milliseconds that a client must leave between two pings without data.",
            integer(0),
            300_000,
        ),
        Option(
            "grpc-http2-max-ping-strikes",
            "Pings that come too early before the connection is closed; 0: any number.",
            integer(0),
            2,
        ),
        Option(
            "grpc-max-connection-age",
            "Milliseconds after which a connection is closed.",
            integer(0),
            default_text="no limit",
        ),
        Option(
            "grpc-max-connection-age-grace",
            "Milliseconds that calls have to end on a connection that has reached its age.",
            integer(0),
            default_text="no limit",
        ),
        Option(
            "grpc-infer-thread-count",
            "Threads that tritonserver handles gRPC inference with.",
            integer(1),
            ignored="one event loop handles all calls",
        ),
        Option(
            "grpc-infer-allocation-pool-size",
            "Request objects that tritonserver keeps for reuse.",
            integer(0),
            ignored=_NO_POOLS,
        ),
        Option(
            "grpc-max-response-pool-size",
            "Response objects that tritonserver keeps for each stream.",
            integer(0),
            ignored=_NO_POOLS,
        ),
    ),
)


def grpc_options(values: Values) -> GrpcOptions | None:
    """None if gRPC is off. Raises `ServerError`."""
    from neso.frontends.kserve.grpc_options import GrpcOptions, ResponseCompression

    if not values["allow-grpc"]:
        return None
    return GrpcOptions(
        values["grpc-address"] or values["host"],
        values["grpc-port"],
        keepalive_time_ms=values["grpc-keepalive-time"],
        keepalive_timeout_ms=values["grpc-keepalive-timeout"],
        keepalive_permit_without_calls=values["grpc-keepalive-permit-without-calls"],
        http2_min_recv_ping_interval_without_data_ms=values["grpc-http2-min-recv-ping-interval-without-data"],
        http2_max_ping_strikes=values["grpc-http2-max-ping-strikes"],
        max_connection_age_ms=values["grpc-max-connection-age"] or 0,
        max_connection_age_grace_ms=values["grpc-max-connection-age-grace"] or 0,
        response_compression=ResponseCompression(values["grpc-infer-response-compression-level"]),
        reuse_port=values["reuse-grpc-port"],
        tls=_tls_files(values),
        restrictions=_restrictions(values),
        header_forwarding=header_forwarding(values, "grpc-header-forward-pattern"),
    )


def _tls_files(values: Values) -> TlsFiles | None:
    from neso.frontends.security import TlsFiles

    certificate, key, root = (values[f"grpc-{name}"] for name in ("server-cert", "server-key", "root-cert"))
    mutual = values["grpc-use-ssl-mutual"]
    if not (mutual or values["grpc-use-ssl"]):
        for name in ("grpc-server-cert", "grpc-server-key", "grpc-root-cert"):
            if values.given(name):
                values.warnings.append(
                    f"--{name} has no effect without --grpc-use-ssl=true: gRPC is not encrypted"
                )
        return None
    if certificate is None or key is None:
        raise OptionError("--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key")
    if mutual and root is None:
        raise OptionError("--grpc-use-ssl-mutual needs --grpc-root-cert")
    files = TlsFiles(certificate, key, root if mutual else None)
    with about("--grpc-server-cert"):
        files.context("h2")
    return files


def _restrictions(values: Values) -> Restrictions:
    from neso.frontends.kserve.grpc_frontend import HEADER_PREFIX
    from neso.frontends.security import Restrictions

    with about("--grpc-restricted-protocol"):
        return Restrictions.parse(values["grpc-restricted-protocol"], HEADER_PREFIX)
