"""The GPUs that this process may use, as NVML tells of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from neso.server.metrics.description import FamilyDescription

logger = logging.getLogger(__name__)

_DRIVER = Path("/dev/nvidiactl")


def _family(name: str, help: str, kind: str = "gauge") -> FamilyDescription:
    return FamilyDescription(name, kind, help, ("gpu_uuid",))


GPU_FAMILIES = (
    _family("nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0)"),
    _family("nv_gpu_memory_total_bytes", "GPU total memory, in bytes"),
    _family("nv_gpu_memory_used_bytes", "GPU used memory, in bytes"),
    _family("nv_gpu_power_usage", "GPU power usage in watts"),
    _family("nv_gpu_power_limit", "GPU power management limit in watts"),
    _family(
        "nv_energy_consumption",
        "GPU energy consumption in joules since the Triton Server started",
        kind="counter",
    ),
)


@dataclass(slots=True)
class _Gpu:
    handle: Any
    uuid: str
    first_energy: float | None = None  # joules
    readings: dict[str, float] = field(default_factory=dict)


class GpuMetrics:
    """Reads NVML when told to; blocks for some milliseconds. What a GPU does not tell is left out.

    `nvml` is the module `pynvml`, initialised. Call from one thread at a time.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._gpus = self._visible_gpus()
        self.refresh()

    @classmethod
    def open(cls) -> GpuMetrics | None:
        """None without a driver or without `pynvml` (package nvidia-ml-py)."""
        try:
            import pynvml
        except ImportError:
            if _DRIVER.exists():
                logger.warning("no GPU metrics: install nvidia-ml-py (it comes with neso[torch])")
            return None
        try:
            pynvml.nvmlInit()
            return cls(pynvml)
        except pynvml.NVMLError as error:
            logger.debug("no GPU metrics: %s", error)
            return None

    def close(self) -> None:
        """Let go of the driver."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            logger.debug("NVML did not shut down: %s", error)

    def refresh(self) -> None:
        """Ask every GPU."""
        nvml = self._nvml
        for gpu in self._gpus:
            readings: dict[str, float] = {}
            memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, gpu)
            if memory is not None:
                readings["nv_gpu_memory_total_bytes"] = memory.total
                readings["nv_gpu_memory_used_bytes"] = memory.used
            rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, gpu)
            if rates is not None:
                readings["nv_gpu_utilization"] = rates.gpu / 100
            for name, read in (
                ("nv_gpu_power_usage", nvml.nvmlDeviceGetPowerUsage),
                ("nv_gpu_power_limit", nvml.nvmlDeviceGetPowerManagementLimit),
                ("nv_energy_consumption", nvml.nvmlDeviceGetTotalEnergyConsumption),
            ):
                thousandths = self._ask(read, gpu)
                if thousandths is not None:
                    readings[name] = thousandths / 1000
            if (energy := readings.get("nv_energy_consumption")) is not None:
                if gpu.first_energy is None:
                    gpu.first_energy = energy
                readings["nv_energy_consumption"] = energy - gpu.first_energy
            gpu.readings = readings

    def collect(self) -> Iterator[Metric]:
        """The families, as of the last `refresh`."""
        for name, kind, help, _ in GPU_FAMILIES:
            family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, help)
            for gpu in self._gpus:
                if name in gpu.readings:
                    family.samples.append(Sample(name, {"gpu_uuid": gpu.uuid}, gpu.readings[name]))
            yield family

    def _visible_gpus(self) -> list[_Gpu]:
        """Those of CUDA_VISIBLE_DEVICES (numbers or the beginnings of UUIDs), or all."""
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

    def _ask(self, read: Callable[[Any], Any], gpu: _Gpu) -> Any:
        try:
            return read(gpu.handle)
        except self._nvml.NVMLError:  # not every GPU, nor every part of one, has everything
            return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
