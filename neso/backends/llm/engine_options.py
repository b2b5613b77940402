"""Engine options in the files and the configuration of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from neso.backends.option_files import (
    read_object,
    resolve_generation_config,
    resolve_processors,
    resolve_relative,
)
from neso.engine.config import EngineConfig
from neso.engine.weights.hub import ModelNotFound, resolve_model
from neso.server.errors import InvalidArgument

FRONTEND_PARAMETERS = ("tool_call_parser", "reasoning_parser")
"""Model parameters for the OpenAI frontend; they are not engine options."""


def engine_config(config: Any, version_directory: Path) -> EngineConfig:
    """Read engine options from `model.json` in the version's folder, overridden by the configuration's `parameters`.

    With `enable_lora`, `multi_lora.json` (names and paths) sets `lora_modules`. Relative paths are relative to the
    version's folder.

    The checkpoint is the option `model` (a path or a name on the Hugging Face hub), or else the version's folder;
    `speculative_model` and `generation_config` are resolved in the same way. Raises `InvalidArgument`.
    """
    options = read_object(version_directory / "model.json")
    options |= {
        name: value.string_value
        for name, value in config.parameters.items()
        if name not in FRONTEND_PARAMETERS
    }
    adapters = read_object(version_directory / "multi_lora.json")
    if adapters and str(options.get("enable_lora", "")).lower() in ("true", "1"):
        options.setdefault("lora_modules", adapters)
    model = options.pop("model", None) or str(version_directory)
    if not isinstance(model, str):
        raise InvalidArgument(f"option 'model' must be a path or a name, got {model!r}")
    if isinstance(source := options.get("generation_config"), str):
        options["generation_config"] = resolve_generation_config(source, version_directory)
    draft = options.get("speculative_model")
    try:
        directory = resolve_model(resolve_relative(model, version_directory) or model)
        if isinstance(draft, str) and draft:
            options["speculative_model"] = str(
                resolve_model(resolve_relative(draft, version_directory) or draft)
            )
        engine = EngineConfig.from_options(str(directory), options)
        paths = {
            name: str(resolve_relative(path, version_directory) or path)
            for name, path in engine.lora.lora_modules.items()
        }
        processors = resolve_processors(engine.logits_processors, version_directory)
        return replace(engine, lora=replace(engine.lora, lora_modules=paths), logits_processors=processors)
    except (ModelNotFound, ValueError) as error:
        raise InvalidArgument(str(error)) from None


def stage_engine_config(config: EngineConfig) -> EngineConfig:
    """Return the options of the engine of a stage's worker: the queue and its limit are the server's.

    Raises `InvalidArgument` for options that do not fit.
    """
    if config.cluster.enabled:
        raise InvalidArgument(
            "workers, worker_address: cannot be combined with --stage, which starts workers"
        )
    if config.rank_address is not None:
        raise InvalidArgument("rank_address cannot be combined with --stage")
    return replace(config, scheduler=replace(config.scheduler, max_queue_size=None))
