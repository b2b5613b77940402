"""Finds the defaults of sampling that a model comes with."""

from __future__ import annotations

from pathlib import Path

from neso.engine.config import EngineConfig
from neso.engine.weights.files import read_json_object
from neso.engine.weights.hub import ModelNotFound, resolve_model
from neso.engine.weights.source import CheckpointError
from neso.generation import InvalidParameter, SamplingDefaults
from neso.generation.sampling_defaults import AUTO, NAMES, NOWHERE, means_a_limit

FILE = "generation_config.json"


def read_default_sampling(config: EngineConfig) -> SamplingDefaults:
    """By the rules of vLLM: `override_generation_config` over the file that `generation_config` means.

    Raises `CheckpointError` that names file and field.
    """
    override = config.override_generation_config
    unknown = sorted(override.keys() - set(NAMES))
    if unknown:
        raise CheckpointError(
            f"override_generation_config: '{unknown[0]}' is no default of sampling, known are {', '.join(NAMES)}"
        )
    file = _file(config)
    said = {} if file is None else read_json_object(file)
    limits = means_a_limit(config.generation_config, override)
    try:
        return SamplingDefaults.from_mapping({**said, **override}, limits_tokens=limits)
    except InvalidParameter as error:
        place = "override_generation_config" if error.field in override else file
        raise CheckpointError(f"{place}: {error}") from None


def _file(config: EngineConfig) -> Path | None:
    """The file that the options mean; None for none."""
    source, model = config.generation_config, Path(config.model)
    if source == NOWHERE:
        return None
    if source == AUTO:
        file = model / FILE  # beside a GGUF file there is none
        return file if file.is_file() else None
    given = Path(source).expanduser()
    if given.is_file():
        return given
    try:
        file = (given if given.is_dir() else resolve_model(source, patterns=(FILE,))) / FILE
    except ModelNotFound as error:
        raise CheckpointError(f"generation_config: {error}") from None
    if not file.is_file():
        raise CheckpointError(f"generation_config: {file}: there is no such file")
    return file
