"""KServe over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neso.cli.options.errors import OptionError, about
from neso.cli.options.kinds import BOOLEAN, PATH, PORT, integer
from neso.cli.options.option import Option, Topic
from neso.cli.options.values import Values

if TYPE_CHECKING:
    from neso.frontends.header_forwarding import HeaderForwarding
    from neso.frontends.kserve.http_options import HttpOptions
    from neso.frontends.security import Restrictions, TlsFiles

HTTP = Topic(
    "HTTP",
    (
        Option("allow-http", "Serve HTTP.", BOOLEAN, True),
        Option("http-address", "Where HTTP listens.", metavar="HOST", default_text="that of --host"),
        Option(
            "http-port",
            "KServe over HTTP, and OpenAI's API under /v1.",
            PORT,
            8000,
            aliases=("port", "kserve-http-port"),
        ),
        Option(
            "reuse-http-port", "Share the port with other servers that have this option set.", BOOLEAN, False
        ),
        Option(
            "http-server-cert", "PEM file of the certificate; with it HTTP and OpenAI's API are HTTPS.", PATH
        ),
        Option("http-server-key", "PEM file of the certificate's key.", PATH),
        Option(
            "http-root-cert",
            "PEM file of the certificates that clients must show one below (mutual TLS).",
            PATH,
        ),
        Option(
            "http-restricted-api",
            "Answer these groups, here and by OpenAI's API, only to requests with the header KEY of this VALUE: "
            "health, metadata, inference, shared-memory, model-config, model-repository, statistics, trace, logging.",
            repeated=True,
            metavar="GROUP[,GROUP...]:KEY=VALUE",
        ),
        Option(
            "http-header-forward-pattern",
            "Headers in whose names this regular expression is found become parameters of inference requests.",
            metavar="REGEX",
        ),
        Option("http-max-input-size", "Largest request body, in bytes.", integer(1), 64 << 20),
        Option(
            "http-thread-count",
            "Threads that tritonserver handles HTTP with.",
            integer(1),
            ignored="one event loop handles all connections",
        ),
    ),
)


def http_options(values: Values) -> HttpOptions | None:
    """None if HTTP is off. Raises `ServerError`."""
    from neso.frontends.kserve.http_options import HttpOptions

    if not values["allow-http"]:
        return None
    return HttpOptions(
        http_address(values),
        values["http-port"],
        values["http-max-input-size"],
        reuse_port=values["reuse-http-port"],
        tls=tls_files(values),
        restrictions=restrictions(values),
        header_forwarding=header_forwarding(values, "http-header-forward-pattern"),
    )


def http_address(values: Values) -> str:
    """Where HTTP listens, and whatever has no place of its own."""
    address: str = values["http-address"] or values["host"]
    return address


def tls_files(values: Values, prefix: str = "http") -> TlsFiles | None:
    """Of the options that begin with `prefix`. Raises `OptionError`."""
    from neso.frontends.security import TlsFiles

    certificate, key, root = (
        values[f"{prefix}-{name}"] for name in ("server-cert", "server-key", "root-cert")
    )
    if certificate is None and key is None and root is None:
        return None
    if certificate is None or key is None:
        raise OptionError(f"--{prefix}-server-cert and --{prefix}-server-key must be given together")
    files = TlsFiles(certificate, key, root)
    with about(f"--{prefix}-server-cert"):
        files.context("http/1.1")
    return files


def restrictions(values: Values) -> Restrictions:
    """Of HTTP and of OpenAI's API. Raises `OptionError`."""
    from neso.frontends.security import Restrictions

    with about("--http-restricted-api"):
        return Restrictions.parse(values["http-restricted-api"])


def header_forwarding(values: Values, name: str) -> HeaderForwarding | None:
    """By the pattern of that option. Raises `OptionError`."""
    from neso.frontends.header_forwarding import HeaderForwarding

    if not values[name]:
        return None
    with about(f"--{name}"):
        return HeaderForwarding(values[name])
