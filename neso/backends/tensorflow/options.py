"""Settings of the TensorFlow backend: parameters of a model, `--backend-config`, and `optimization`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from neso.backends.tensor import Parameters
from neso.server.errors import InvalidArgument

SAVED_MODEL, GRAPH_DEF = "tensorflow_savedmodel", "tensorflow_graphdef"
"""The values of `platform`."""
_PARAMETERS = {
    "TF_GRAPH_TAG",
    "TF_INIT_OPS_FILE",
    "TF_NUM_INTER_THREADS",
    "TF_NUM_INTRA_THREADS",
    "TF_SIGNATURE_DEF",
    "TF_USE_PER_SESSION_THREADS",
}
_SAVED_MODEL_PARAMETERS = ("TF_GRAPH_TAG", "TF_SIGNATURE_DEF")
_GRAPH_DEF_PARAMETERS = ("TF_INIT_OPS_FILE",)


def check_options(config: Any, settings: Parameters) -> None:
    """Raise `InvalidArgument` for settings that are unknown, not supported, or of the other model format."""
    name = config.name
    for parameter in settings:
        if parameter.startswith("TF_") and parameter not in _PARAMETERS:
            raise InvalidArgument(
                f"unknown parameter '{parameter}' of model '{name}', expected one of {', '.join(sorted(_PARAMETERS))}"
            )
    if config.platform not in (SAVED_MODEL, GRAPH_DEF):
        raise InvalidArgument(
            f"the platform of model '{name}' is '{config.platform}', expected {SAVED_MODEL} or {GRAPH_DEF}"
        )
    other = _GRAPH_DEF_PARAMETERS if config.platform == SAVED_MODEL else _SAVED_MODEL_PARAMETERS
    for parameter in other:
        if parameter in config.parameters:
            raise InvalidArgument(
                f"parameter '{parameter}' of model '{name}' does not apply to models of platform {config.platform}"
            )
    if settings.get("version", "2") != "2":
        raise InvalidArgument(f"the tensorflow backend runs TensorFlow 2, got version={settings['version']}")
    if _fraction(settings) > 0:
        raise InvalidArgument("the tensorflow backend supports only CPUs, so gpu-memory-fraction must be 0")
    accelerators = config.optimization.execution_accelerators
    if accelerators.gpu_execution_accelerator or accelerators.cpu_execution_accelerator:
        raise InvalidArgument(
            f"execution accelerators are not supported by the tensorflow backend, model '{name}' has some"
        )
    if session_share_count(settings) < 1:
        raise InvalidArgument(f"parameter 'MAX_SESSION_SHARE_COUNT' of model '{name}' must be at least 1")


def _fraction(settings: Parameters) -> float:
    text = settings.get("gpu-memory-fraction", "0")
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(f"gpu-memory-fraction is '{text}', expected a number") from None


def session_share_count(settings: Parameters) -> int:
    """Return the largest number of instances that share a session."""
    return settings.integer("MAX_SESSION_SHARE_COUNT", 1)


def session_config(config: Any, settings: Parameters) -> tf.compat.v1.ConfigProto:
    """Return the options of a session. Raises `InvalidArgument`."""
    options = tf.compat.v1.ConfigProto(
        device_count={"GPU": 0},
        intra_op_parallelism_threads=_threads(config.name, settings, "TF_NUM_INTRA_THREADS"),
        inter_op_parallelism_threads=_threads(config.name, settings, "TF_NUM_INTER_THREADS"),
        use_per_session_threads=settings.boolean("TF_USE_PER_SESSION_THREADS", False),
        allow_soft_placement=settings.boolean("allow-soft-placement", True),
    )
    level = config.optimization.graph.level
    optimizer = options.graph_options.optimizer_options
    if level < 0:
        optimizer.global_jit_level = tf.compat.v1.OptimizerOptions.OFF
    elif level == 1:
        optimizer.global_jit_level = tf.compat.v1.OptimizerOptions.ON_1
    elif level > 1:
        optimizer.global_jit_level = tf.compat.v1.OptimizerOptions.ON_2
    return options


def _threads(model: str, settings: Parameters, name: str) -> int:
    number = settings.integer(name, 0)
    if number < 0:
        raise InvalidArgument(
            f"parameter '{name}' of model '{model}' is {number}, expected a non-negative number"
        )
    return number
