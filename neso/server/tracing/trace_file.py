"""Trace files in Triton's JSON format, which Triton's trace_summary.py reads."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

import orjson

from neso.generation.spans import Span
from neso.server.trace_config import TraceSetting
from neso.server.tracing.trace import Activity, ModelTrace, Trace, TraceSink, next_id

logger = logging.getLogger(__name__)


class Held:
    """Encoded traces that wait for their file, in an unnamed file of the same folder. Used in the writer's thread.

    `used`: whether traces were passed to `TraceFile.hold` since the last file; used on the event loop.
    """

    def __init__(self, folder: str) -> None:
        self.used = False
        self._folder = folder
        self._file: BinaryIO | None = None

    @property
    def empty(self) -> bool:
        return self._file is None

    def add(self, traces: Sequence[Trace]) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  closed by `move`
        elif self._file.tell():
            self._file.write(_SEPARATOR)
        self._file.write(_encode(traces))

    def move(self, traces: Sequence[Trace], file: BinaryIO) -> None:
        """Write what is held, and further traces, to a file."""
        held, self._file = self._file, None
        if held is not None:
            with held:
                held.seek(0)
                shutil.copyfileobj(held, file)
            if traces:
                file.write(_SEPARATOR)
        file.write(_encode(traces))


class TraceFile:
    """Writes traces to `path`, or to `path`.0, `path`.1 and so on, in a separate thread.

    The file at `path` is valid JSON after each write. Write errors are logged. If `MAX_PENDING` traces, or tensors of
    `MAX_PENDING_BYTES`, wait because the disk is slow, further traces are dropped and their number is logged.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._writer = ThreadPoolExecutor(1, "trace-file")  # the thread starts with the first write
        self._file: BinaryIO | None = None
        self._next_index = 0
        self._lock = threading.Lock()  # for the counts below
        self._pending = 0
        self._pending_bytes = 0
        self._dropped = 0

    def new_held(self) -> Held:
        """Return a place for traces whose file is not yet known."""
        return Held(os.path.dirname(self._path) or os.curdir)

    def hold(self, held: Held, traces: Sequence[Trace]) -> None:
        """Keep traces for a later `append` or `write_next`."""
        if self._admit(traces):
            held.used = True
            self._submit(traces, held.add, traces)

    def append(self, held: Held, traces: Sequence[Trace]) -> None:
        """Append what is held, and further traces, to `path`, which the first call overwrites."""
        self._submit_file(self._append, held, traces)

    def write_next(self, held: Held, traces: Sequence[Trace]) -> None:
        """Write what is held, and further traces, to the next numbered file."""
        if self._submit_file(self._write, held, traces, f"{self._path}.{self._next_index}"):
            self._next_index += 1

    def close(self) -> None:
        """Wait for pending writes. Blocks."""
        self._writer.shutdown(wait=True)
        if self._file is not None:
            self._file.close()

    def _submit_file(self, write: Any, held: Held, traces: Sequence[Trace], *arguments: Any) -> bool:
        """Write what is held, and the traces unless they are dropped. Returns False if there is nothing to write."""
        if not self._admit(traces):
            traces = ()
            if not held.used:
                return False
        held.used = False
        self._submit(traces, write, held, traces, *arguments)
        return True

    def _admit(self, traces: Sequence[Trace]) -> bool:
        """Count traces that will be written. Returns False if too many are waiting: they are dropped."""
        size = _tensor_bytes(traces)
        with self._lock:
            full = self._pending + len(traces) > MAX_PENDING or self._pending_bytes + size > MAX_PENDING_BYTES
            if full and self._pending:
                if not self._dropped:
                    logger.warning("traces are dropped: writing the file '%s' is too slow", self._path)
                self._dropped += len(traces)
                return False
            self._pending += len(traces)
            self._pending_bytes += size
        return True

    def _submit(self, traces: Sequence[Trace], write: Any, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the writer is closed if the server has stopped
            written = self._writer.submit(write, *arguments)
            written.add_done_callback(functools.partial(self._written, len(traces), _tensor_bytes(traces)))

    def _written(self, count: int, size: int, done: Future[None]) -> None:
        if (error := done.exception()) is not None:
            logger.error("failed to write the trace file '%s': %s", self._path, error)
        with self._lock:
            self._pending -= count
            self._pending_bytes -= size
            dropped = 0
            if not self._pending:
                dropped, self._dropped = self._dropped, 0
        if dropped:
            logger.warning("%d traces were dropped: writing the file '%s' was too slow", dropped, self._path)

    def _append(self, held: Held, traces: Sequence[Trace]) -> None:
        if held.empty and not traces:  # they could not be held
            return
        if self._file is None:
            self._file = open(self._path, "wb")  # noqa: SIM115  closed by `close`
            self._file.write(b"[")
        else:
            self._file.seek(-1, 2)
            self._file.write(_SEPARATOR)
        held.move(traces, self._file)
        self._file.write(b"]")
        self._file.flush()

    @staticmethod
    def _write(held: Held, traces: Sequence[Trace], path: str) -> None:
        with open(path, "wb") as file:
            file.write(b"[")
            held.move(traces, file)
            file.write(b"]")


_SEPARATOR = b",\n"


def _encode(traces: Sequence[Trace]) -> bytes:
    """Encode traces as comma-separated JSON objects."""
    return _SEPARATOR.join(orjson.dumps(entry) for trace in traces for entry in trace_entries(trace))


def _tensor_bytes(traces: Sequence[Trace]) -> int:
    return sum(trace.tensor_bytes for trace in traces)


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
    for phase in model.phases if activities else ():
        name = phase.name.upper()
        # The phase "queue" is already covered by QUEUE_START and COMPUTE_START.
        if phase.name != "queue" and not phase.attributes:
            activities += [(f"{name}_START", phase.start_ns), (f"{name}_END", phase.end_ns)]
    tensors = [
        {"id": model.id, "activity": tensor.activity, "tensor": tensor.as_dict()} for tensor in model.tensors
    ]
    parts = [entry for phase in model.phases if activities for entry in _worker_entries(head, phase)]
    return [
        head,
        *_timestamps(model.id, sorted(activities, key=lambda activity: activity[1])),
        *tensors,
        *parts,
    ]


def _worker_entries(parent: dict[str, Any], phase: Span) -> list[dict[str, Any]]:
    """Return the entries of what a worker has executed, as an execution of its own."""
    if not phase.attributes:
        return []
    id, names = next_id(), {"model_name": f"{parent['model_name']}:{phase.name}"}
    head = {**parent, "id": id, "parent_id": parent["id"], **names, **phase.attributes}
    if phase.error:
        head["error"] = phase.error
    return [head, *_timestamps(id, [("REQUEST_START", phase.start_ns), ("REQUEST_END", phase.end_ns)])]


def _timestamps(id: int, activities: Sequence[Activity]) -> list[dict[str, Any]]:
    return [{"id": id, "timestamps": [{"name": name, "ns": ns}]} for name, ns in activities]


FLUSH_AFTER = 1.0
"""Maximum delay before a trace is written, in seconds."""
MAX_BUFFERED = 256
"""Number of traces in memory that triggers an immediate write."""
MAX_BUFFERED_BYTES = 1 << 20
"""Bytes of their tensors that do the same."""
MAX_PENDING = 10_000
"""Number of traces that wait for a slow disk."""
MAX_PENDING_BYTES = 64 << 20
"""Bytes of their tensors."""


class TraceBuffer(TraceSink):
    """Buffers the traces of one setting and writes them where Triton does.

    Traces that wait until a file is complete are held on disk if there are more than `MAX_BUFFERED`.

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
        self._bytes = 0
        self._count = 0  # of the next file
        self._held = file.new_held()
        self._timer: asyncio.TimerHandle | None = None
        self._retired = False

    def end(self, trace: Trace) -> None:
        self._left -= 1
        if trace.models:  # skip requests that were not accepted by a model
            self._traces.append(trace)
            self._bytes += trace.tensor_bytes
            self._count += 1
        full = len(self._traces) >= MAX_BUFFERED or self._bytes >= MAX_BUFFERED_BYTES
        if self._retired:
            self._flush(numbered=self._log_frequency > 0)
        elif self._left == 0 or 0 < self._log_frequency <= self._count:
            self._flush(numbered=True)
        elif full and self._delayed:
            self._flush(numbered=False)
        elif full:
            self._file.hold(self._held, self._take())
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
        if not self._count:
            return
        self._count = 0
        if numbered:
            self._file.write_next(self._held, self._take())
        else:
            self._file.append(self._held, self._take())

    def _take(self) -> list[Trace]:
        traces, self._traces, self._bytes = self._traces, [], 0
        return traces
