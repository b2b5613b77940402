"""Settings of a Python model, from the server's options and the model's configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neso.backends.python.model_module import ModelCode
from neso.backends.python.response import ModelOutputs, Post, RequestStream
from neso.server.backend import ModelContext
from neso.server.config.model_config import config_to_dict, config_to_json
from neso.server.config.scheduling import InstanceSpec, available_gpus, instances_of
from neso.server.errors import InvalidArgument, Unsupported
from neso.server.tensor import DataType

_MODE = "EXECUTION_MODE"
_ENVIRONMENT = "EXECUTION_ENV_PATH"
_CPU_ONLY = "FORCE_CPU_ONLY_INPUT_TENSORS"


@dataclass(frozen=True)
class PythonSettings:
    """Execution settings of a model's instances. Sizes are in bytes.

    - use_process: run each instance in a child process instead of a server thread
    - environment: configured `EXECUTION_ENV_PATH`; "" for the server's Python
    - shm_default_size: initial size of an instance's shared memory, in each direction
    - shm_growth_size: the shared memory grows by multiples of this size, and at least doubles
    - shm_name: name of the shared memory in /proc/<pid>/maps
    - stub_timeout: timeout for the start of a child process, in seconds
    """

    use_process: bool = False
    environment: str = ""
    shm_default_size: int = 1 << 20
    shm_growth_size: int = 1 << 20
    shm_name: str = "neso_python_backend"
    stub_timeout: float = 30.0

    @classmethod
    def from_config(cls, config: Any, backend_config: Mapping[str, str]) -> PythonSettings:
        """Read a `ModelConfig` message and `--backend-config=python,...`. Raises `ServerError`."""
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        environment = parameters.get(_ENVIRONMENT, "")
        cpu_only = parameters.get(_CPU_ONLY, "yes")
        if cpu_only not in ("yes", "no"):
            raise InvalidArgument(
                f"Incorrect value for {_CPU_ONLY}: {cpu_only}, expected 'yes' or 'no', for {config.name}"
            )
        mode = parameters.get(_MODE) or backend_config.get("execution-mode") or ""
        if mode not in ("", "thread", "process"):
            raise InvalidArgument(
                f"unknown execution mode '{mode}', expected 'thread' or 'process', for {config.name}"
            )
        if environment and parameters.get(_MODE) == "thread":
            raise InvalidArgument(f"{_ENVIRONMENT} needs {_MODE} 'process', for {config.name}")
        use_process = mode == "process" or bool(environment)
        if use_process and sys.platform != "linux":
            raise Unsupported(f"{_MODE} 'process' is only supported on Linux, for {config.name}")
        return cls(
            use_process=use_process,
            environment=environment,
            shm_default_size=_positive_size(backend_config, "shm-default-byte-size", 1 << 20),
            shm_growth_size=_positive_size(backend_config, "shm-growth-byte-size", 1 << 20),
            shm_name=_region_name(backend_config.get("shm-region-prefix-name") or "neso_python_backend"),
            stub_timeout=float(_positive_size(backend_config, "stub-timeout-seconds", 30)),
        )


def _positive_size(backend_config: Mapping[str, str], key: str, default: int) -> int:
    text = backend_config.get(key, str(default))
    if not text.isascii() or not text.isdigit() or int(text) <= 0:
        raise InvalidArgument(f"{key} of the python backend must be an integer > 0, got '{text}'")
    return int(text)


def _region_name(text: str) -> str:
    if len(text.encode()) > 200 or "\0" in text:
        raise InvalidArgument(
            "shm-region-prefix-name of the python backend must be text of at most 200 bytes"
        )
    return text


@dataclass(frozen=True)
class ModelDescription:
    """One version of a model.

    - path: the model's file
    - common: `args` of `initialize` that are the same for all instances
    - instances: active ones first, then passive ones
    - datatypes: datatypes of all outputs, including implicit states; `states`: names of the states
    - assigned: the scheduler assigns requests to instances, as with sequences
    - iterative: requests can be rescheduled
    """

    name: str
    code: ModelCode
    directory: Path
    common: dict[str, str]
    instances: list[InstanceSpec]
    decoupled: bool
    datatypes: dict[str, DataType]
    states: tuple[str, ...]
    assigned: bool
    iterative: bool

    @classmethod
    def from_config(cls, context: ModelContext, config: Any, code: ModelCode) -> ModelDescription:
        """Read a `ModelConfig` message. Raises `InvalidArgument` for instance groups on missing GPUs."""
        values = config_to_dict(config)
        sequences = values.get("sequence_batching")
        states = {
            state["output_name"]: DataType.from_config(state["data_type"])
            for state in (sequences["state"] if sequences is not None else ())
        }
        outputs = {output["name"]: DataType.from_config(output["data_type"]) for output in values["output"]}
        instances = instances_of(config)
        _check_gpus(instances, context.name)
        return cls(
            name=context.name,
            code=code,
            directory=context.directory,
            common={
                "model_config": config_to_json(config),
                "model_repository": str(context.directory),
                "model_version": context.version,
                "model_name": context.name,
            },
            instances=instances,
            decoupled=bool(config.model_transaction_policy.decoupled),
            datatypes=outputs | states,
            states=tuple(states),
            assigned=context.assigns_instances,
            iterative=sequences is not None and sequences["iterative_sequence"],
        )

    def args(self, instance: InstanceSpec) -> dict[str, str]:
        """Return the `args` of `initialize`."""
        return self.common | {
            "model_instance_kind": instance.kind,
            "model_instance_name": instance.name,
            "model_instance_device_id": str(instance.device),
        }

    def has_own_queue(self, instance: InstanceSpec) -> bool:
        """Return whether work is assigned to this instance instead of any idle instance."""
        return self.assigned or instance.passive

    def outputs(
        self, instance: InstanceSpec, post: Post, reschedule: Callable[[RequestStream], None] | None
    ) -> ModelOutputs:
        """Return the output settings for the responders of an instance."""
        return ModelOutputs(post, instance.name, self.decoupled, self.datatypes, self.states, reschedule)


def _check_gpus(instances: list[InstanceSpec], model: str) -> None:
    for instance in instances:
        if instance.kind != "GPU":
            continue
        where = f"instance group {instance.group.name} of model {model}"
        available = available_gpus()
        if not available and not instance.group.gpus:
            raise InvalidArgument(f"{where} has kind KIND_GPU but no GPUs are available")
        if instance.device not in available:
            known = ", ".join(map(str, available)) or "none"
            raise InvalidArgument(
                f"{where} specifies invalid or unsupported gpu id {instance.device}. "
                f"GPUs that are available are: {known}"
            )
