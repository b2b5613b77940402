"""Runs with made-up records, for tests of metrics and reports."""

from __future__ import annotations

from typing import Any

import numpy as np

from neso.perf.records import Records, RequestRecord, RunResult

MS = 1_000_000


def fake_run(concurrency: int = 4, requests: int = 60, seed: int = 0, **settings: Any) -> RunResult:
    """Return a closed-loop run whose latencies grow with the concurrency; every twentieth request fails."""
    rng = np.random.default_rng(seed)
    free = [10**9] * concurrency
    records = []
    for number in range(requests):
        worker = int(np.argmin(free))
        start = free[worker] + int(rng.exponential(2e5))
        output = max(2, int(rng.normal(12, 3)))
        arrivals = [start + int((10 + 2 * concurrency + rng.exponential(4)) * MS)]
        for _ in range(output - 1):
            arrivals.append(arrivals[-1] + int((3 + concurrency + rng.exponential(0.5)) * MS))
        free[worker] = arrivals[-1]
        failed = number % 20 == 19
        records.append(
            RequestRecord(
                "neso-pilot",
                number=number,
                index=number,
                intended_ns=start - 20_000,
                start_ns=start,
                first_byte_ns=arrivals[0] - 1000,
                arrivals_ns=[] if failed else arrivals,
                first_output_ns=0 if failed else arrivals[0],
                end_ns=arrivals[-1] + 1000,
                input_tokens=-1 if failed else int(rng.normal(100, 20)),
                output_tokens=-1 if failed else output,
                requested_output_tokens=output,
                status=503 if failed else 200,
                error_kind="http" if failed else "",
                error_message="<busy>" if failed else "",
            )
        )
    return run_of(records, {"concurrency": concurrency}, **settings)


def run_of(records: list[RequestRecord], load: dict[str, Any] | None = None, **settings: Any) -> RunResult:
    """Return a run of records, from its first start to its last end."""
    endpoint = {"models": ["neso-pilot"], "endpoint_type": "chat", "streaming": True, **settings}
    return RunResult(
        Records.of(records, 0),
        {"concurrency": 1} if load is None else load,
        {"endpoint": endpoint},
        min((one.start_ns for one in records), default=0),
        max((one.end_ns for one in records), default=0),
        "requests",
    )
