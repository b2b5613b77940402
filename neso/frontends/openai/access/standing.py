"""How a client stands with a limit."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """`what`: requests or tokens. `reset`: seconds until there is more."""

    what: str
    limit: int
    remaining: int
    reset: float


def duration(seconds: float) -> str:
    """As OpenAI writes times: 250ms, 12s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
