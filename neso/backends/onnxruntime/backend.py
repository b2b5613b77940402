"""The backend that executes `model.onnx`."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from neso.backends.onnxruntime.session import Session, open_session, read_signature
from neso.backends.onnxruntime.signature import check_config, complete_config, needs_completion
from neso.backends.tensor import Instance, InstanceKind, Parameters, TensorBackend, TensorModel
from neso.backends.tensor.model import Arrays
from neso.server.backend import ModelContext
from neso.server.errors import InternalError
from neso.server.tensor import DataType, Tensor


class OnnxRuntimeBackend(TensorBackend):
    """An inference session for each instance, or one for all that run on the same device.

    The latter with the parameter `share_session_between_instances`: the weights are in memory once.
    """

    implemented_fields = frozenset({"optimization"})

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._settings = Parameters(context.config, context.backend_config)
        self._shared: dict[tuple[InstanceKind, int], Session] = {}
        self._opening = threading.Lock()

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        """Inputs, outputs and `max_batch_size` from the model, unless inputs and outputs are given."""
        if not needs_completion(config):
            return
        settings = Parameters(config, backend_config)
        signature = read_signature(model_file(config, version_directory))
        complete_config(config, signature, settings.integer("default-max-batch-size", 4))

    def make_model(self, instance: Instance) -> TensorModel:
        return OnnxModel(self.context, instance, lambda: self._session(instance))

    async def unload(self) -> None:
        await super().unload()
        self._shared.clear()

    def _session(self, instance: Instance) -> Session:
        if not self._settings.boolean("share_session_between_instances", False):
            return self._open(instance)
        with self._opening:
            place = (instance.kind, instance.device)
            if place not in self._shared:
                self._shared[place] = self._open(instance)
            return self._shared[place]

    def _open(self, instance: Instance) -> Session:
        path = model_file(self.context.config, self.context.version_directory)
        return open_session(path, self.context.config, self._settings, instance)


def model_file(config: Any, version_directory: Path) -> Path:
    """`default_model_filename`; the file of that name in it where that is a folder, beside its external data."""
    name = str(config.default_model_filename)
    path = version_directory / name
    return path / name if path.is_dir() else path


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
        check_config(self.context.config, signature)
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
            name: _decode_strings(name, array) if array.dtype == object else array
            for name, array in inputs.items()
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


def _decode_strings(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
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
