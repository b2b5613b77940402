"""What is known of a model before it runs: its file, its outputs, and what each instance is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neso.backends.python.response_sender import ModelOutputs, Post, RequestStream
from neso.server.backend import ModelContext
from neso.server.config.model_config import config_to_dict, config_to_json
from neso.server.config.scheduling import InstanceSpec, available_gpus, instances_of
from neso.server.errors import InvalidArgument
from neso.server.tensor import DataType


@dataclass(frozen=True)
class ModelDescription:
    """Of one version of a model.

    - path: of its file
    - common: the `args` of `initialize` that all instances share
    - instances: those that are passive come last
    - datatypes: of all outputs, implicit states included; `states` are the names of those
    - assigned: the scheduler says which instance executes, as with sequences
    - iterative: requests may be executed again
    """

    name: str
    path: Path
    directory: Path
    common: dict[str, str]
    instances: list[InstanceSpec]
    decoupled: bool
    datatypes: dict[str, DataType]
    states: tuple[str, ...]
    assigned: bool
    iterative: bool

    @classmethod
    def of(cls, context: ModelContext, config: Any) -> ModelDescription:
        """Raises `InvalidArgument` for instance groups that this machine cannot run."""
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
            path=context.version_directory / config.default_model_filename,
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
        """What `initialize` is told."""
        return self.common | {
            "model_instance_kind": instance.kind,
            "model_instance_name": instance.name,
            "model_instance_device_id": str(instance.device),
        }

    def has_own_queue(self, instance: InstanceSpec) -> bool:
        """Whether its work is for it alone, not for whichever instance is free."""
        return self.assigned or instance.passive

    def outputs(
        self, instance: InstanceSpec, post: Post, reschedule: Callable[[RequestStream], None] | None
    ) -> ModelOutputs:
        """For the responders of an instance."""
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
