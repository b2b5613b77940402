"""Instances and scheduling options of a model configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonclient.grpc.model_config_pb2 import TYPE_FP32, TYPE_INT32

from neso.server.errors import InvalidArgument
from neso.server.schedulers.sequence_inputs import ControlInputs, SequenceStates

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def available_gpus() -> list[int]:
    """Return the CUDA device numbers of this machine, according to the driver and CUDA_VISIBLE_DEVICES."""
    count = len(list(_NVIDIA_GPUS.iterdir())) if _NVIDIA_GPUS.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        chosen = [entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]
        count = min(count, len(chosen))
    return list(range(count))


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance of a model.

    - name: name of its group and index in it
    - kind: "CPU", "GPU", "MODEL" or "AUTO"
    - device: GPU number; 0 for other kinds
    - passive: loaded, but receives no requests
    - group: its `ModelInstanceGroup` message
    """

    name: str
    kind: str
    device: int
    passive: bool
    group: Any


def instances_of(config: Any) -> list[InstanceSpec]:
    """Return `count` instances of each group on each of its GPUs, passive instances last.

    This order makes the indices of active instances equal to the indices used by schedulers.
    """
    specs = []
    for group in config.instance_group:
        kind = group.Kind.Name(group.kind).removeprefix("KIND_")
        devices = (list(group.gpus) or [0]) if kind == "GPU" else [0]
        placed = [device for device in devices for _ in range(group.count)]
        specs += [
            InstanceSpec(f"{group.name}_{number}", kind, device, group.passive, group)
            for number, device in enumerate(placed)
        ]
    return sorted(specs, key=lambda spec: spec.passive)


def check_scheduling(config: Any) -> None:
    """Check batching, sequence and instance options. Raises `InvalidArgument`."""
    _check_instance_groups(config)
    try:
        _check_batch_tensors(config)
        if config.HasField("dynamic_batching"):
            _check_dynamic_batching(config.dynamic_batching, config.max_batch_size)
        if config.HasField("sequence_batching"):
            _check_sequence_batching(config.sequence_batching, config.max_batch_size)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error.message} for {config.name}") from None
    if config.HasField("sequence_batching"):
        ControlInputs(config)
        SequenceStates(config, None)


def _check_dynamic_batching(batching: Any, max_batch_size: int) -> None:
    _check_preferred("dynamic batching preferred size", batching.preferred_batch_size, max_batch_size)
    levels = batching.priority_levels
    if levels:
        if not 1 <= batching.default_priority_level <= levels:
            raise InvalidArgument(f"default priority level must be in range [1, {levels}]")
        if any(not 1 <= level <= levels for level in batching.priority_queue_policy):
            raise InvalidArgument(f"priority queue policy must have priority level in range [1, {levels}]")
    if batching.preserve_ordering:
        if levels > 1:
            raise InvalidArgument("Only one priority level is allowed when 'preserve_ordering' is true")
        policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
        if any(p.default_timeout_microseconds and p.timeout_action == p.DELAY for p in policies):
            raise InvalidArgument(
                "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true"
            )


def _check_sequence_batching(batching: Any, max_batch_size: int) -> None:
    _check_preferred(
        "sequence batching preferred batch size", batching.oldest.preferred_batch_size, max_batch_size
    )
    if batching.oldest.max_candidate_sequences < 0:
        raise InvalidArgument("sequence batching max candidate sequences must be non-negative")
    if not 0.0 <= batching.direct.minimum_slot_utilization <= 1.0:
        raise InvalidArgument("sequence batching minimum slot utilization must be in range (0.0, 1.0]")


def _check_preferred(what: str, sizes: Any, max_batch_size: int) -> None:
    for size in sizes:
        if size <= 0:
            raise InvalidArgument(f"{what} must be positive")
        if size > max_batch_size:
            raise InvalidArgument(f"{what} must be <= max batch size")


def _check_instance_groups(config: Any) -> None:
    for group in config.instance_group:
        kind = group.Kind.Name(group.kind)
        where = f"instance group {group.name} of model {config.name}"
        if kind in ("KIND_CPU", "KIND_MODEL") and group.gpus:
            raise InvalidArgument(f"{where} has kind {kind} but specifies one or more GPUs")
        if group.profile:
            raise InvalidArgument(
                f"{where} specifies profile field which is only supported for TensorRT models"
            )
    if config.instance_group and all(group.passive for group in config.instance_group):
        raise InvalidArgument(f"model {config.name} must have an instance group that is not passive")


def _check_batch_tensors(config: Any) -> None:
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    targets = set(inputs)
    for spec in config.batch_input:
        _check_source(spec, "input", inputs)
        if spec.data_type not in (TYPE_INT32, TYPE_FP32):
            raise InvalidArgument("batch input data type must be TYPE_INT32 or TYPE_FP32")
        for name in spec.target_name:
            if name in targets:
                raise InvalidArgument(f"target input name '{name}' can only be specified once")
            targets.add(name)
    scattered: set[str] = set()
    for spec in config.batch_output:
        _check_source(spec, "output", inputs)
        for name in spec.target_name:
            if name not in outputs:
                raise InvalidArgument(f"unknown target output name '{name}'")
            if name in scattered:
                raise InvalidArgument(f"target output name '{name}' can only be specified once")
            scattered.add(name)


def _check_source(spec: Any, kind: str, inputs: set[str]) -> None:
    name = spec.Kind.Name(spec.kind)
    if len(spec.source_input) != 1:
        raise InvalidArgument(
            f"batch {kind} kind '{name}' expects 1 source input, got {len(spec.source_input)}"
        )
    if spec.source_input[0] not in inputs:
        raise InvalidArgument(f"unknown source input name '{spec.source_input[0]}'")
