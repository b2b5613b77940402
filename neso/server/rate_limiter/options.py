"""Whether executions are limited, and by what."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from neso.server.errors import InvalidArgument


class RateLimitMode(str, Enum):
    """What `--rate-limit` says."""

    OFF = "off"
    """An execution begins as soon as an instance is free; `rate_limiter` in configurations is ignored."""
    EXECUTION_COUNT = "execution_count"
    """It also waits for the resources of its instance, in the order of executions so far times priority."""


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """How much there is of a resource, on one device or, with None, on each of them."""

    name: str
    count: int
    device: int | None = None

    @classmethod
    def parse(cls, text: str) -> ResourceLimit:
        """From "name:count" or "name:count:device". Raises `InvalidArgument`."""
        parts = text.split(":")
        numbers = parts[1:]
        if (
            not parts[0]
            or len(numbers) not in (1, 2)
            or not all(n.isascii() and n.isdigit() for n in numbers)
        ):
            raise InvalidArgument(
                "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
                f"'<resource_name>:<count>'. Got {text}"
            )
        return cls(parts[0], int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None)
