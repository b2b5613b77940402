"""Orchestrator mode (`neso serve --multi-model`): each model gets its own GPUs, or its own part of the CPUs.

Devices are numbered, as in TensorRT-LLM's `gpu_device_ids`. Without GPUs, the cores of the server are divided
into `cpu-devices` parts (a setting of the backend), and each part is a device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from msgspec.structs import replace

from neso.engine.config import EngineConfig
from neso.engine.host_resources import format_cpu_list, split_cpus
from neso.server.backend import ModelContext
from neso.server.errors import InvalidArgument

logger = logging.getLogger(__name__)


def with_own_devices(
    config: EngineConfig, context: ModelContext, owner: object, count: int, gpus: Sequence[str]
) -> EngineConfig:
    """Return the options of `count` engines of a model with their devices; unchanged in other modes.

    Devices of the options (`device_ids`) may overlap with those of other models, which is logged. Without them, the
    model gets those that the fewest models use. Raises `InvalidArgument` for a device that does not exist.
    """
    total = len(gpus) or int(context.backend_config.get("cpu-devices", 0))
    if "cpu-devices" not in context.backend_config or config.cpus is not None:
        return config
    claims, name = context.core.devices, context.name
    if config.device_ids is None:
        needed = min(config.num_ranks * count, total)
        devices = claims.claim_free(owner, name, needed, total)
        each = max(1, needed // count)
        sets = [devices[start % needed :][:each] for start in range(0, each * count, each)]
    else:
        sets = [[int(number) for number in part.split(",")] for part in config.device_ids.split(";")]
        devices = [device for part in sets for device in part]
        if max(devices) >= total:
            raise InvalidArgument(
                f"device_ids: device {max(devices)} does not exist, the highest number is {total - 1}"
            )
        for other in claims.claim(owner, name, devices):
            logger.warning("model '%s' uses devices of model '%s'", name, other)
    if gpus:
        return replace(config, device_ids=";".join(",".join(map(str, part)) for part in sets))
    parts = split_cpus(total)
    cpus = [format_cpu_list({cpu for device in part for cpu in parts[device]}) for part in sets]
    logger.info("model '%s' runs on CPUs %s", name, "; ".join(cpus))
    return replace(config, device_ids=None, cpus=";".join(cpus))
