"""`OnnxRuntimeBackend`: executes `model.onnx` with ONNX Runtime."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from neso.backends.onnxruntime.session import Session, open_session, read_signature
from neso.backends.tensor import Instance, InstanceKind, Parameters, TensorBackend, TensorModel
from neso.backends.tensor.model import Arrays, SharedByDevice, output_names
from neso.backends.tensor.signature import Scalars, check_config, complete_config, needs_completion
from neso.server.backend import ModelContext
from neso.server.errors import InternalError
from neso.server.tensor import DataType, Tensor


class OnnxRuntimeBackend(TensorBackend):
    """One inference session per instance or, with the parameter `share_session_between_instances`, per device."""

    implemented_fields = frozenset({"optimization"})

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._settings = Parameters(context.config, context.backend_config)
        shared = self._settings.boolean("share_session_between_instances", False)
        self._sessions: SharedByDevice[Session] = SharedByDevice(shared=shared)

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        """Read inputs, outputs and `max_batch_size` from the model, unless inputs and outputs are configured."""
        if not needs_completion(config):
            return
        settings = Parameters(config, backend_config)
        signature = read_signature(model_file(config, version_directory))
        complete_config(config, signature, settings.integer("default-max-batch-size", 4))

    def make_model(self, instance: Instance) -> TensorModel:
        return OnnxModel(self.context, instance, lambda: self._session(instance))

    async def unload(self) -> None:
        await super().unload()
        self._sessions.clear()

    def _session(self, instance: Instance) -> Session:
        return self._sessions.get((instance.kind, instance.device), lambda: self._open(instance))

    def _open(self, instance: Instance) -> Session:
        path = model_file(self.context.config, self.context.version_directory)
        return open_session(path, self.context.config, self._settings, instance)


def model_file(config: Any, version_directory: Path) -> Path:
    """Return the path of the model: `default_model_filename`, or the file in it if it is a folder (external data)."""
    name = str(config.default_model_filename)
    path = version_directory / name
    return path / name if path.is_dir() else path


BFLOAT16 = 16
"""Element type number in ONNX."""
SHRINKAGE = "memory.enable_memory_arena_shrinkage"


class OnnxModel(TensorModel):
    """An instance of an ONNX model. `open` returns its session, which may be shared."""

    def __init__(self, context: ModelContext, instance: Instance, open: Callable[[], Session]) -> None:
        super().__init__(context, instance)
        self._open = open
        self._session: Session | None = None
        self._outputs = output_names(context.config)
        self._has_bfloat16 = False
        self._scalars: Scalars | None = None
        self._run_options: onnxruntime.RunOptions | None = None

    def load(self) -> None:
        """Open the session and check the configuration against the model."""
        self._session = self._open()
        signature = self._session.signature
        config = self.context.config
        check_config(config, signature)
        self._scalars = Scalars(config, signature)
        tensors = [*signature.inputs.values(), *signature.optional.values()]
        tensors += [signature.outputs[name] for name in self._outputs]
        self._has_bfloat16 = any(tensor.datatype is DataType.BF16 for tensor in tensors)
        if ":" in self.parameters.get(SHRINKAGE, "") or self.parameters.boolean(SHRINKAGE, False):
            self._run_options = self._shrinkage_options()

    def run(self, inputs: Arrays) -> Arrays:
        if self._session is None or self._scalars is None:
            raise InternalError("the model is not loaded")
        runtime = self._session.runtime
        feeds = {
            name: _decode_strings(name, array) if array.dtype == object else array
            for name, array in inputs.items()
        }
        feeds = self._scalars.to_model(feeds)
        try:
            if self._has_bfloat16:
                values = {name: _to_value(array) for name, array in feeds.items()}
                outputs = [
                    _from_value(value)
                    for value in runtime.run_with_ort_values(self._outputs, values, self._run_options)
                ]
            else:
                outputs = runtime.run(self._outputs, feeds, self._run_options)
        except Exception as error:  # ONNX Runtime's exceptions have no common base class
            raise InternalError(f"onnx runtime error: {error}") from None
        return self._scalars.from_model(dict(zip(self._outputs, outputs, strict=True)))

    def unload(self) -> None:
        self._session = None

    def _shrinkage_options(self) -> onnxruntime.RunOptions:
        """Return run options that shrink memory arenas after each run. The parameter is a boolean or a device list."""
        options = onnxruntime.RunOptions()
        devices = self.parameters[SHRINKAGE]
        if ":" not in devices:
            on_gpu = self.instance.kind is InstanceKind.GPU
            devices = f"gpu:{self.instance.device}" if on_gpu else "cpu:0"
        options.add_run_config_entry(SHRINKAGE, devices)
        return options


def _decode_strings(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert `bytes` to `str` elements, as ONNX Runtime requires."""
    text = np.empty(array.size, np.object_)
    text[:] = Tensor(name, DataType.BYTES, array).strings()
    return text.reshape(array.shape)


# numpy has no bfloat16, so ONNX Runtime only supports it in OrtValues.


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
