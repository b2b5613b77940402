"""The GPUs of this machine, without a library of theirs."""

from __future__ import annotations

import os
from pathlib import Path

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def available_gpus() -> list[int]:
    """The numbers that CUDA gives the GPUs of this machine, as the driver and CUDA_VISIBLE_DEVICES tell."""
    count = len(list(_NVIDIA_GPUS.iterdir())) if _NVIDIA_GPUS.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        chosen = [entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]
        count = min(count, len(chosen))
    return list(range(count))
