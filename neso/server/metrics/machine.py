"""Machine metrics: CPU and memory from /proc, GPUs from NVML."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from neso.server.metrics.config import MetricsConfig
from neso.server.metrics.registry import Family

logger = logging.getLogger(__name__)


def _gauge(name: str, help: str) -> Family:
    return Family(name, "gauge", help, ())


def _gpu_family(name: str, help: str, kind: str = "gauge") -> Family:
    return Family(name, kind, help, ("gpu_uuid",))


CPU_UTILIZATION = _gauge("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]")
TOTAL_MEMORY = _gauge("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes")
USED_MEMORY = _gauge("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes")
CPU_FAMILIES = (CPU_UTILIZATION, TOTAL_MEMORY, USED_MEMORY)
GPU_FAMILIES = (
    _gpu_family("nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0)"),
    _gpu_family("nv_gpu_memory_total_bytes", "GPU total memory, in bytes"),
    _gpu_family("nv_gpu_memory_used_bytes", "GPU used memory, in bytes"),
    _gpu_family("nv_gpu_power_usage", "GPU power usage in watts"),
    _gpu_family("nv_gpu_power_limit", "GPU power management limit in watts"),
    _gpu_family(
        "nv_energy_consumption",
        "GPU energy consumption in joules since the Triton Server started",
        kind="counter",
    ),
)
# Always 0: the server itself copies no data to GPUs and has no pinned memory pool.
PINNED_MEMORY_FAMILIES = (
    _gauge("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes"),
    _gauge("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes"),
)

PROC = Path("/proc")
_NVIDIA_DRIVER = Path("/dev/nvidiactl")

# Fields of the first line of /proc/stat: user nice system idle iowait irq softirq steal (user includes guest).
_BUSY = (0, 1, 2, 5, 6, 7)
_IDLE = (3, 4)


def _metric(family: Family, samples: list[Sample]) -> Metric:
    metric = Metric(family.name, family.help, family.kind)
    metric.samples = samples
    return metric


def _single(family: Family, value: float) -> Metric:
    return _metric(family, [Sample(family.name, {}, value)])


class CpuMetrics:
    """CPU and memory of the whole machine, also inside a container. Without /proc there are no metrics."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._times = self._read_times()
        self._utilization: float | None = None
        self._memory: tuple[int, int] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read the utilization since the last call, and the memory in use. Blocks for about 100 µs."""
        times = self._read_times()
        if times and self._times:
            passed = [max(0, new - old) for new, old in zip(times, self._times, strict=True)]
            busy, idle = sum(passed[i] for i in _BUSY), sum(passed[i] for i in _IDLE)
            if busy + idle:  # otherwise no time has passed; keep the last utilization
                self._utilization = busy / (busy + idle)
            elif self._utilization is None:
                self._utilization = 0.0
        self._times = times
        self._memory = self._read_memory()

    def collect(self) -> Iterator[Metric]:
        """Yield the families as of the last `refresh`."""
        if self._utilization is not None:
            yield _single(CPU_UTILIZATION, self._utilization)
        if self._memory is not None:
            total, used = self._memory
            yield _single(TOTAL_MEMORY, total)
            yield _single(USED_MEMORY, used)

    def _read_times(self) -> list[int]:
        try:
            with open(self._proc / "stat", encoding="ascii") as file:
                name, *fields = file.readline().split()
            times = [int(field) for field in fields[:8]]
        except (OSError, ValueError):
            return []
        return times if name == "cpu" and len(times) == 8 else []

    def _read_memory(self) -> tuple[int, int] | None:
        """Return total bytes and used bytes (total minus available)."""
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


@dataclass(slots=True)
class _Gpu:
    handle: Any
    uuid: str
    first_energy: float | None = None  # joules
    readings: dict[str, float] = field(default_factory=dict)


class GpuMetrics:
    """GPUs visible to this process, read through NVML. Values that a GPU does not report are omitted.

    `nvml` is the initialised module `pynvml`. Not thread-safe.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._gpus = self._visible_gpus()
        self.refresh()

    @classmethod
    def open(cls) -> GpuMetrics | None:
        """Open NVML; None without a driver or without `pynvml` (package nvidia-ml-py)."""
        try:
            import pynvml
        except ImportError:
            if _NVIDIA_DRIVER.exists():
                logger.warning("no GPU metrics: install nvidia-ml-py (it comes with neso-server[torch])")
            return None
        try:
            pynvml.nvmlInit()
            return cls(pynvml)
        except pynvml.NVMLError as error:
            logger.debug("no GPU metrics: %s", error)
            return None

    def close(self) -> None:
        """Shut NVML down."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            logger.debug("NVML did not shut down: %s", error)

    def refresh(self) -> None:
        """Read all GPUs. Blocks for a few milliseconds."""
        nvml = self._nvml
        for gpu in self._gpus:
            readings: dict[str, float] = {}
            memory = self._query(nvml.nvmlDeviceGetMemoryInfo, gpu)
            if memory is not None:
                readings["nv_gpu_memory_total_bytes"] = memory.total
                readings["nv_gpu_memory_used_bytes"] = memory.used
            rates = self._query(nvml.nvmlDeviceGetUtilizationRates, gpu)
            if rates is not None:
                readings["nv_gpu_utilization"] = rates.gpu / 100
            for name, read in (
                ("nv_gpu_power_usage", nvml.nvmlDeviceGetPowerUsage),
                ("nv_gpu_power_limit", nvml.nvmlDeviceGetPowerManagementLimit),
                ("nv_energy_consumption", nvml.nvmlDeviceGetTotalEnergyConsumption),
            ):
                thousandths = self._query(read, gpu)
                if thousandths is not None:
                    readings[name] = thousandths / 1000
            if (energy := readings.get("nv_energy_consumption")) is not None:
                if gpu.first_energy is None:
                    gpu.first_energy = energy
                readings["nv_energy_consumption"] = energy - gpu.first_energy
            gpu.readings = readings

    def collect(self) -> Iterator[Metric]:
        """Yield the families as of the last `refresh`."""
        for family in GPU_FAMILIES:
            name = family.name
            yield _metric(
                family,
                [
                    Sample(name, {"gpu_uuid": gpu.uuid}, gpu.readings[name])
                    for gpu in self._gpus
                    if name in gpu.readings
                ],
            )

    def _visible_gpus(self) -> list[_Gpu]:
        """Return the GPUs of CUDA_VISIBLE_DEVICES (indices or UUID prefixes); all GPUs by default."""
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        gpus = [_Gpu(handle, _text(nvml.nvmlDeviceGetUUID(handle))) for handle in handles]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return gpus
        names = [name.strip() for name in visible.split(",")]
        return [
            gpu
            for index, gpu in enumerate(gpus)
            if any(
                name == str(index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
                for name in names
            )
        ]

    def _query(self, read: Callable[[Any], Any], gpu: _Gpu) -> Any:
        try:
            return read(gpu.handle)
        except self._nvml.NVMLError:  # not supported by this GPU
            return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class MachineMetrics(Collector):
    """Collects CPU, memory and GPU metrics. A scrape reads values older than the configured interval again."""

    def __init__(self, config: MetricsConfig) -> None:
        self._config = config
        self._cpu: CpuMetrics | None = None
        self._gpu: GpuMetrics | None = None
        self._read_at: float | None = None
        self._lock = threading.Lock()

    async def update(self) -> None:
        """Update values older than the interval, in a thread. The first call starts the measurement of utilization."""
        if not (self._config.cpu or self._config.gpu):
            return
        if self._read_at is None or time.monotonic() - self._read_at >= self._config.interval:
            await asyncio.to_thread(self._read)

    def close(self) -> None:
        """Shut NVML down."""
        with self._lock:
            if self._gpu is not None:
                self._gpu.close()
                self._gpu = None

    def collect(self) -> Iterator[Metric]:
        if self._cpu is not None:
            yield from self._cpu.collect()
        if self._gpu is not None:
            yield from self._gpu.collect()
        for family in PINNED_MEMORY_FAMILIES:
            yield _single(family, 0)

    def _read(self) -> None:
        with self._lock:
            first, self._read_at = self._read_at is None, time.monotonic()
            if first and self._config.cpu:
                self._cpu = CpuMetrics()
            elif self._cpu is not None:
                self._cpu.refresh()
            if first and self._config.gpu:
                self._gpu = GpuMetrics.open()
            elif self._gpu is not None:
                self._gpu.refresh()
