"""What the access to OpenAI's API depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neso.frontends.openai.access.api_keys import ApiKeys

UNLIMITED = 0
OPEN_GROUPS = {
    "health": ("/health", "/ping"),
    "metrics": ("/metrics",),
    "docs": ("/docs", "/openapi.json", "/redoc"),
}
"""Paths, and those below them, that can be left open to everybody."""


@dataclass(frozen=True, slots=True)
class Quota:
    """How much a client may ask for in a minute; 0 is any number."""

    requests: int = UNLIMITED
    tokens: int = UNLIMITED

    def __bool__(self) -> bool:
        """Whether there is any limit."""
        return bool(self.requests or self.tokens)


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """`keys` None: everybody may ask. `open_groups` (of `OPEN_GROUPS`) need no key.

    `quota` is for each key that has none of its own; without keys, for each address. `origins`: of web pages that may
    ask, ("*",) for all.
    """

    keys: ApiKeys | None = None
    open_groups: tuple[str, ...] = ("health",)
    quota: Quota = field(default_factory=Quota)
    origins: tuple[str, ...] = ()
