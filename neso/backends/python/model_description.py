"""What is known of a model before it runs: its file, its outputs, and what each instance is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from neso.backends.python.instance_groups import expand_groups
from neso.backends.python.response_sender import ModelOutputs, Post
from neso.server.backend import ModelContext
from neso.server.datatypes import DataType
from neso.server.model_config import config_to_dict, config_to_json


@dataclass(frozen=True)
class ModelDescription:
    """Of one version of a model.

    - path: of its file
    - instances: the `args` of `initialize`, one for each instance
    - datatypes: of all outputs, implicit states included; `states` are the names of those
    - own_work: requests are for a certain instance, as with sequences
    """

    name: str
    path: Path
    directory: Path
    instances: list[dict[str, str]]
    decoupled: bool
    datatypes: dict[str, DataType]
    states: tuple[str, ...]
    own_work: bool

    @classmethod
    def of(cls, context: ModelContext) -> ModelDescription:
        """Raises `InvalidArgument` for instance groups that this machine cannot run."""
        values = config_to_dict(context.config)
        sequences = values.get("sequence_batching")
        states = {
            state["output_name"]: DataType.from_config(state["data_type"])
            for state in (sequences["state"] if sequences is not None else ())
        }
        outputs = {output["name"]: DataType.from_config(output["data_type"]) for output in values["output"]}
        common = {
            "model_config": config_to_json(context.config),
            "model_repository": str(context.directory),
            "model_version": context.version,
            "model_name": context.name,
        }
        return cls(
            name=context.name,
            path=context.version_directory / context.config.default_model_filename,
            directory=context.directory,
            instances=[common | place for place in expand_groups(values["instance_group"], context.name)],
            decoupled=bool(context.config.model_transaction_policy.decoupled),
            datatypes=outputs | states,
            states=tuple(states),
            own_work=sequences is not None,
        )

    def outputs(self, instance: str, post: Post) -> ModelOutputs:
        """For the responders of an instance."""
        return ModelOutputs(post, instance, self.decoupled, self.datatypes, self.states)
