"""What requests are sent to: a server over HTTP or gRPC, or an engine in this process."""

from __future__ import annotations

from typing import Any, Protocol

from neso.perf.endpoints.base import History
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest


class Target(Protocol):
    """Sends requests and fills their records. It belongs to one event loop."""

    async def send(
        self,
        request: PerfRequest,
        record: RequestRecord,
        history: History,
        cancel_after: float | None = None,
    ) -> None:
        """Send a request to `record.model` and return when its response is complete, failed or cancelled.

        Failures are noted in the record, not raised. `cancel_after`: cancel it so many seconds after it was sent.
        """

    def message(self, request: PerfRequest) -> dict[str, Any]:
        """Return the user message of a turn, for the history."""

    def cancel_all(self) -> None:
        """Cancel all requests in flight; their `send` returns."""

    def end_session(self, session: str) -> None:
        """Release what is kept for a session."""

    async def close(self) -> None:
        """Close connections."""
