"""Trace files in Triton's JSON format, which Triton's trace_summary.py reads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

import orjson

from neso.server.trace_config import TraceSetting
from neso.server.tracing.trace import Activity, ModelTrace, Trace, TraceSink

logger = logging.getLogger(__name__)


class TraceFile:
    """Writes traces to `path`, or to `path`.0, `path`.1 and so on, in a separate thread.

    The file at `path` is valid JSON after each write. Write errors are logged.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._writer = ThreadPoolExecutor(1, "trace-file")  # the thread starts with the first write
        self._file: BinaryIO | None = None
        self._next_index = 0

    def append(self, traces: Sequence[Trace]) -> None:
        """Append to `path`, which the first call overwrites."""
        self._submit(self._append, traces)

    def write_next(self, traces: Sequence[Trace]) -> None:
        """Write the next numbered file."""
        path = f"{self._path}.{self._next_index}"
        self._next_index += 1
        self._submit(self._write, traces, path)

    def close(self) -> None:
        """Wait for pending writes. Blocks."""
        self._writer.shutdown(wait=True)
        if self._file is not None:
            self._file.close()

    def _submit(self, write: Any, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the writer is closed if the server has stopped
            self._writer.submit(write, *arguments).add_done_callback(self._report)

    def _report(self, done: Future[None]) -> None:
        if (error := done.exception()) is not None:
            logger.error("failed to write the trace file '%s': %s", self._path, error)

    def _append(self, traces: Sequence[Trace]) -> None:
        text = _encode(traces)
        if self._file is None:
            self._file = open(self._path, "wb")  # noqa: SIM115  closed by `close`
            self._file.write(b"[" + text + b"]")
        else:
            self._file.seek(-1, 2)
            self._file.write(b",\n" + text + b"]")
        self._file.flush()

    @staticmethod
    def _write(traces: Sequence[Trace], path: str) -> None:
        with open(path, "wb") as file:
            file.write(b"[" + _encode(traces) + b"]")


def _encode(traces: Sequence[Trace]) -> bytes:
    """Encode traces as comma-separated JSON objects."""
    return b",\n".join(orjson.dumps(entry) for trace in traces for entry in trace_entries(trace))


def trace_entries(trace: Trace) -> list[dict[str, Any]]:
    """Return the JSON objects of a trace: a header and the activities of each execution id.

    Activities of the frontend are first, as trace_summary expects.
    """
    entries: list[dict[str, Any]] = []
    first, *others = trace.models
    split = first.activities[0][1] if first.activities else 0
    entries += _timestamps(trace.id, [activity for activity in trace.activities if activity[1] <= split])
    entries += _model_entries(first)
    entries += _timestamps(trace.id, [activity for activity in trace.activities if activity[1] > split])
    for model in others:
        entries += _model_entries(model)
    return entries


def _model_entries(model: ModelTrace) -> list[dict[str, Any]]:
    head: dict[str, Any] = {
        "id": model.id,
        "model_name": model.model_name,
        "model_version": int(model.model_version),
    }
    if model.request_id:
        head["request_id"] = model.request_id
    if model.parent_id:
        head["parent_id"] = model.parent_id
    activities = list(model.activities)
    for name, start, end in model.phases if activities else ():
        if name != "queue":  # the phase "queue" is already covered by QUEUE_START and COMPUTE_START
            activities += [(f"{name.upper()}_START", start), (f"{name.upper()}_END", end)]
    tensors = [
        {"id": model.id, "activity": tensor.activity, "tensor": tensor.as_dict()} for tensor in model.tensors
    ]
    return [head, *_timestamps(model.id, sorted(activities, key=lambda activity: activity[1])), *tensors]


def _timestamps(id: int, activities: Sequence[Activity]) -> list[dict[str, Any]]:
    return [{"id": id, "timestamps": [{"name": name, "ns": ns}]} for name, ns in activities]


FLUSH_AFTER = 1.0
"""Maximum delay before a trace is written, in seconds."""
FLUSH_SIZE = 256
"""Number of buffered traces that triggers an immediate write."""


class TraceBuffer(TraceSink):
    """Buffers the traces of one setting and writes them where Triton does.

    - `log_frequency`: numbered files with this many traces; the last file has the rest.
    - `count` without `log_frequency`: one numbered file when the count is reached. If it is not reached before the
      setting is replaced or the server stops, the traces are appended to the file without a number.
    - neither: the file without a number, with delayed writes.
    """

    def __init__(self, setting: TraceSetting, file: TraceFile) -> None:
        self._file = file
        self._log_frequency = setting.log_frequency
        self._delayed = not setting.log_frequency and setting.count <= 0
        self._left = setting.count
        self._traces: list[Trace] = []
        self._timer: asyncio.TimerHandle | None = None
        self._retired = False

    def end(self, trace: Trace) -> None:
        self._left -= 1
        if trace.models:  # skip requests that were not accepted by a model
            self._traces.append(trace)
        if self._retired:
            self._flush(numbered=self._log_frequency > 0)
        elif self._left == 0 or 0 < self._log_frequency <= len(self._traces):
            self._flush(numbered=True)
        elif self._delayed and len(self._traces) >= FLUSH_SIZE:
            self._flush(numbered=False)
        elif self._delayed and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_AFTER, self._flush, False)

    def retire(self) -> None:
        """Called when the setting was replaced: write the buffered traces now, and later traces immediately."""
        self._retired = True
        self._flush(numbered=self._log_frequency > 0)

    def _flush(self, numbered: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        traces, self._traces = self._traces, []
        if not traces:
            return
        if numbered:
            self._file.write_next(traces)
        else:
            self._file.append(traces)
