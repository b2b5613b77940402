"""One instance of a PyTorch model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from neso.backends.pytorch.naming import find_arguments, find_results
from neso.backends.pytorch.program import Program, Value
from neso.backends.pytorch.settings import Settings
from neso.backends.pytorch.tensors import to_numpy, to_strings, to_torch
from neso.backends.tensor import Instance, TensorModel
from neso.backends.tensor.model import Arrays
from neso.server.backend import ModelContext
from neso.server.errors import InternalError, InvalidArgument
from neso.server.tensor import DataType

logger = logging.getLogger(__name__)


class TorchModel(TensorModel):
    """`open`: gives the program, its own or one that it shares. `device`: where its inputs go."""

    def __init__(
        self, context: ModelContext, instance: Instance, device: torch.device, open: Callable[[], Program]
    ) -> None:
        super().__init__(context, instance)
        self._device = device
        self._open = open
        self._program: Program | None = None
        self._arguments: dict[str, str] = {}
        self._results: dict[str, int] = {}
        self._settings = Settings.of(context.name, self.parameters)
        self._switched = ExitStack()

    def load(self) -> None:
        """Load the program, and check that the configuration fits it."""
        _check_strings(self.context.config)
        self._program = self._open()
        self._arguments = find_arguments(self.context.config, self._program.arguments)
        self._results = find_results(self.context.config)
        self._switched = self._settings.enter()

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
        if self._settings.cleans_cache and self._device.type == "cuda":
            torch.cuda.empty_cache()
        return outputs

    def unload(self) -> None:
        self._program = None
        self._switched.close()

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
    """What went wrong; TorchScript has its stack before it."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _check_strings(config: Any) -> None:
    """Strings are lists, which have one dimension."""
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
            is_text = DataType.of_message(tensor) is DataType.BYTES
            if is_text and len(dims) + (config.max_batch_size > 0) > 1:
                raise InvalidArgument(
                    f"only 1 dimensional List of String is supported as {kind} for '{tensor.name}' for model "
                    f"'{config.name}'"
                )
