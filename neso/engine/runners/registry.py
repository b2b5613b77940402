"""Registry of runners by name, and loading of models."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from neso.engine.runners.base import LayerStack, Runner, SpecRunner
from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption, reject_thread_binding
from neso.engine.specs.config_reader import UnsupportedModel
from neso.engine.specs.decoder_spec import limit_attention
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.source import CheckpointError, TensorSource

logger = logging.getLogger(__name__)

# Module and class by name, fastest first: "auto" selects the first that fits the machine and can be imported.
RUNNERS = {
    "torch": ("neso.engine.runners.torch.runner", "TorchRunner"),
    "native": ("neso.engine.runners.native.runner", "NativeRunner"),
    "reference": ("neso.engine.runners.reference.runner", "ReferenceRunner"),
}
# The same for encoder layers.
LAYER_STACKS = {
    "torch": ("neso.engine.runners.torch.encoder", "TorchLayerStack"),
    "native": ("neso.engine.runners.native.encoder", "NativeLayerStack"),
    "reference": ("neso.engine.runners.reference.encoder", "ReferenceLayerStack"),
}

CheckLength = Callable[[int], int]
"""Maps the model's maximum sequence length to the length to serve; may raise."""


class UnknownRunner(ValueError):
    """No runner has this name, or the runner cannot run on this machine."""


def open_model(
    source: TensorSource,
    runner: str,
    options: RunnerOptions,
    check_length: CheckLength,
    config: Mapping[str, Any] | None = None,
) -> Runner:
    """Load a decoder with the runner of this name.

    `config` describes the language model if it is only a part of the checkpoint; default: `source.config`.

    "auto" falls back to the transformers runner for a model without a spec. `check_length` is called before the weights
    are read. Raises the errors of `check_length`, and `UnsupportedModel`, `UnsupportedOption`, `UnknownRunner`,
    `CheckpointError`.
    """
    config = source.config if config is None else config
    if runner == "transformers":
        return _open_with_transformers(source, config, options, check_length)
    try:
        spec = decoder_spec(config)
    except UnsupportedModel as unsupported:
        if runner != "auto":
            raise
        try:
            return _open_with_transformers(source, config, options, check_length)
        except (UnknownRunner, UnsupportedModel, CheckpointError) as error:
            raise UnsupportedModel(f"{unsupported}; {error}") from None
    spec = spec.for_length(check_length(spec.max_position))
    spec = limit_attention(spec, options.max_attention_window_size, options.sink_token_length)
    kind = runner_class(runner)
    if options.layout.size > 1 and "ranks" not in kind.capabilities:
        raise UnsupportedOption(
            f"{kind.__name__} runs on one rank only, not with tensor_parallel_size or pipeline_parallel_size"
        )
    if spec.sink_tokens and "attention_sinks" not in kind.capabilities:
        raise UnsupportedOption(f"sink_token_length: {kind.__name__} has no attention sinks")
    if options.attention_backend != "auto" and "attention_backends" not in kind.capabilities:
        raise UnsupportedOption(
            f"attention_backend: {kind.__name__} has its own attention, not {options.attention_backend}; use auto"
        )
    if "thread_binding" not in kind.capabilities:
        reject_thread_binding(options)
    return kind.load(spec, source, options)


def runner_class(name: str = "auto") -> type[SpecRunner]:
    """Return the class of a runner, imported on first use. Raises `UnknownRunner`."""
    found: type[SpecRunner] = _find(name, RUNNERS)
    return found


def layer_stack_class(name: str = "auto") -> type[LayerStack]:
    """Return the class that executes encoder layers, by the name of its runner. Raises `UnknownRunner`."""
    found: type[LayerStack] = _find(name, LAYER_STACKS)
    return found


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA driver is loaded. Does not import torch, which would slow down every start."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg"))


def _open_with_transformers(
    source: TensorSource, config: Mapping[str, Any], options: RunnerOptions, check_length: CheckLength
) -> Runner:
    if options.layout.size > 1:
        raise UnsupportedOption(
            "models without a spec cannot be split among ranks: transformers runs them on one"
        )
    try:
        from neso.engine.runners.transformers_runner import TransformersRunner
    except ImportError as error:
        raise UnknownRunner(
            f"the runner 'transformers' needs `pip install neso-server[torch]`: {error}"
        ) from None
    reject_thread_binding(options)
    if config is not source.config:
        raise UnsupportedModel(
            f"{source.directory}: models with a vision tower cannot be run by transformers"
        )
    return TransformersRunner.open(source, options, check_length)


def _find(name: str, classes: Mapping[str, tuple[str, str]]) -> Any:
    if name == "auto":
        return _first_importable(classes)
    if name not in classes:
        raise UnknownRunner(
            f"there is no runner {name!r}; there are auto, {', '.join(classes)}, transformers"
        )
    found = _import(*classes[name])
    if isinstance(found, ImportError):
        raise UnknownRunner(f"the runner {name!r} cannot run here: {found}")
    return found


def _first_importable(classes: Mapping[str, tuple[str, str]]) -> type:
    for name, path in classes.items():
        if name == "torch" and not has_nvidia_gpu():
            continue
        found = _import(*path)
        if isinstance(found, type):
            return found
        logger.warning("the runner %s cannot run here, using a slower one: %s", name, found)
    raise UnknownRunner("no runner can run here")


def _import(module: str, class_name: str) -> type | ImportError:
    try:
        found: type = getattr(import_module(module), class_name)
    except ImportError as error:
        return error
    return found
