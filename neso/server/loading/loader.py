"""From a folder to what is needed to make the model: its configuration, backend and versions."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neso.server.backend import Backend, find_backend
from neso.server.config.ignored_config import ignored_fields
from neso.server.config.model_config import check_config, complete_config, is_ensemble, read_config
from neso.server.errors import InvalidArgument
from neso.server.options import ServerOptions
from neso.server.repository.source import ModelSource
from neso.server.repository.versions import choose_versions, find_versions
from neso.server.repository_agents import RepositoryAgent, run_agents

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelPlan:
    """What a source has turned out to be: ready to be made. `directory` may be one that an agent has prepared."""

    source: ModelSource
    directory: Path
    config: Any
    backend: type[Backend]
    versions: dict[int, Path]
    agents: tuple[RepositoryAgent, ...] = ()

    @property
    def steps(self) -> frozenset[str]:
        """The models that an ensemble is made of."""
        return frozenset(step.model_name for step in self.config.ensemble_scheduling.step)


def plan_model(source: ModelSource, options: ServerOptions) -> ModelPlan:
    """Read, complete and check the configuration. Blocks (files, imports). Raises `ServerError`."""
    config = _find_config(source, options)
    directory, agents = run_agents(config, source.directory)
    versions = find_versions(directory)
    if not versions and source.config is not None and source.fingerprint is not None:
        versions = [1]  # a checkpoint that is served without a repository has no version folders
    newest = directory / str(versions[-1] if versions else 1)
    if source.renamed:
        config.name = source.name
    complete_config(config, source.name, newest)
    check_config(config, source.name)
    chosen = choose_versions(versions, config.version_policy, source.name)
    backend = find_backend("ensemble" if is_ensemble(config) else config.backend)
    if not options.disable_auto_complete_config:
        settings = options.backend_config.get(config.backend, {})
        backend.auto_complete(config, directory, directory / str(chosen[-1]), settings)
        check_config(config, source.name)
    for check in options.config_checks:
        check(config)
    if ignored := ignored_fields(config, backend.heeds):
        logger.warning(
            "model '%s': its configuration has fields without effect: %s", source.name, ", ".join(ignored)
        )
    folders = {version: directory / str(version) for version in chosen}
    return ModelPlan(source, directory, config, backend, folders, agents)


def _find_config(source: ModelSource, options: ServerOptions) -> Any:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    if source.config is not None:
        config = ModelConfig()
        config.CopyFrom(source.config)
        return config
    config = read_config(source.directory, options.model_config_name)
    if config is None:
        if options.disable_auto_complete_config:
            raise InvalidArgument(
                f"model '{source.name}' has no config.pbtxt, and auto-completion is switched off"
            )
        config = ModelConfig()
    return config
