"""Where and how KServe is served over HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field

from neso.frontends.header_forwarding import HeaderForwarding
from neso.frontends.security import Restrictions, TlsFiles
from neso.frontends.transport.http1 import HttpServerOptions


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Port 0 takes any free one. `max_input_size` bounds the body of a request, in bytes.

    `reuse_port`: share the port with other processes. `tls`: serve HTTPS.
    """

    host: str = "0.0.0.0"
    port: int = 8000
    max_input_size: int = 64 << 20
    keep_alive_timeout: float = 75.0
    header_timeout: float = 20.0
    reuse_port: bool = False
    tls: TlsFiles | None = None
    restrictions: Restrictions = field(default_factory=Restrictions)
    header_forwarding: HeaderForwarding | None = None

    def server(self) -> HttpServerOptions:
        """What this means for the HTTP server. Raises `InvalidArgument` for TLS files that cannot be used."""
        return HttpServerOptions(
            self.host,
            self.port,
            max_body=self.max_input_size,
            keep_alive_timeout=self.keep_alive_timeout,
            header_timeout=self.header_timeout,
            reuse_port=self.reuse_port,
            tls=None if self.tls is None else self.tls.context("http/1.1"),
        )
