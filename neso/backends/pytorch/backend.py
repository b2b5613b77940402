"""`PyTorchBackend`: executes `model.pt` and `model.pt2`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from neso.backends.pytorch.naming import find_arguments, find_results
from neso.backends.pytorch.program import (
    ExportedProgram,
    Program,
    ScriptProgram,
    Value,
    to_numpy,
    to_strings,
    to_torch,
)
from neso.backends.tensor import Instance, InstanceKind, Parameters, TensorBackend, TensorModel
from neso.backends.tensor.model import Arrays, SharedByDevice
from neso.server.backend import ModelContext
from neso.server.errors import InternalError, InvalidArgument, Unsupported
from neso.server.tensor import DataType

logger = logging.getLogger(__name__)


EXPORTED_SUFFIX = ".pt2"


class PyTorchBackend(TensorBackend):
    """One program per instance or, with the parameter `ENABLE_WEIGHT_SHARING`, per device."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._settings = Parameters(context.config, context.backend_config)
        shared = self._settings.boolean("ENABLE_WEIGHT_SHARING", False)
        self._programs: SharedByDevice[Program] = SharedByDevice(shared=shared)

    def make_model(self, instance: Instance) -> TensorModel:
        """Create the model of an instance. Raises `Unsupported` if torch does not find the instance's GPU."""
        device = _device(instance, self.context.name)
        return TorchModel(
            self.context, instance, device or torch.device("cpu"), lambda: self._program(device)
        )

    async def unload(self) -> None:
        await super().unload()
        self._programs.clear()

    def _program(self, device: torch.device | None) -> Program:
        return self._programs.get(device, lambda: self._open(device))

    def _open(self, device: torch.device | None) -> Program:
        path = self.context.version_directory / self.context.config.default_model_filename
        if not path.is_file():
            raise InvalidArgument(f"unable to find '{path}' for model '{self.context.name}'")
        program = ExportedProgram if path.suffix == EXPORTED_SUFFIX else ScriptProgram
        return program(path, device)


def _device(instance: Instance, model: str) -> torch.device | None:
    """Return the device of an instance; None for kind MODEL: the program keeps the devices that it was saved with."""
    if instance.kind is InstanceKind.MODEL:
        return None
    if instance.kind is InstanceKind.CPU:
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if instance.device >= count:
        raise Unsupported(
            f"instance '{instance.name}' of model '{model}' needs GPU {instance.device}, but torch finds {count} GPUs"
        )
    return torch.device("cuda", instance.device)


class TorchModel(TensorModel):
    """An instance of a PyTorch model. `open` returns its program, which can be shared. Inputs are moved to `device`."""

    def __init__(
        self, context: ModelContext, instance: Instance, device: torch.device, open: Callable[[], Program]
    ) -> None:
        super().__init__(context, instance)
        self._device = device
        self._open = open
        self._program: Program | None = None
        self._arguments: dict[str, str] = {}
        self._results: dict[str, int] = {}
        self._settings = TorchSettings.of(context.name, self.parameters)
        self._torch_modes = ExitStack()

    def load(self) -> None:
        """Load the program and check the configuration against it."""
        _check_strings(self.context.config)
        self._program = self._open()
        self._arguments = find_arguments(self.context.config, self._program.arguments)
        self._results = find_results(self.context.config)
        self._torch_modes = self._settings.enter()

    def run(self, inputs: Arrays) -> Arrays:
        program = self._program
        if program is None:
            raise InternalError("the model is not loaded")
        values: dict[str, Value] = {}
        for name, array in inputs.items():
            if array.dtype == object:
                values[self._arguments[name]] = to_strings(name, array)
            else:
                values[self._arguments[name]] = to_torch(array, self._device, copy=program.writes_inputs)
        try:
            results = program(values)
        except Exception as error:
            logger.error("model instance '%s' failed", self.instance.name, exc_info=error)
            raise InternalError(f"PyTorch execute failure: {_last_line(error)}") from None
        outputs = {name: to_numpy(value) for name, value in self._named(results).items()}
        if self._settings.clear_cuda_cache and self._device.type == "cuda":
            torch.cuda.empty_cache()
        return outputs

    def unload(self) -> None:
        self._program = None
        self._torch_modes.close()

    def _named(self, results: list[Value] | dict[str, Value]) -> dict[str, Value]:
        named = results if isinstance(results, dict) else {}
        if isinstance(results, list):
            for name, position in self._results.items():
                if position >= len(results):
                    raise InvalidArgument(
                        f"The output {name} in the model configuration refers to an output index which doesn't exist. "
                        f"This model has {len(results)} outputs"
                    )
                named[name] = results[position]
        for name, value in named.items():
            if not isinstance(value, torch.Tensor | list):
                raise InvalidArgument(
                    f"output '{name}' is {type(value).__name__}, it must be of type Tensor, List[str] or a Tuple or "
                    "Dict of these"
                )
        return named


def _last_line(error: Exception) -> str:
    """Return the message of an error. In TorchScript errors, a stack trace precedes the message."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _check_strings(config: Any) -> None:
    """Raise `InvalidArgument` for string tensors with more than one dimension, because they are passed as lists."""
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
            is_text = DataType.of_message(tensor) is DataType.BYTES
            if is_text and len(dims) + (config.max_batch_size > 0) > 1:
                raise InvalidArgument(
                    f"only 1 dimensional List of String is supported as {kind} for '{tensor.name}' for model "
                    f"'{config.name}'"
                )


IGNORED_PARAMETERS = (
    "ENABLE_NVFUSER",
    "ENABLE_TENSOR_FUSER",
    "ENABLE_JIT_EXECUTOR",
    "ENABLE_JIT_PROFILING",
)
_threads: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """Settings of one model. Thread counts are process-wide; the first model that sets a count determines it."""

    inference_mode: bool
    optimized_execution: bool
    cudnn: bool
    clear_cuda_cache: bool

    @classmethod
    def of(cls, model: str, parameters: Parameters) -> TorchSettings:
        """Read a model's parameters and set thread counts. Raises `InvalidArgument`."""
        for name in IGNORED_PARAMETERS:
            if name in parameters:
                logger.warning("model '%s': parameter %s has no effect", model, name)
        intra = parameters.integer("INTRA_OP_THREAD_COUNT", parameters.integer("NUM_THREADS", 0))
        _set_threads("INTRA_OP_THREAD_COUNT", intra, model)
        _set_threads("INTER_OP_THREAD_COUNT", parameters.integer("INTER_OP_THREAD_COUNT", 0), model)
        return cls(
            inference_mode=parameters.boolean("INFERENCE_MODE", True),
            optimized_execution=not parameters.boolean("DISABLE_OPTIMIZED_EXECUTION", False),
            cudnn=not parameters.boolean("DISABLE_CUDNN", False),
            clear_cuda_cache=parameters.boolean("ENABLE_CACHE_CLEANING", False),
        )

    def enter(self) -> ExitStack:
        """Apply the settings to the current thread until the returned stack is closed, in the same thread."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode() if self.inference_mode else torch.no_grad())
        if not self.optimized_execution:
            stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
        if not self.cudnn:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        return stack


def _set_threads(name: str, number: int, model: str) -> None:
    if number <= 0:
        return
    first = _threads.setdefault(name, number)
    if first != number:
        logger.warning("model '%s': %s stays %d, because another model has set it", model, name, first)
    if name == "INTRA_OP_THREAD_COUNT":
        torch.set_num_threads(first)  # a setting of the calling thread
    elif torch.get_num_interop_threads() != first:
        try:
            torch.set_num_interop_threads(first)
        except RuntimeError:
            logger.warning("model '%s': %s has no effect after torch has started computing", model, name)
