"""The certificate that a front end shows, and those it asks for."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neso.server.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_root`, clients must show a certificate that leads to one in it (mutual TLS)."""

    certificate: Path
    key: Path
    client_root: Path | None = None

    def context(self, protocol: str) -> ssl.SSLContext:
        """For a server of that protocol, by its name in ALPN. Raises `InvalidArgument` that names the file at fault."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([protocol])
        for what, path in (("certificate", self.certificate), ("key", self.key)):
            _read(what, path)
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except ssl.SSLError as error:
            raise InvalidArgument(
                f"the TLS certificate '{self.certificate}' and the key '{self.key}' do not go together, or one of them "
                f"is no PEM file: {error.reason or error}"
            ) from None
        except ValueError as error:
            raise InvalidArgument(f"the TLS key '{self.key}' cannot be used: {error}") from None
        if self.client_root is not None:
            _read("root certificate", self.client_root)
            try:
                context.load_verify_locations(self.client_root)
            except ssl.SSLError as error:
                raise InvalidArgument(
                    f"the TLS root certificate '{self.client_root}' is no PEM file: {error.reason or error}"
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def listening_arguments(
    context: ssl.SSLContext | None, handshake_timeout: float, shutdown_timeout: float
) -> dict[str, Any]:
    """What a loop's `create_server` is to be told of TLS; it refuses the times (seconds) where there is none.

    With its own times, who connects and says nothing would hold up the end of a server for a minute.
    """
    if context is None:
        return {}
    return {
        "ssl": context,
        "ssl_handshake_timeout": handshake_timeout,
        "ssl_shutdown_timeout": shutdown_timeout,
    }


def _read(what: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"the TLS {what} '{path}' cannot be read: {error.strerror}") from None


def _no_password() -> str:
    """OpenSSL would ask at the terminal."""
    raise ValueError("it is encrypted")
