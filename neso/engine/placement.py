"""Placement of the engines of a model: disjoint sets of CPUs and GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from msgspec.structs import replace

from neso.engine.config import EngineConfig
from neso.engine.host_resources import available_cores, format_cpu_list, parse_cpu_list, split_cpus


def place_engines(config: EngineConfig, count: int, gpus: Sequence[str] = ()) -> list[EngineConfig]:
    """Return the options of each of `count` engines of a model.

    The CPUs of the options, or those of this process, are divided between several engines; a single engine without the
    option `cpus` is not bound to CPUs. The available `gpus` are divided if each engine gets at least one, else all
    engines share them. Raises `ValueError` for `cpus` or `device_ids` that do not fit the number of engines.
    """
    config = replace(config, data_parallel_size=count)
    cpu_sets = _cpu_sets(config, count)
    device_sets = _device_sets(config, count, gpus)
    engines = []
    for cpus, devices in zip(cpu_sets, device_sets, strict=True):
        threads = config.num_threads
        if cpus is not None and count > 1 and threads is None:
            # A CPU quota applies to all engines together.
            threads = max(1, min(available_cores(cpus=cpus), available_cores() // count))
        engines.append(
            replace(
                config,
                cpus=None if cpus is None else format_cpu_list(cpus),
                device_ids=devices,
                num_threads=threads,
            )
        )
    return engines


def visible_devices(device_ids: str) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for GPUs that are numbered within its present value."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return device_ids
    names = visible.split(",")
    return ",".join(names[int(number)] for number in device_ids.split(","))


def _cpu_sets(config: EngineConfig, count: int) -> list[list[int] | None]:
    if config.cpus is None:
        return [None] if count == 1 else [*split_cpus(count)]
    try:
        sets = [parse_cpu_list(text) for text in config.cpus.split(";")]
    except ValueError as error:
        raise ValueError(f"cpus: {error}") from None
    if len(sets) == 1:
        return [*split_cpus(count, cpus=sets[0])]
    _check_number("cpus", len(sets), count)
    return [*sets]


def _device_sets(config: EngineConfig, count: int, gpus: Sequence[str]) -> list[str | None]:
    if config.device_ids is not None:
        sets = config.device_ids.split(";")
        _check_number("device_ids", len(sets), count)
        for devices in sets:
            _check_devices(devices)
        return [*sets]
    if count == 1 or len(gpus) < count:
        return [None] * count
    each = len(gpus) // count
    return [",".join(gpus[engine * each : (engine + 1) * each]) for engine in range(count)]


def _check_number(option: str, given: int, count: int) -> None:
    if given != count:
        raise ValueError(
            f"{option}: {given} sets, separated by ';', for {count} {'engine' if count == 1 else 'engines'}"
        )


def _check_devices(devices: str) -> None:
    try:
        visible_devices(devices)
    except (IndexError, ValueError):
        raise ValueError(
            f"device_ids: '{devices}' for the GPUs {os.environ['CUDA_VISIBLE_DEVICES']} of CUDA_VISIBLE_DEVICES"
        ) from None
