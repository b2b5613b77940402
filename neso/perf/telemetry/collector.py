"""Collects the telemetry of one run."""

from __future__ import annotations

import threading
import time
from typing import Any
from urllib.parse import urlsplit

from neso.perf.output_options import OutputOptions
from neso.perf.telemetry.processes import Gpus, is_local, listening_process, process_tree, use_of
from neso.perf.telemetry.prometheus import Endpoint, PrometheusReader, metrics_url

_CHARTS = (
    ("Running and waiting requests", "requests", (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "nv_inference_pending_request_count",
    )),
    ("KV cache use", "share", (
        "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc",
    )),
    ("GPU use (DCGM)", "%", ("DCGM_FI_DEV_GPU_UTIL",)),
    ("GPU memory (DCGM)", "MiB", ("DCGM_FI_DEV_FB_USED",)),
    ("GPU power (DCGM)", "W", ("DCGM_FI_DEV_POWER_USAGE",)),
)  # fmt: skip
"""Server metrics that become charts: title, unit, names of families."""
_DCGM_PORT = 9400


class Collector:
    """Reads server metrics and resource use from its construction until `stop`."""

    def __init__(self, options: OutputOptions, url: str) -> None:
        """`url` is that of the server under load; "" if there is none (an engine in this process)."""
        parts = urlsplit(url if "://" in url else f"//{url}")
        host, port = parts.hostname or "localhost", parts.port or 80
        self._interval = options.telemetry_interval
        self._given = bool(options.server_metrics)
        urls: list[str] = []
        if options.read_server_metrics:
            urls = list(options.server_metrics) or (default_metrics_urls(host, port) if url else [])
        self._metrics = PrometheusReader(urls, self._interval)
        self._series: dict[tuple[str, str, str], tuple[list[int], list[float]]] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if options.telemetry:
            self._thread = threading.Thread(target=self._watch, args=(host, port, bool(url)), daemon=True)
            self._thread.start()

    def stop(self) -> dict[str, Any]:
        """End the measurement and return `RunResult.telemetry`: `series`, `summary` and `errors`."""
        self._ended.set()
        self._metrics.stop()
        if self._thread is not None:
            self._thread.join(self._interval + 1)
        endpoints = self._metrics.endpoints
        series = [
            _series(group, unit, name, ns, values)
            for (group, unit, name), (ns, values) in self._series.items()
        ]
        series += [one for endpoint in endpoints for one in _charted(endpoint)]
        use = {f"{one['group']}, {one['name']} ({one['unit']})": _spread(one["values"]) for one in series}
        counters: dict[str, float] = {}
        for endpoint in endpoints:
            counters |= changes(endpoint)
        # The default endpoints are a guess: only those that the user named must exist.
        errors = [endpoint.error for endpoint in endpoints if endpoint.error and self._given]
        return {"series": series, "summary": {"use": use, "server_metrics": counters}, "errors": errors}

    def _watch(self, host: str, port: int, has_server: bool) -> None:
        gpus = Gpus() if not has_server or is_local(host) else None
        root = listening_process(port) if has_server and gpus is not None else None
        before: tuple[int, float] | None = None
        while True:
            ns = time.monotonic_ns()
            if root is not None:
                use = use_of(process_tree(root))
                if before is not None and use.cpu_seconds >= before[1]:
                    cores = (use.cpu_seconds - before[1]) / ((ns - before[0]) * 1e-9)
                    self._add("CPU of the server", "cores", "server", ns, cores)
                before = ns, use.cpu_seconds
                self._add("Memory of the server", "GiB", "server", ns, use.resident_bytes / 2**30)
            for group, unit, name, value in gpus.read() if gpus is not None else ():
                self._add(group, unit, name, ns, value)
            if self._ended.is_set():
                return
            self._ended.wait(self._interval)

    def _add(self, group: str, unit: str, name: str, ns: int, value: float) -> None:
        times, values = self._series.setdefault((group, unit, name), ([], []))
        times.append(ns)
        values.append(value)


def default_metrics_urls(host: str, port: int) -> list[str]:
    """Return where a server's metrics may be: its own port, Triton's port 8002, and DCGM's exporter."""
    ports = dict.fromkeys([port, 8002] if port in (8000, 8001, 9000) else [port])
    return [metrics_url(f"{host}:{one}") for one in (*ports, _DCGM_PORT)]


def changes(endpoint: Endpoint) -> dict[str, float]:
    """Return how much each counter, and each sum and count of a histogram, grew over the run."""
    found: dict[str, float] = {}
    if len(endpoint.samples) < 2:
        return found
    for series in endpoint.samples[-1].values:
        name = series.split("{")[0]
        cumulative = endpoint.kind(series) == "counter" or name.endswith(("_sum", "_count", "_total"))
        if cumulative and not name.endswith("_created") and (change := endpoint.change(series)):
            found[series] = change
    return found


def _charted(endpoint: Endpoint) -> list[dict[str, Any]]:
    found = []
    if endpoint.samples:
        for series in endpoint.samples[-1].values:
            for group, unit, names in _CHARTS:
                if series.split("{")[0] in names:
                    found.append(_series(group, unit, series, *endpoint.over_time(series)))
    return found


def _series(group: str, unit: str, name: str, ns: list[int], values: list[float]) -> dict[str, Any]:
    return {"group": group, "unit": unit, "name": name, "ns": ns, "values": values}


def _spread(values: list[float]) -> dict[str, float]:
    return {"avg": sum(values) / len(values), "min": min(values), "max": max(values)} if values else {}
