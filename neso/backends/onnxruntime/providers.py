"""Which of ONNX Runtime's execution providers run a model, with which options."""

from __future__ import annotations

from typing import Any

import onnxruntime

from neso.backends.tensor import Instance, InstanceKind
from neso.server.errors import InvalidArgument, Unsupported

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_ACCELERATORS = {
    InstanceKind.CPU: {"openvino": "OpenVINOExecutionProvider"},
    InstanceKind.GPU: {"tensorrt": "TensorrtExecutionProvider", "cuda": CUDA},
}
# Where the name in a configuration is not that of the provider.
_TENSORRT_OPTIONS = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_TENSORRT_PRECISIONS: dict[str, dict[str, str]] = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "1"},
    "INT8": {"trt_int8_enable": "1"},
}
_CUDA_PARAMETERS = (
    "cudnn_conv_algo_search",
    "gpu_mem_limit",
    "arena_extend_strategy",
    "do_copy_in_default_stream",
)
# ONNX Runtime takes names where a configuration has numbers.
_CUDA_VALUES = {
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
}

Provider = str | tuple[str, dict[str, str]]


def find_providers(config: Any, instance: Instance) -> list[Provider]:
    """For an instance, best first; the CPU takes what the others cannot. Raises `ServerError`."""
    kind = InstanceKind.GPU if instance.kind is InstanceKind.GPU else InstanceKind.CPU
    accelerators = config.optimization.execution_accelerators
    wanted: dict[str, dict[str, str]] = {}
    given = accelerators.gpu_execution_accelerator
    if kind is InstanceKind.CPU:
        given = accelerators.cpu_execution_accelerator
    for accelerator in given:
        provider = _ACCELERATORS[kind].get(accelerator.name.lower())
        if provider is None:
            raise InvalidArgument(
                f"unknown {kind.value} execution accelerator '{accelerator.name}' is requested for '{config.name}', "
                f"expected one of {', '.join(_ACCELERATORS[kind])}"
            )
        wanted[provider] = _options(provider, dict(accelerator.parameters), config.name)
    if kind is InstanceKind.GPU:
        wanted[CUDA] = _cuda_parameters(config) | wanted.pop(CUDA, {})
        for options in wanted.values():
            options["device_id"] = str(instance.device)
    available = onnxruntime.get_available_providers()
    for provider in wanted:
        if provider not in available:
            raise Unsupported(
                f"model '{config.name}' asks for {provider}, this build of onnxruntime has "
                f"{', '.join(available)}"
            )
    return [*wanted.items(), CPU]


def _options(provider: str, parameters: dict[str, str], model: str) -> dict[str, str]:
    if provider != "TensorrtExecutionProvider":
        return parameters
    options = {_TENSORRT_OPTIONS.get(name, name): value for name, value in parameters.items()}
    precision = options.pop("precision_mode", "FP32")
    if precision not in _TENSORRT_PRECISIONS:
        raise InvalidArgument(
            f"precision_mode of model '{model}' is '{precision}', expected one of {', '.join(_TENSORRT_PRECISIONS)}"
        )
    return options | _TENSORRT_PRECISIONS[precision]


def _cuda_parameters(config: Any) -> dict[str, str]:
    """Those that older configurations have among the model's parameters."""
    options = {}
    for name in _CUDA_PARAMETERS:
        if name in config.parameters:
            value = config.parameters[name].string_value
            options[name] = _CUDA_VALUES.get(name, {}).get(value, value)
    return options
