"""Groups of a protocol's requests that are answered only to who knows a secret."""

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


@dataclass(frozen=True, slots=True)
class RequiredHeader:
    """A request must have this header (its name in lower case) with this value."""

    name: str
    value: bytes = field(repr=False)

    def matches(self, value: bytes | None) -> bool:
        """Whether that is the value; takes as long for a wrong one as for the right one."""
        return value is not None and hmac.compare_digest(self.value, value)


class Restrictions:
    """The header that each group requires, if it requires one."""

    def __init__(self, required: dict[str, RequiredHeader] | None = None) -> None:
        self._required = required or {}

    @classmethod
    def parse(
        cls, settings: list[str], header_prefix: str = "", known: Sequence[str] = GROUPS
    ) -> Restrictions:
        """From texts like `GROUP,GROUP:KEY=VALUE`; the header is `header_prefix` and KEY. `known` are the groups.

        Raises `InvalidArgument` for an unknown group, and for one that is in several settings.
        """
        required: dict[str, RequiredHeader] = {}
        for setting in settings:
            groups, colon, pair = setting.partition(":")
            key, equals, value = pair.partition("=")
            if not (groups and colon and key and equals and value):
                # The text itself is not shown: it holds the secret.
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
        """None for a group that everybody may use."""
        return self._required.get(group)
