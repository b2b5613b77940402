"""One JSON line for each request, in the form of aiperf's `profile_export.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson

from neso.perf.measurement import Measurement
from neso.perf.metrics import METRICS
from neso.perf.records import RequestRecord


def write_jsonl(measurement: Measurement, path: Path) -> None:
    """Write the records of all requests without the warm-up, also failed ones, in the order of completion."""
    ok = measurement.all_records.ok
    offset = measurement.records.epoch_offset_ns
    good_row = 0
    ends = np.cumsum(np.maximum(measurement.num_events - 1, 0)).astype(np.int64)
    with path.open("wb") as file:
        for row, record in enumerate(measurement.all_records):
            metrics: dict[str, Any] = {}
            if ok[row]:
                metrics = _metrics(measurement, good_row, ends)
                good_row += 1
            line = {"metadata": _metadata(record, offset), "metrics": metrics, "error": _error(record)}
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def _metadata(record: RequestRecord, offset: int) -> dict[str, Any]:
    return {
        "session_num": record.number,
        "conversation_id": record.session or None,
        "turn_index": record.turn,
        "model": record.model,
        "adapter": record.adapter or None,
        "input_index": record.index,
        "request_intended_ns": record.intended_ns + offset,
        "request_start_ns": record.start_ns + offset if record.start_ns else None,
        "request_ack_ns": record.first_byte_ns + offset if record.first_byte_ns else None,
        "request_end_ns": record.end_ns + offset,
        "worker_id": f"worker_{record.worker}",
        "benchmark_phase": "warmup" if record.warm_up else "profiling",
        "was_cancelled": record.cancelled,
    }


def _metrics(measurement: Measurement, row: int, ends: np.ndarray) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for metric in METRICS:
        values = measurement.values.get(metric.name)
        if values is not None and not np.isnan(values[row]):
            found[metric.name] = {"value": float(values[row]), "unit": metric.unit}
    start = int(ends[row - 1]) if row else 0
    gaps = measurement.gaps[start : int(ends[row])]
    if measurement.streaming and len(gaps):
        found["inter_chunk_latency"] = {"value": gaps.tolist(), "unit": "ms"}
    return found


def _error(record: RequestRecord) -> dict[str, Any] | None:
    if not record.error_kind:
        return None
    return {"type": record.error_kind, "code": record.status or None, "message": record.error_message}
