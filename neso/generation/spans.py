"""Timed parts of a request's execution, for its trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Span:
    """A part of an execution, in ns of this process's monotonic clock.

    - attributes: of a part that a worker has executed: its name (`worker`), the number of the `attempt`, and counts
    - error: why the part did not end as it should; "" otherwise
    """

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    error: str = ""


class SpanSink(Protocol):
    """Trace of a request."""

    @property
    def context(self) -> str:
        """W3C trace context (`traceparent`) of the request, or the id of its trace; never empty."""

    def add_span(self, span: Span) -> None:
        """Record a span that has ended."""
