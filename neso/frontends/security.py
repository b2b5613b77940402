"""Access control shared by the frontends: TLS certificates, and APIs restricted to clients with a secret header.

`neso serve --help` imports this module, so `TlsFiles.context` imports `ssl`, which is slow to import.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from neso.server.errors import InvalidArgument

if TYPE_CHECKING:
    import ssl

GROUPS = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
"""API groups of KServe that can be restricted."""
CROSS_SITE = "Refused: the request was sent by a web page of another origin."
"""Message of the error for requests that `is_cross_site` detects."""
GRPC_HEADER_PREFIX = "triton-grpc-protocol-"
"""Prefix of the metadata key that a restricted gRPC call requires."""


@dataclass(frozen=True, slots=True)
class RequiredHeader:
    """Header that requests must have, with its lower-case name and its secret value."""

    name: str
    value: bytes = field(repr=False)

    def matches(self, value: bytes | None) -> bool:
        """Whether the value matches, compared in constant time."""
        return value is not None and hmac.compare_digest(self.value, value)


class Restrictions:
    """The header required by each restricted API group."""

    def __init__(self, required: dict[str, RequiredHeader] | None = None) -> None:
        self._required = required or {}

    @classmethod
    def parse(
        cls, settings: list[str], header_prefix: str = "", known: Sequence[str] = GROUPS
    ) -> Restrictions:
        """Parse settings of the form `GROUP,GROUP:KEY=VALUE`. The header's name is `header_prefix` + KEY.

        Raises `InvalidArgument` for groups that are not in `known`, and for a group in several settings.
        """
        required: dict[str, RequiredHeader] = {}
        for setting in settings:
            groups, colon, pair = setting.partition(":")
            key, equals, value = pair.partition("=")
            if not (groups and colon and key and equals and value):
                # The setting is not shown because it contains the secret.
                raise InvalidArgument("expected GROUP[,GROUP…]:KEY=VALUE")
            for group in groups.split(","):
                if group not in known:
                    raise InvalidArgument(
                        f"unknown restricted group '{group}', expected one of: {', '.join(known)}"
                    )
                if group in required:
                    raise InvalidArgument(f"restricted group '{group}' can not be specified more than once")
                required[group] = RequiredHeader((header_prefix + key).lower(), value.encode())
        return cls(required)

    def __bool__(self) -> bool:
        """Whether any group is restricted."""
        return bool(self._required)

    def get(self, group: str) -> RequiredHeader | None:
        """Return the header required by a group, or None if the group is unrestricted."""
        return self._required.get(group)


def is_cross_site(header: Callable[[str], str | None], origins: Sequence[str] = ()) -> bool:
    """Whether a browser sent the request for a page of another origin, which is not in `origins` ("*": any).

    `header` returns the value of a request header. Requests of programs have none of these headers. `Sec-Fetch-Site` is
    missing if the server is reached over plain HTTP by a name other than localhost; then the host of `Origin` is
    compared with `Host`.
    """
    origin = header("origin")
    if "*" in origins or (origin is not None and origin in origins):
        return False
    site = header("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and origin.partition("://")[2] != (header("host") or "")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a server. `client_root`: CA bundle used to verify client certificates (mutual TLS)."""

    certificate: Path
    key: Path
    client_root: Path | None = None

    def context(self, protocol: str) -> ssl.SSLContext:
        """Create a server context that offers `protocol` in ALPN. Raises `InvalidArgument` naming the invalid file."""
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([protocol])
        for name, path in (("certificate", self.certificate), ("key", self.key)):
            _check_readable(name, path)
        try:
            context.load_cert_chain(self.certificate, self.key, password=_reject_encrypted_key)
        except ssl.SSLError as error:
            raise InvalidArgument(
                f"the TLS certificate '{self.certificate}' and the key '{self.key}' do not match, or one of them "
                f"is not a PEM file: {error.reason or error}"
            ) from None
        except ValueError as error:
            raise InvalidArgument(f"the TLS key '{self.key}' cannot be used: {error}") from None
        if self.client_root is not None:
            _check_readable("root certificate", self.client_root)
            try:
                context.load_verify_locations(self.client_root)
            except ssl.SSLError as error:
                raise InvalidArgument(
                    f"the TLS root certificate '{self.client_root}' is not a PEM file: {error.reason or error}"
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _check_readable(name: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"the TLS {name} '{path}' cannot be read: {error.strerror}") from None


def _reject_encrypted_key() -> str:
    """Password callback that raises an error; without a callback, OpenSSL would prompt on the terminal."""
    raise ValueError("it is encrypted")
