"""Finds the checkpoint and the engine options of a model in a repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from neso.backends.default_sampling import near_generation_config
from neso.backends.json_file import read_object
from neso.backends.near_path import near_path
from neso.engine.config import EngineConfig
from neso.engine.weights.hub import ModelNotFound, resolve_model
from neso.server.errors import InvalidArgument

FRONT_END_PARAMETERS = ("tool_call_parser", "reasoning_parser")
"""Parameters of a model that say how its messages are read: the engine does not know them."""


def engine_config(config: Any, version_directory: Path) -> EngineConfig:
    """Options from `model.json` in the version's folder, overridden by the config's `parameters`.

    With `enable_lora`, the adapters in `multi_lora.json` beside it, names and paths, are `lora_modules`. Paths of
    adapters may be relative to the version's folder.

    The checkpoint is the option `model` (a path, relative to the version's folder, or a name on the hub), else
    the version's folder itself; `speculative_model` and `generation_config` are found in the same way.
    Raises `InvalidArgument`.
    """
    options = read_object(version_directory / "model.json")
    options |= {
        name: value.string_value
        for name, value in config.parameters.items()
        if name not in FRONT_END_PARAMETERS
    }
    adapters = read_object(version_directory / "multi_lora.json")
    if adapters and str(options.get("enable_lora", "")).lower() in ("true", "1"):
        options.setdefault("lora_modules", adapters)
    model = options.pop("model", None) or str(version_directory)
    if not isinstance(model, str):
        raise InvalidArgument(f"option 'model' must be a path or a name, got {model!r}")
    if isinstance(source := options.get("generation_config"), str):
        options["generation_config"] = near_generation_config(source, version_directory)
    draft = options.get("speculative_model")
    try:
        directory = resolve_model(near_path(model, version_directory) or model)
        if isinstance(draft, str) and draft:
            options["speculative_model"] = str(resolve_model(near_path(draft, version_directory) or draft))
        engine = EngineConfig.from_options(str(directory), options)
        paths = {
            name: str(near_path(path, version_directory) or path)
            for name, path in engine.lora.lora_modules.items()
        }
        return replace(engine, lora=replace(engine.lora, lora_modules=paths))
    except (ModelNotFound, ValueError) as error:
        raise InvalidArgument(str(error)) from None
