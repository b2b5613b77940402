"""Metrics of the machine that the server runs on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from neso.server.metrics.config import MetricsConfig
from neso.server.metrics.cpu import CpuMetrics
from neso.server.metrics.description import FamilyDescription
from neso.server.metrics.gpu import GpuMetrics

# There is no pool of pinned memory: nothing is copied to a GPU by the server itself.
PINNED_MEMORY_FAMILIES = (
    FamilyDescription(
        "nv_pinned_memory_pool_total_bytes", "gauge", "Pinned memory pool total memory size, in bytes"
    ),
    FamilyDescription(
        "nv_pinned_memory_pool_used_bytes", "gauge", "Pinned memory pool used memory size, in bytes"
    ),
)


class SystemMetrics(Collector):
    """CPU, memory and GPUs, read no more often than the interval of the configuration, and only for a scrape."""

    def __init__(self, config: MetricsConfig) -> None:
        self._config = config
        self._cpu: CpuMetrics | None = None
        self._gpu: GpuMetrics | None = None
        self._read_at: float | None = None
        self._busy = threading.Lock()

    async def update(self) -> None:
        """Read anew what is older than the interval, in a thread. The first time is what utilization counts from."""
        if not (self._config.cpu or self._config.gpu):
            return
        if self._read_at is None or time.monotonic() - self._read_at >= self._config.interval:
            await asyncio.to_thread(self._read)

    def close(self) -> None:
        """Let go of the GPUs."""
        with self._busy:
            if self._gpu is not None:
                self._gpu.close()
                self._gpu = None

    def collect(self) -> Iterator[Metric]:
        if self._cpu is not None:
            yield from self._cpu.collect()
        if self._gpu is not None:
            yield from self._gpu.collect()
        for family in PINNED_MEMORY_FAMILIES:
            yield GaugeMetricFamily(family.name, family.help, 0)

    def _read(self) -> None:
        with self._busy:
            first, self._read_at = self._read_at is None, time.monotonic()
            if first and self._config.cpu:
                self._cpu = CpuMetrics()
            elif self._cpu is not None:
                self._cpu.refresh()
            if first and self._config.gpu:
                self._gpu = GpuMetrics.open()
            elif self._gpu is not None:
                self._gpu.refresh()
