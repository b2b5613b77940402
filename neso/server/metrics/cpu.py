"""CPU and memory of the machine, from /proc: the whole machine's, also within a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

from neso.server.metrics.description import FamilyDescription

UTILIZATION = FamilyDescription("nv_cpu_utilization", "gauge", "CPU utilization rate [0.0 - 1.0]")
TOTAL_MEMORY = FamilyDescription("nv_cpu_memory_total_bytes", "gauge", "CPU total memory (RAM), in bytes")
USED_MEMORY = FamilyDescription("nv_cpu_memory_used_bytes", "gauge", "CPU used memory (RAM), in bytes")
CPU_FAMILIES = (UTILIZATION, TOTAL_MEMORY, USED_MEMORY)

PROC = Path("/proc")

# The fields of the first line of /proc/stat: user nice system idle iowait irq softirq steal (guest is in user).
_BUSY = (0, 1, 2, 5, 6, 7)
_IDLE = (3, 4)


class CpuMetrics:
    """Reads /proc when told to. Blocks for some 100 µs. Knows nothing where there is no /proc."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._times = self._read_times()
        self._utilization: float | None = None
        self._memory: tuple[int, int] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Take the utilization since the last time, and the memory now."""
        times = self._read_times()
        if times and self._times:
            passed = [max(0, new - old) for new, old in zip(times, self._times, strict=True)]
            busy, idle = sum(passed[i] for i in _BUSY), sum(passed[i] for i in _IDLE)
            if busy + idle:  # nothing has passed: the last utilization is as good
                self._utilization = busy / (busy + idle)
            elif self._utilization is None:
                self._utilization = 0.0
        self._times = times
        self._memory = self._read_memory()

    def collect(self) -> Iterator[Metric]:
        """The families, as of the last `refresh`."""
        if self._utilization is not None:
            yield GaugeMetricFamily(UTILIZATION.name, UTILIZATION.help, self._utilization)
        if self._memory is not None:
            total, used = self._memory
            yield GaugeMetricFamily(TOTAL_MEMORY.name, TOTAL_MEMORY.help, total)
            yield GaugeMetricFamily(USED_MEMORY.name, USED_MEMORY.help, used)

    def _read_times(self) -> list[int]:
        try:
            with open(self._proc / "stat", encoding="ascii") as file:
                name, *fields = file.readline().split()
            times = [int(field) for field in fields[:8]]
        except (OSError, ValueError):
            return []
        return times if name == "cpu" and len(times) == 8 else []

    def _read_memory(self) -> tuple[int, int] | None:
        """Bytes in all, and in use: what is neither free nor can be freed at once."""
        found: dict[str, int] = {}
        try:
            with open(self._proc / "meminfo", encoding="ascii") as file:
                for line in file:
                    name, value = line.split()[:2]
                    found[name] = int(value) * 1024
            total, available = found["MemTotal:"], found["MemAvailable:"]
        except (OSError, ValueError, KeyError):
            return None
        return total, max(0, total - available)
