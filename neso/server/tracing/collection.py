"""The traces of one setting until they are written to a file."""

from __future__ import annotations

import asyncio

from neso.server.trace_config import TraceSetting
from neso.server.tracing.trace import Trace
from neso.server.tracing.trace_file import TraceFile
from neso.server.tracing.trace_sink import TraceSink

FLUSH_AFTER = 1.0
"""Seconds that a trace may wait for others before it is written."""
FLUSH_SIZE = 256
"""Traces that are written without waiting for more."""


class Collection(TraceSink):
    """Puts `log_frequency` traces into each file; with 0 all go to one, which follows a second behind.

    A setting with a `count` fills one numbered file with all of them, as Triton does.
    """

    def __init__(self, setting: TraceSetting, file: TraceFile) -> None:
        self._file = file
        self._numbered = bool(setting.log_frequency) or setting.count > 0
        self._size = setting.log_frequency or (setting.count if setting.count > 0 else FLUSH_SIZE)
        self._left = setting.count
        self._traces: list[Trace] = []
        self._timer: asyncio.TimerHandle | None = None
        self._retired = False

    def end(self, trace: Trace) -> None:
        self._left -= 1
        if trace.models:  # a request that no model has accepted leaves nothing
            self._traces.append(trace)
        if self._retired or self._left == 0 or len(self._traces) >= self._size:
            self._flush()
        elif not self._numbered and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_AFTER, self._flush)

    def retire(self) -> None:
        """The setting is no longer in force: write what there is, and what may still come as it comes."""
        self._retired = True
        self._flush()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        traces, self._traces = self._traces, []
        if not traces:
            return
        if self._numbered:
            self._file.write_next(traces)
        else:
            self._file.append(traces)
