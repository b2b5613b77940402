"""Instance groups: how many instances, of which kind, on which device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from neso.server.errors import InvalidArgument

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def expand_groups(groups: Iterable[Mapping[str, Any]], model: str) -> list[dict[str, str]]:
    """What each instance is told of its place: `count` for each group, or for each GPU of a group.

    Raises `InvalidArgument` for GPUs that there are not.
    """
    places = []
    for group in groups:
        kind = group["kind"].removeprefix("KIND_")
        if kind == "CPU" and group["gpus"]:
            raise InvalidArgument(
                f"instance group {group['name']} of model {model} has kind KIND_CPU but specifies one or more GPUs"
            )
        for index in range(group["count"]):
            for device in _devices(group, model) if kind == "GPU" else (0,):
                places.append(
                    {
                        "model_instance_kind": kind,
                        "model_instance_name": f"{group['name']}_{index}",
                        "model_instance_device_id": str(device),
                    }
                )
    return places


def _devices(group: Mapping[str, Any], model: str) -> list[int]:
    where = f"instance group {group['name']} of model {model}"
    available = available_gpus()
    if not group["gpus"]:
        if not available:
            raise InvalidArgument(f"{where} has kind KIND_GPU but no GPUs are available")
        return available
    for gpu in group["gpus"]:
        if gpu not in available:
            known = ", ".join(map(str, available)) or "none"
            raise InvalidArgument(
                f"{where} specifies invalid or unsupported gpu id {gpu}. GPUs that are available are: {known}"
            )
    return list(group["gpus"])


def available_gpus() -> list[int]:
    """The numbers that CUDA gives the GPUs of this machine, as the driver and CUDA_VISIBLE_DEVICES tell."""
    count = len(list(_NVIDIA_GPUS.iterdir())) if _NVIDIA_GPUS.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        chosen = [entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]
        count = min(count, len(chosen))
    return list(range(count))
