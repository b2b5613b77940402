"""Orchestrator mode of `neso serve`: the number of parts into which the CPUs are divided among the models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.cli.serve_options import ENGINE_BACKENDS, ServeOptions
from neso.server.config.model_config import string_parameter

_DEVICE_PARAMETERS = ("gpu_device_ids", "device_ids")


def orchestrate(options: ServeOptions) -> ServeOptions:
    """Return the options of a server that gives each of its models its own CPUs or GPUs."""
    models = [read_config(path) for path in _config_files(options)]
    arguments = [_argument_config(options)] * len(options.models)
    count = num_devices([model for model in (*models, *arguments) if model is not None])
    config = options.server.backend_config
    config = {
        **config,
        **{name: {"cpu-devices": str(count), **config.get(name, {})} for name in ENGINE_BACKENDS},
    }
    return replace(options, server=replace(options.server, backend_config=config))


def num_devices(models: list[ModelConfig]) -> int:
    """Return the number of devices that the models need: those with numbers, and one for each rank of the others."""
    highest, others = -1, 0
    for model in models:
        numbers = _device_numbers(model)
        if numbers:
            highest = max(highest, *numbers)
        else:
            others += (
                _num_engines(model)
                * _size(model, "tensor_parallel_size")
                * _size(model, "pipeline_parallel_size")
            )
    return max(1, highest + 1 + others)


def read_config(path: Path) -> ModelConfig | None:
    """Read a model configuration; None if it is of another backend or invalid (loading the model reports that)."""
    try:
        config = text_format.Parse(path.read_text(), ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError):
        return None
    known = config.backend in (*ENGINE_BACKENDS, "${triton_backend}")
    return config if known else None


def _config_files(options: ServeOptions) -> list[Path]:
    directories = [Path(place) for place in options.server.model_repository if "://" not in str(place)]
    return [path for directory in directories for path in sorted(directory.glob("*/config.pbtxt"))]


def _argument_config(options: ServeOptions) -> ModelConfig:
    config = ModelConfig(backend="llm")
    for name, value in options.engine.items():
        config.parameters[name].string_value = value
    return config


def _device_numbers(config: ModelConfig) -> list[int]:
    texts = [string_parameter(config, name) for name in _DEVICE_PARAMETERS]
    parts = [part.strip() for text in texts for part in text.replace(";", ",").split(",")]
    return [int(part) for part in parts if part.isdecimal()]


def _num_engines(config: ModelConfig) -> int:
    given = _size(config, "data_parallel_size", 0)
    return given or max(1, sum(max(1, group.count) for group in config.instance_group))


def _size(config: ModelConfig, name: str, default: int = 1) -> int:
    text = string_parameter(config, name)
    return int(text) if text.isdecimal() else default
