"""Where and how KServe is served over HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from neso.frontends.http import HttpServerOptions


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Port 0 takes any free one. `max_input_size` bounds the body of a request, in bytes."""

    host: str = "0.0.0.0"
    port: int = 8000
    max_input_size: int = 64 << 20
    keep_alive_timeout: float = 75.0
    header_timeout: float = 20.0

    def server(self) -> HttpServerOptions:
        """What this means for the HTTP server."""
        return HttpServerOptions(
            self.host,
            self.port,
            max_body=self.max_input_size,
            keep_alive_timeout=self.keep_alive_timeout,
            header_timeout=self.header_timeout,
        )
