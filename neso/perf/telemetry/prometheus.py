"""Server metrics in Prometheus text format, read while the load runs.

Each endpoint has its own thread, which reads it at intervals. After a few failures an endpoint is no longer read and
reports its last error, so that it never delays the run.
"""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MAX_BYTES = 32 * 1024 * 1024
"""Maximum size of a response."""
MAX_FAILURES = 3
"""Consecutive failures after which an endpoint is no longer read."""
TIMEOUT = 2.0
"""Timeout of a read, in seconds."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of one read: nanoseconds of the monotonic clock, and value by series, for example `up{job="a"}`."""

    ns: int
    values: dict[str, float]


@dataclass
class Endpoint:
    """One metrics endpoint and its samples. `error` says why it is no longer read."""

    url: str
    samples: list[Sample] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    """Type of each metric family: counter, gauge, histogram, summary, untyped."""
    error: str = ""
    failures: int = 0

    def read(self) -> None:
        """Read the endpoint once. Sets `error` if it failed too often or is not a metrics endpoint."""
        ns = time.monotonic_ns()
        try:
            kinds, values = parse(fetch(self.url))
        except (OSError, ValueError) as error:
            self.failures += 1
            if self.failures >= MAX_FAILURES or isinstance(error, ValueError):
                self.error = f"{self.url}: {error}"
            return
        self.failures = 0
        self.kinds.update(kinds)
        self.samples.append(Sample(ns, values))

    def change(self, series: str) -> float | None:
        """Return how much a counter grew over the run. A restart of the server counts from 0."""
        values = [sample.values[series] for sample in self.samples if series in sample.values]
        if len(values) < 2:
            return None
        return sum(after - before if after >= before else after for before, after in pairwise(values))

    def over_time(self, series: str) -> tuple[list[int], list[float]]:
        """Return the times in nanoseconds and the values of one series."""
        found = [(sample.ns, sample.values[series]) for sample in self.samples if series in sample.values]
        return [ns for ns, _ in found], [value for _, value in found]

    def kind(self, series: str) -> str:
        """Return the type of the family of a series, "" if it is not known."""
        name = series.split("{")[0]
        for suffix in ("", "_total", "_bucket", "_sum", "_count"):
            if name.endswith(suffix) and (found := self.kinds.get(name.removesuffix(suffix))):
                return found
        return ""


def fetch(url: str) -> str:
    """Return the text of a metrics endpoint. Raises `OSError`, and `ValueError` if it is too large."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            content: bytes = answer.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise OSError(f"status {error.code}") from None
    except urllib.error.URLError as error:
        raise OSError(str(error.reason)) from None
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    return content.decode("utf-8", "replace")


def parse(text: str) -> tuple[dict[str, str], dict[str, float]]:
    """Return type by family and value by series of Prometheus text. Raises `ValueError` for another format."""
    kinds: dict[str, str] = {}
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            parts = line.split()
            if len(parts) == 4:
                kinds[parts[2]] = parts[3]
        elif line and not line.startswith("#"):
            series, value = _sample(line)
            values[series] = value
    return kinds, values


def _sample(line: str) -> tuple[str, float]:
    line = line.split(" # {", 1)[0]  # without the exemplar of OpenMetrics
    end = line.rfind("}") + 1
    name, rest = (line[:end], line[end:]) if end else line.split(" ", 1) if " " in line else (line, "")
    parts = rest.split()
    try:
        if not (name[0].isalpha() or name[0] in "_:") or not 1 <= len(parts) <= 2:
            raise ValueError
        return name.strip(), float(parts[0])
    except ValueError:
        raise ValueError(f"not Prometheus text: {line[:60]!r}") from None


class PrometheusReader:
    """Reads endpoints at intervals from its construction until `stop`, each in its own thread."""

    def __init__(self, urls: Sequence[str], interval: float) -> None:
        self.endpoints = [Endpoint(metrics_url(url)) for url in urls]
        self._interval = interval
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(endpoint,), daemon=True) for endpoint in self.endpoints
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, endpoint: Endpoint) -> None:
        while not endpoint.error:
            endpoint.read()
            if self._ended.wait(self._interval):
                if not endpoint.error:
                    endpoint.read()  # the last values, after all responses
                return

    def stop(self) -> None:
        """Read each endpoint for the last time; waits a little longer than one timeout at most."""
        self._ended.set()
        end = time.monotonic() + TIMEOUT + 0.5
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


def metrics_url(url: str) -> str:
    """Return a complete URL: `localhost:8002` is `http://localhost:8002/metrics`."""
    full = url if "://" in url else f"http://{url}"
    return full if full.count("/") > 2 else f"{full}/metrics"
