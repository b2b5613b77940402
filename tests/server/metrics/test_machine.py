"""Metrics of CPU, memory and GPUs, from fake and real sources."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

from neso.server.core import Core
from neso.server.metrics.config import MetricsConfig
from neso.server.metrics.machine import CpuMetrics, GpuMetrics, MachineMetrics
from neso.server.options import ServerOptions

MEMINFO = "MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable: 250 kB\nHugePages_Total: 0\n"


@dataclass
class FakeGpu:
    uuid: str
    power: int = 250_500
    energy: int = 7_000_000
    has_power: bool = True


class NvmlError(Exception):
    pass


def fake_nvml(*gpus: FakeGpu) -> ModuleType:
    """The used functions of `pynvml`, for fake GPUs."""
    module = ModuleType("pynvml")

    def power(gpu: FakeGpu) -> int:
        if not gpu.has_power:
            raise NvmlError("Not Supported")
        return gpu.power

    vars(module).update(
        NVMLError=NvmlError,
        shutdowns=[],
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: module.shutdowns.append(1),
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetUUID=lambda gpu: gpu.uuid,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=1 << 30, used=1 << 20),
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=42),
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetPowerManagementLimit=lambda gpu: 700_000,
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: gpu.energy,
    )
    return module


def values(collector) -> dict[tuple[str, ...], float]:
    return {(s.name, *s.labels.values()): s.value for metric in collector.collect() for s in metric.samples}


def test_cpu(tmp_path):
    stat = tmp_path / "stat"
    (tmp_path / "meminfo").write_text(MEMINFO)
    stat.write_text("cpu  100 10 50 800 40 0 0 0 5 5\ncpu0 1 2 3\n")
    cpu = CpuMetrics(tmp_path)
    stat.write_text("cpu  110 10 60 840 60 4 3 3 9 9\n")
    cpu.refresh()
    assert values(cpu) == {
        ("nv_cpu_utilization",): 30 / 90,  # idle plus iowait: 60
        ("nv_cpu_memory_total_bytes",): 1000 * 1024,
        ("nv_cpu_memory_used_bytes",): 750 * 1024,
    }
    cpu.refresh()
    assert values(cpu)[("nv_cpu_utilization",)] == 30 / 90, "no time has passed"


@pytest.mark.parametrize("stat", ["", "cpu a b c d e f g h\n", "cpu 1 2\n", "intr 1 2 3 4 5 6 7 8\n"])
def test_no_cpu_metrics_with_invalid_proc(tmp_path, stat):
    (tmp_path / "stat").write_text(stat)
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")
    assert values(CpuMetrics(tmp_path)) == {}
    assert values(CpuMetrics(tmp_path / "absent")) == {}


def test_gpus():
    gpus = FakeGpu("GPU-a"), FakeGpu("GPU-b", has_power=False)
    metrics = GpuMetrics(fake_nvml(*gpus))
    gpus[0].energy += 1_500
    metrics.refresh()
    found = values(metrics)
    assert {name: value for (name, uuid), value in found.items() if uuid == "GPU-a"} == {
        "nv_gpu_utilization": 0.42,
        "nv_gpu_memory_total_bytes": 1 << 30,
        "nv_gpu_memory_used_bytes": 1 << 20,
        "nv_gpu_power_usage": 250.5,
        "nv_gpu_power_limit": 700.0,
        "nv_energy_consumption": 1.5,
    }
    assert ("nv_gpu_power_usage", "GPU-b") not in found and ("nv_gpu_power_limit", "GPU-b") in found


@pytest.mark.parametrize(
    "visible, expected",
    [("1", ["GPU-bc"]), ("GPU-a,1", ["GPU-ab", "GPU-bc"]), ("", []), ("-1", []), ("GPU-z", [])],
)
def test_cuda_visible_devices_selects_gpus(monkeypatch, visible, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = values(GpuMetrics(fake_nvml(FakeGpu("GPU-ab"), FakeGpu("GPU-bc"))))
    assert sorted({uuid for _, uuid in found}) == expected


async def test_core_exports_gpu_metrics(monkeypatch, tmp_path):
    nvml = fake_nvml(FakeGpu("GPU-a"))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    core = Core(ServerOptions(model_repository=(tmp_path,), metrics=MetricsConfig(interval=0)))
    await core.start()
    lines = (await core.render_metrics()).decode().splitlines()
    assert "# TYPE nv_energy_consumption counter" in lines
    assert 'nv_energy_consumption{gpu_uuid="GPU-a"} 0' in lines
    assert 'nv_gpu_power_usage{gpu_uuid="GPU-a"} 250.5' in lines
    assert "nv_pinned_memory_pool_total_bytes 0" in lines
    await core.stop()
    assert nvml.shutdowns == [1]


async def test_no_gpu_metrics_without_nvml(monkeypatch):
    nvml = fake_nvml()

    def no_driver() -> None:
        raise NvmlError("Driver Not Loaded")

    nvml.nvmlInit = no_driver
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    metrics = MachineMetrics(MetricsConfig(cpu=False))
    await metrics.update()
    assert all(name.startswith("nv_pinned_memory") for (name,) in values(metrics))


async def test_machine_is_read_at_most_once_per_interval(monkeypatch):
    reads = []
    refresh = CpuMetrics.refresh
    monkeypatch.setattr(CpuMetrics, "refresh", lambda self: (reads.append(1), refresh(self)))
    metrics = MachineMetrics(MetricsConfig(interval=1000))
    for _ in range(3):
        await metrics.update()
    assert len(reads) == 1
    busy = MachineMetrics(MetricsConfig(interval=0))
    for _ in range(3):
        await busy.update()
    assert len(reads) == 4
    assert 0 <= values(busy)[("nv_cpu_utilization",)] <= 1
    assert 0 < values(busy)[("nv_cpu_memory_used_bytes",)] < values(busy)[("nv_cpu_memory_total_bytes",)]


async def test_disabled_metrics_are_not_read(monkeypatch):
    monkeypatch.setattr(CpuMetrics, "__init__", lambda self: pytest.fail("read"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    metrics = MachineMetrics(MetricsConfig(cpu=False, gpu=False))
    await metrics.update()
    assert [name for (name,) in values(metrics)] == [
        "nv_pinned_memory_pool_total_bytes",
        "nv_pinned_memory_pool_used_bytes",
    ]
