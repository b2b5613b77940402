"""Where traces go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neso.server.trace_config import TraceLevel

if TYPE_CHECKING:
    from neso.server.tracing.model_trace import ModelTrace
    from neso.server.tracing.trace import Trace


class TraceSink:
    """Where traces go. It sees each trace and its models when they begin and when they are over.

    `levels`: what it has a use for.
    """

    levels = TraceLevel.TIMESTAMPS | TraceLevel.TENSORS

    def begin(self, trace: Trace) -> None:
        """A trace begins."""

    def begin_model(self, model: ModelTrace) -> None:
        """A model begins to work for a trace."""

    def end_model(self, model: ModelTrace) -> None:
        """A model is through."""

    def end(self, trace: Trace) -> None:
        """The front end and all models are through."""

    def retire(self) -> None:
        """A setting that gave traces is no longer in force."""

    def context(self, model: ModelTrace) -> dict[str, str] | None:
        """What others need to make their own part of the trace: W3C's headers. None: they cannot."""
        return None

    def name(self, trace: Trace) -> str:
        """The id by which people find the trace."""
        return str(trace.id)
