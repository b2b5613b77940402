"""Groups of requests that require a secret header."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from neso.server.errors import InvalidArgument

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
"""Groups of the KServe protocols."""
GRPC_HEADER_PREFIX = "triton-grpc-protocol-"
"""Prefix of the metadata key that a restricted gRPC call requires."""


@dataclass(frozen=True, slots=True)
class RequiredHeader:
    """Header that a request must have; `name` is in lower case."""

    name: str
    value: bytes = field(repr=False)

    def matches(self, value: bytes | None) -> bool:
        """Compare in constant time."""
        return value is not None and hmac.compare_digest(self.value, value)


class Restrictions:
    """Required header of each restricted group."""

    def __init__(self, required: dict[str, RequiredHeader] | None = None) -> None:
        self._required = required or {}

    @classmethod
    def parse(
        cls, settings: list[str], header_prefix: str = "", known: Sequence[str] = GROUPS
    ) -> Restrictions:
        """Parse settings `GROUP[,GROUP…]:KEY=VALUE`; the required header is `header_prefix` + KEY.

        Raises `InvalidArgument` for a group that is not in `known` or is in several settings.
        """
        required: dict[str, RequiredHeader] = {}
        for setting in settings:
            groups, colon, pair = setting.partition(":")
            key, equals, value = pair.partition("=")
            if not (groups and colon and key and equals and value):
                # The text is not shown because it contains the secret.
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
        """The header that a group requires, None if it is not restricted."""
        return self._required.get(group)
