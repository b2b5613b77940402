"""Reads trace files with the rules of Triton's trace_summary."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class ReadTrace:
    """The content of a file for one execution of a model."""

    id: int
    model: str = ""
    version: int = 0
    request_id: str = ""
    parent_id: int | None = None
    timestamps: dict[str, int] = field(default_factory=dict)
    tensors: list[tuple[str, str, str, str, str]] = field(default_factory=list)


def read_traces(path: Path) -> list[ReadTrace]:
    """Return the traces of a file by id.

    A trace without a parent is included from the first timestamp of a frontend on, a child trace if its parent is
    included; earlier entries are dropped. trace_summary reads a file, sorted by id, in the same way.
    """
    found: dict[int, ReadTrace] = {}
    known: set[int] = set()
    for entry in sorted(json.loads(path.read_text()), key=lambda entry: entry["id"]):
        id = entry["id"]
        stamps = {stamp["name"]: stamp["ns"] for stamp in entry.get("timestamps", ())}
        if entry.get("parent_id") in known or any(
            name.startswith(("HTTP_RECV", "GRPC_WAIT")) for name in stamps
        ):
            known.add(id)
        if id not in known:
            continue
        trace = found.setdefault(id, ReadTrace(id))
        trace.timestamps |= stamps
        if "model_name" in entry:
            trace.model, trace.version = entry["model_name"], entry["model_version"]
            trace.request_id, trace.parent_id = entry.get("request_id", ""), entry.get("parent_id")
        if "activity" in entry:
            tensor = entry["tensor"]
            trace.tensors.append(
                (entry["activity"], tensor["name"], tensor["data"], tensor["shape"], tensor["dtype"])
            )
    return list(found.values())


def check_order(timestamps: dict[str, int]) -> None:
    """Check that no span of trace_summary has a negative duration."""
    order = (
        *("HTTP_RECV_START", "HTTP_RECV_END", "GRPC_WAITREAD_START", "GRPC_WAITREAD_END"),
        *("REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
        *(
            "COMPUTE_END",
            "REQUEST_END",
            "HTTP_SEND_START",
            "HTTP_SEND_END",
            "GRPC_SEND_START",
            "GRPC_SEND_END",
        ),
    )
    times = [timestamps[name] for name in order if name in timestamps]
    assert times == sorted(times), timestamps
