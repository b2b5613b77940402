"""`OpenVinoBackend`: executes models with OpenVINO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino

from neso.backends.openvino.model_file import (
    BatchSize,
    CompiledModel,
    compile_model,
    explain,
    read_model,
    signature_of,
    use_configured_shapes,
)
from neso.backends.tensor import Instance, InstanceKind, Parameters, TensorBackend, TensorModel
from neso.backends.tensor.model import Arrays, SharedByDevice, output_names
from neso.backends.tensor.signature import Scalars, complete_config, needs_completion
from neso.server.backend import ModelContext
from neso.server.errors import InternalError, InvalidArgument
from neso.server.tensor import DataType


class OpenVinoBackend(TensorBackend):
    """One compiled model, with one inference request per instance."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._settings = Parameters(context.config, context.backend_config)
        self._compiled: SharedByDevice[CompiledModel] = SharedByDevice(shared=True)

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        """Read inputs, outputs and `max_batch_size` from the model, unless inputs and outputs are configured."""
        if not needs_completion(config):
            return
        settings = Parameters(config, backend_config)
        model = read_model(openvino.Core(), version_directory / config.default_model_filename, settings)
        use_configured_shapes(model, config, settings)
        complete_config(config, signature_of(model, config), settings.integer("default-max-batch-size", 4))

    def make_model(self, instance: Instance) -> TensorModel:
        if instance.kind is InstanceKind.GPU:
            raise InvalidArgument(
                f"unable to load model '{self.context.name}', the openvino backend supports only KIND_CPU; set the "
                "parameter TARGET_DEVICE to choose a device of OpenVINO"
            )
        return OpenVinoModel(self.context, instance, lambda: self._compiled.get("", self._compile))

    async def unload(self) -> None:
        await super().unload()
        self._compiled.clear()

    def _compile(self) -> CompiledModel:
        path = self.context.version_directory / self.context.config.default_model_filename
        return compile_model(path, self.context.config, self._settings)


class OpenVinoModel(TensorModel):
    """An inference request of a model. `open` returns the compiled model, which all instances share."""

    def __init__(self, context: ModelContext, instance: Instance, open: Callable[[], CompiledModel]) -> None:
        super().__init__(context, instance)
        self._open = open
        self._outputs = output_names(context.config)
        self._request: openvino.InferRequest | None = None
        self._scalars: Scalars | None = None
        self._batch = BatchSize()
        self._has_state = False

    def load(self) -> None:
        compiled = self._open()
        self._request = compiled.runtime.create_infer_request()
        self._has_state = bool(self._request.query_state())
        self._scalars = Scalars(self.context.config, compiled.signature)
        self._batch = compiled.batch

    def run(self, inputs: Arrays) -> Arrays:
        if self._request is None or self._scalars is None:
            raise InternalError("the model is not loaded")
        rows = len(next(iter(inputs.values()))) if self._batch.fixed and inputs else 0
        if rows < self._batch.fixed:
            inputs = self._batch.pad(inputs, rows)
        try:
            if self._has_state:
                self._request.reset_state()  # requests must not see the state of earlier ones
            for name, array in self._scalars.to_model(inputs).items():
                self._request.set_tensor(name, _to_tensor(array))
            self._request.start_async()
            self._request.wait()  # releases the GIL
            outputs = {name: _from_tensor(self._request.get_tensor(name)) for name in self._outputs}
        except RuntimeError as error:
            raise InternalError(f"openvino error: {explain(error)}") from None
        if rows < self._batch.fixed:
            outputs = {name: array[:rows] for name, array in outputs.items()}
        return self._scalars.from_model(outputs)

    def unload(self) -> None:
        self._request = None


def _to_tensor(array: npt.NDArray[Any]) -> openvino.Tensor:
    """Return a tensor with the data, which is shared if the array is contiguous and writable, and copied otherwise."""
    if array.dtype == object:
        return openvino.Tensor(array.astype(np.bytes_) if array.size else np.empty(array.shape, "S1"))
    array = np.ascontiguousarray(array) if array.ndim else array.copy()
    if array.dtype == DataType.BF16.dtype:
        return openvino.Tensor(array.view(np.uint16), openvino.Shape(array.shape), openvino.Type.bf16)
    return openvino.Tensor(array, shared_memory=array.flags.writeable)


def _from_tensor(tensor: openvino.Tensor) -> npt.NDArray[Any]:
    """Return a copy of the data: the next execution overwrites the tensor."""
    if tensor.element_type == openvino.Type.string:
        return np.asarray(tensor.bytes_data).astype(object)
    array: npt.NDArray[Any] = np.array(tensor.data)
    return array.view(DataType.BF16.dtype) if tensor.element_type == openvino.Type.bf16 else array
