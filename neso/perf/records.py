"""Records of requests, stored as columns.

Times are nanoseconds of the machine's monotonic clock (`time.monotonic_ns`), which all processes share.
`Records.epoch_offset_ns` converts them to Unix time.
"""

from __future__ import annotations

import json
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from neso.perf.errors import PerfError

UNKNOWN = -1
"""Value of a count that the server did not report."""
MS = 1e-6
"""Milliseconds per nanosecond."""


def epoch_offset_ns() -> int:
    """Return Unix time minus monotonic time, in nanoseconds."""
    return time.time_ns() - time.monotonic_ns()


_STRINGS = ("model", "adapter", "session", "error_kind", "error_message")
_NUMBERS = {
    "number": np.int64,
    "index": np.int32,
    "turn": np.int32,
    "worker": np.int16,
    "intended_ns": np.int64,
    "start_ns": np.int64,
    "connect_ns": np.int64,
    "first_byte_ns": np.int64,
    "first_output_ns": np.int64,
    "end_ns": np.int64,
    "requested_input_tokens": np.int32,
    "requested_output_tokens": np.int32,
    "input_tokens": np.int32,
    "cached_tokens": np.int32,
    "output_tokens": np.int32,
    "reasoning_tokens": np.int32,
    "items": np.int32,
    "request_bytes": np.int64,
    "response_bytes": np.int64,
    "status": np.int16,
    "cancelled": np.bool_,
    "warm_up": np.bool_,
}


@dataclass(slots=True)
class RequestRecord:
    """One request and its response.

    - number: position in the order of sending over all workers; turns of a session have the number of the session
    - index: position in the input source
    - intended_ns: start that the load plan intended; start_ns: when its first byte was written to the socket
    - connect_ns: time spent on opening a connection for it, between `intended_ns` and `start_ns`; 0 if reused
    - first_byte_ns: arrival of the first byte of the response; 0 without response
    - arrivals_ns: arrival of each event with output: text, reasoning, a tool call, or the complete response if it is
      not streamed. Events of one TCP segment have the same time. Role-only, usage-only and [DONE] events don't count.
    - event_tokens: tokens of each of these events, if the server reports them, else empty
    - first_output_ns: arrival of the first event that is not reasoning; 0 if there is none
    - end_ns: arrival of the end of the response, or of the error
    - requested_input_tokens, requested_output_tokens: as the input source gave them
    - input_tokens, cached_tokens, output_tokens, reasoning_tokens: from `usage`; output_tokens include reasoning_tokens
      and input_tokens include cached_tokens. `UNKNOWN` if not reported.
    - items: texts of an embeddings request, passages of a ranking request, else 1
    - output_text: text including reasoning, if kept (`keep_text`), else None
    - status: HTTP status, or the code of gRPC (0 is success); 0 without response
    - error_kind: "" for a success, else one of "connect", "timeout", "disconnect", "http", "stream" (an error event),
      "protocol" (a response that cannot be parsed), "build" (the endpoint cannot send this request), "empty" (a
      response without output)
    - cancelled: the client cancelled it (`--request-cancellation-rate`, the end of the grace period, Ctrl-C); then
      error_kind is ""
    """

    model: str = ""
    adapter: str = ""
    session: str = ""
    number: int = 0
    index: int = 0
    turn: int = 0
    worker: int = 0
    intended_ns: int = 0
    start_ns: int = 0
    connect_ns: int = 0
    first_byte_ns: int = 0
    arrivals_ns: list[int] = field(default_factory=list)
    event_tokens: list[int] = field(default_factory=list)
    first_output_ns: int = 0
    end_ns: int = 0
    requested_input_tokens: int = UNKNOWN
    requested_output_tokens: int = UNKNOWN
    input_tokens: int = UNKNOWN
    cached_tokens: int = UNKNOWN
    output_tokens: int = UNKNOWN
    reasoning_tokens: int = UNKNOWN
    items: int = 1
    request_bytes: int = 0
    response_bytes: int = 0
    output_text: str | None = None
    status: int = 0
    error_kind: str = ""
    error_message: str = ""
    cancelled: bool = False
    warm_up: bool = False

    @property
    def ok(self) -> bool:
        """Whether the response is complete and without error."""
        return not self.error_kind and not self.cancelled


class Records:
    """Records of one run as columns. Row i of every column is request i, in the order of completion.

    - columns: an array [num_requests] for each number of `RequestRecord`, by its name
    - strings: a list [num_requests] for each text of `RequestRecord`, by its name
    - arrivals_ns: int64 array, the arrivals of all requests; those of request i are
      `arrivals_ns[arrival_offsets[i]:arrival_offsets[i + 1]]`
    - event_tokens: int32 array of the same shape as `arrivals_ns`; `UNKNOWN` where not reported
    - output_text: list [num_requests] of texts, None where not kept
    """

    def __init__(
        self,
        columns: dict[str, np.ndarray],
        strings: dict[str, list[str]],
        arrivals_ns: np.ndarray,
        arrival_offsets: np.ndarray,
        event_tokens: np.ndarray,
        output_text: list[str | None],
        epoch_offset_ns: int,
    ) -> None:
        self.columns = columns
        self.strings = strings
        self.arrivals_ns = arrivals_ns
        self.arrival_offsets = arrival_offsets
        self.event_tokens = event_tokens
        self.output_text = output_text
        self.epoch_offset_ns = epoch_offset_ns

    @classmethod
    def of(cls, records: Iterable[RequestRecord], epoch_offset: int | None = None) -> Records:
        """Return the columns of records. `epoch_offset`: by default the current one."""
        rows = list(records)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row.arrivals_ns) for row in rows], out=offsets[1:])
        arrivals = np.fromiter(
            chain.from_iterable(row.arrivals_ns for row in rows), np.int64, int(offsets[-1])
        )
        tokens = np.full(len(arrivals), UNKNOWN, np.int32)
        for row, start in zip(rows, offsets, strict=False):
            if row.event_tokens:
                tokens[start : start + len(row.event_tokens)] = row.event_tokens
        return cls(
            {name: np.array([getattr(row, name) for row in rows], kind) for name, kind in _NUMBERS.items()},
            {name: [getattr(row, name) for row in rows] for name in _STRINGS},
            arrivals,
            offsets,
            tokens,
            [row.output_text for row in rows],
            epoch_offset_ns() if epoch_offset is None else epoch_offset,
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Records]) -> Records:
        """Join the records of several workers or intervals, in this order."""
        if not parts:
            return cls.of(())
        starts = np.cumsum([0, *(len(part.arrivals_ns) for part in parts[:-1])])
        offsets = [part.arrival_offsets[:-1] + start for part, start in zip(parts, starts, strict=True)]
        total = sum(len(part.arrivals_ns) for part in parts)
        return cls(
            {name: np.concatenate([part.columns[name] for part in parts]) for name in _NUMBERS},
            {name: [text for part in parts for text in part.strings[name]] for name in _STRINGS},
            np.concatenate([part.arrivals_ns for part in parts]),
            np.concatenate([*offsets, np.array([total], np.int64)]),
            np.concatenate([part.event_tokens for part in parts]),
            [text for part in parts for text in part.output_text],
            parts[0].epoch_offset_ns,
        )

    def __len__(self) -> int:
        return len(self.output_text)

    def __getitem__(self, index: int) -> RequestRecord:
        start, end = int(self.arrival_offsets[index]), int(self.arrival_offsets[index + 1])
        tokens = self.event_tokens[start:end].tolist()
        scalars: dict[str, Any] = {name: column[index].item() for name, column in self.columns.items()}
        scalars |= {name: texts[index] for name, texts in self.strings.items()}
        return RequestRecord(
            **scalars,
            arrivals_ns=self.arrivals_ns[start:end].tolist(),
            event_tokens=tokens if tokens and tokens[0] != UNKNOWN else [],
            output_text=self.output_text[index],
        )

    def __iter__(self) -> Iterator[RequestRecord]:
        return (self[index] for index in range(len(self)))

    @property
    def ok(self) -> np.ndarray:
        """Bool array [num_requests]: complete responses without error."""
        failed = np.array([bool(kind) for kind in self.strings["error_kind"]], np.bool_)
        done: np.ndarray = ~(failed | self.columns["cancelled"])
        return done

    def select(self, rows: np.ndarray) -> Records:
        """Return the records of a bool or index array, for example `records.select(~records.columns["warm_up"])`."""
        indices = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        lengths = np.diff(self.arrival_offsets)[indices]
        offsets = np.zeros(len(indices) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        starts = self.arrival_offsets[:-1][indices]
        flat = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Records(
            {name: column[indices] for name, column in self.columns.items()},
            {name: [texts[i] for i in indices] for name, texts in self.strings.items()},
            self.arrivals_ns[flat],
            offsets,
            self.event_tokens[flat],
            [self.output_text[i] for i in indices],
            self.epoch_offset_ns,
        )

    def save(self, path: Path) -> None:
        """Write the raw data as a compressed .npz file."""
        texts = {"strings": self.strings, "output_text": self.output_text}
        arrays = {
            "arrivals_ns": self.arrivals_ns,
            "arrival_offsets": self.arrival_offsets,
            "event_tokens": self.event_tokens,
            "epoch_offset_ns": np.array(self.epoch_offset_ns, np.int64),
            "texts": np.frombuffer(json.dumps(texts).encode(), np.uint8),
            **self.columns,
        }
        # As np.savez_compressed, but with the fastest level of compression.
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)

    @classmethod
    def load(cls, path: Path) -> Records:
        """Read a file that `save` wrote. Raises `PerfError`."""
        try:
            with np.load(path) as file:
                texts = json.loads(file["texts"].tobytes())
                return cls(
                    {name: file[name] for name in _NUMBERS},
                    texts["strings"],
                    file["arrivals_ns"],
                    file["arrival_offsets"],
                    file["event_tokens"],
                    texts["output_text"],
                    int(file["epoch_offset_ns"]),
                )
        except (OSError, KeyError, ValueError) as error:
            raise PerfError(f"{path}: not raw data of neso perf: {error}") from None


@dataclass(slots=True)
class RunResult:
    """One load with its records; a sweep gives several.

    - load: the load of this run by option name, for example {"concurrency": 8} or {"request_rate": 20.0}; it names the
      folder of the run and is the x axis of a sweep
    - settings: all options by name, as JSON values, for `input_config` of the exports
    - start_ns, end_ns: measured interval without warm-up, monotonic; end_ns is the last response
    - stop_reason: "requests", "duration", "schedule", "stable", "interrupted", "server" (it stopped answering),
      "errors" (every request failed with the same error), "worker" (a worker process died)
    - errors: messages about the whole run, for example that the server died
    - client: the client's own figures: "workers", "cpu_seconds", "cpu_us_per_request", "cpu_us_per_event",
      "max_loop_lag_ms"
    - telemetry: server metrics, and CPU, memory and GPU use
    """

    records: Records
    load: dict[str, Any]
    settings: dict[str, Any]
    start_ns: int
    end_ns: int
    stop_reason: str
    errors: list[str] = field(default_factory=list)
    client: dict[str, float] = field(default_factory=dict)
    telemetry: dict[str, Any] = field(default_factory=dict)
