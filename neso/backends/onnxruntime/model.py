"""One instance of an ONNX model."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from neso.backends.onnxruntime.session import Session
from neso.backends.onnxruntime.validation import validate
from neso.backends.tensor import Instance, InstanceKind, TensorModel
from neso.backends.tensor.model import Arrays
from neso.server.backend import ModelContext
from neso.server.errors import InternalError
from neso.server.tensor import DataType, Tensor

BFLOAT16 = 16
"""Its number in ONNX."""
SHRINKAGE = "memory.enable_memory_arena_shrinkage"


class OnnxModel(TensorModel):
    """`open`: gives the session, its own or one that it shares."""

    def __init__(self, context: ModelContext, instance: Instance, open: Callable[[], Session]) -> None:
        super().__init__(context, instance)
        self._open = open
        self._session: Session | None = None
        states = context.config.sequence_batching.state
        self._outputs = [tensor.name for tensor in context.config.output]
        self._outputs += [s.output_name for s in states if s.output_name not in self._outputs]
        self._has_bfloat16 = False
        self._run_options: onnxruntime.RunOptions | None = None

    def load(self) -> None:
        """Open the session, and check that the configuration fits the model."""
        self._session = self._open()
        signature = self._session.signature
        validate(self.context.config, signature)
        tensors = [*signature.inputs.values(), *signature.optional.values()]
        tensors += [signature.outputs[name] for name in self._outputs]
        self._has_bfloat16 = any(tensor.datatype is DataType.BF16 for tensor in tensors)
        if ":" in self.parameters.get(SHRINKAGE, "") or self.parameters.boolean(SHRINKAGE, False):
            self._run_options = self._shrinking()

    def run(self, inputs: Arrays) -> Arrays:
        if self._session is None:
            raise InternalError("the model is not loaded")
        runtime = self._session.runtime
        feeds = {
            name: _text(name, array) if array.dtype == object else array for name, array in inputs.items()
        }
        try:
            if self._has_bfloat16:
                values = {name: _to_value(array) for name, array in feeds.items()}
                results = runtime.run_with_ort_values(self._outputs, values, self._run_options)
                outputs = [_from_value(value) for value in results]
            else:
                outputs = runtime.run(self._outputs, feeds, self._run_options)
        except Exception as error:  # ONNX Runtime has no common class for its errors
            raise InternalError(f"onnx runtime error: {error}") from None
        return dict(zip(self._outputs, outputs, strict=True))

    def unload(self) -> None:
        self._session = None

    def _shrinking(self) -> onnxruntime.RunOptions:
        """After each run the arenas give back what they do not need; the parameter may name devices."""
        options = onnxruntime.RunOptions()
        devices = self.parameters[SHRINKAGE]
        if ":" not in devices:
            on_gpu = self.instance.kind is InstanceKind.GPU
            devices = f"gpu:{self.instance.device}" if on_gpu else "cpu:0"
        options.add_run_config_entry(SHRINKAGE, devices)
        return options


def _text(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """ONNX Runtime takes strings as `str`."""
    text = np.empty(array.size, np.object_)
    text[:] = Tensor(name, DataType.BYTES, array).strings()
    return text.reshape(array.shape)


# numpy has no bfloat16 of its own, so that ONNX Runtime's arrays cannot hold it.


def _to_value(array: npt.NDArray[Any]) -> onnxruntime.OrtValue:
    if array.dtype == DataType.BF16.dtype:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _from_value(value: onnxruntime.OrtValue) -> npt.NDArray[Any]:
    if value.element_type() != BFLOAT16:
        array: npt.NDArray[Any] = value.numpy()
        return array
    data = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(data, DataType.BF16.dtype).reshape(value.shape())
