"""From a folder to what is needed to make the model: its configuration, backend and versions."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neso.server.backend import Backend, find_backend
from neso.server.errors import InvalidArgument
from neso.server.model_config import check_config, complete_config, config_from_json, is_ensemble, read_config
from neso.server.options import ServerOptions
from neso.server.repository import choose_versions, find_versions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. `config` replaces config.pbtxt; `scratch` owns a temporary `directory`."""

    name: str
    directory: Path
    config: Any | None = None
    scratch: tempfile.TemporaryDirectory[str] | None = None


@dataclass(frozen=True)
class ModelPlan:
    """What a source has turned out to be: ready to be made."""

    source: ModelSource
    config: Any
    backend: type[Backend]
    versions: dict[int, Path]


def plan_model(source: ModelSource, options: ServerOptions) -> ModelPlan:
    """Read, complete and check the configuration. Blocks (files, imports). Raises `ServerError`."""
    versions = find_versions(source.directory)
    if not versions and source.config is not None and source.scratch is None:
        versions = [1]  # a checkpoint that is served without a repository has no version folders
    newest = source.directory / str(versions[-1] if versions else 1)
    config = _find_config(source, options)
    complete_config(config, source.name, newest)
    check_config(config, source.name)
    chosen = choose_versions(versions, config.version_policy, source.name)
    backend = find_backend("ensemble" if is_ensemble(config) else config.backend)
    if not options.disable_auto_complete_config:
        backend.auto_complete(config, source.directory, source.directory / str(chosen[-1]))
        check_config(config, source.name)
    return ModelPlan(
        source, config, backend, {version: source.directory / str(version) for version in chosen}
    )


def override_source(
    name: str, directory: Path | None, config: str | None, files: Mapping[str, bytes] | None
) -> ModelSource:
    """A source with the configuration (JSON) and files of a load request. Blocks. Raises `InvalidArgument`.

    Given files replace the model's folder as a whole, and need a configuration beside them.
    """
    message = config_from_json(config) if config is not None else None
    if files:
        if message is None:
            raise InvalidArgument(
                f"failed to load '{name}', override of model directory requires the model config as well"
            )
        scratch = _write_files(files)
        return ModelSource(name, Path(scratch.name), message, scratch)
    if directory is None:
        raise InvalidArgument(f"failed to load '{name}', failed to poll from model repository")
    return ModelSource(name, directory, message)


def _find_config(source: ModelSource, options: ServerOptions) -> Any:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    if source.config is not None:
        config = ModelConfig()
        config.CopyFrom(source.config)
        return config
    config = read_config(source.directory)
    if config is None:
        if options.disable_auto_complete_config:
            raise InvalidArgument(
                f"model '{source.name}' has no config.pbtxt, and auto-completion is switched off"
            )
        config = ModelConfig()
    return config


def _write_files(files: Mapping[str, bytes]) -> tempfile.TemporaryDirectory[str]:
    scratch = tempfile.TemporaryDirectory(prefix="neso-model-")
    root = Path(scratch.name).resolve()
    try:
        for key, content in files.items():
            _write_file(root, key, content)
    except BaseException:
        scratch.cleanup()
        raise
    return scratch


def _write_file(root: Path, key: str, content: bytes) -> None:
    try:
        path = (root / key.removeprefix("file:")).resolve()
        if not path.is_relative_to(root) or path == root:
            raise InvalidArgument(f"invalid file name '{key}', it must stay inside the model's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:  # too long, or a file and a folder at once
        raise InvalidArgument(f"cannot write the file '{key[:100]}': {error.strerror}") from None
    except ValueError:
        raise InvalidArgument(f"invalid file name {key!r}") from None
