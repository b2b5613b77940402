"""What decides which requests are traced, and what is noted of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntFlag

from neso.server.errors import InvalidArgument


class TraceMode(str, Enum):
    """Where traces go: to a file in Triton's format, or to a collector by OpenTelemetry's protocol."""

    TRITON = "triton"
    OPENTELEMETRY = "opentelemetry"


class TraceLevel(IntFlag):
    """What a trace holds; the names are those of the trace extension."""

    OFF = 0
    TIMESTAMPS = 1
    TENSORS = 2

    def names(self) -> list[str]:
        """As the trace extension lists them."""
        return [
            level.name or "" for level in (TraceLevel.TIMESTAMPS, TraceLevel.TENSORS) if level in self
        ] or ["OFF"]


@dataclass(frozen=True, slots=True)
class TraceSetting:
    """One of `rate` requests is traced, `count` of them in all (-1: no limit).

    `log_frequency`: traces to a file of their own, in mode `triton`; 0 is one file for all.
    """

    level: TraceLevel = TraceLevel.OFF
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0

    def fault(self, mode: TraceMode, file: str) -> str:
        """Why nothing can be traced by this, "" if something can."""
        if not self.level:
            return "tracing is disabled"
        if mode is TraceMode.TRITON and not self.rate:
            return "sample rate must be non-zero"
        if mode is TraceMode.TRITON and not file:
            return "trace file name is not given"
        return ""

    def check(self, mode: TraceMode, file: str) -> None:
        """Raises `InvalidArgument` for a setting that asks for traces which cannot be taken."""
        if self.level and (fault := self.fault(mode, file)):
            raise InvalidArgument(f"Attempting to set invalid trace setting :{fault}")
