"""Control inputs of sequence batching: tensors that tell the model where in its sequence a request stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from neso.server.datatypes import DataType
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.tensor import Tensor

_TYPES_OF_FLAG = {
    "int32_false_true": DataType.INT32,
    "fp32_false_true": DataType.FP32,
    "bool_false_true": DataType.BOOL,
}
_TYPES_OF_ID = (DataType.UINT64, DataType.INT64, DataType.UINT32, DataType.INT32, DataType.BYTES)


_READY = "CONTROL_SEQUENCE_READY"


@dataclass(frozen=True, slots=True)
class _Flag:
    """START, END or READY: one of two tensors, made once."""

    kind: str
    false: Tensor
    true: Tensor

    def tensor(self, request: InferenceRequest) -> Tensor:
        if self.kind == _READY:
            return self.true
        given = request.sequence_start if self.kind == "CONTROL_SEQUENCE_START" else request.sequence_end
        return self.true if given else self.false


@dataclass(frozen=True, slots=True)
class _CorrelationId:
    """CORRID: the sequence's id; numbers are written out where the model takes strings."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]

    def tensor(self, request: InferenceRequest) -> Tensor:
        """Raises `InvalidArgument` for an id that the datatype cannot hold."""
        correlation_id = request.sequence_id
        if self.datatype is DataType.BYTES:
            array = np.empty(self.shape, np.object_)
            array[...] = str(correlation_id).encode()
            return Tensor(self.name, self.datatype, array)
        try:
            if isinstance(correlation_id, str):
                raise OverflowError
            return Tensor(self.name, self.datatype, np.full(self.shape, correlation_id, self.datatype.dtype))
        except OverflowError:
            raise InvalidArgument(
                f"correlation ID '{correlation_id}' of the request to model '{request.model_name}' does not fit the "
                f"control input '{self.name}' of type {self.datatype.value}"
            ) from None


class ControlInputs:
    """The `control_input` of a configuration. Tensors have shape [1], [1, 1] for models that batch."""

    def __init__(self, config: Any) -> None:
        """Raises `InvalidArgument` for what cannot be given to the model."""
        self._shape = (1, 1) if config.max_batch_size else (1,)
        self._model: str = config.name
        self._controls: list[_Flag | _CorrelationId] = []
        kinds: set[str] = set()
        taken = {tensor.name for tensor in config.input}
        for tensor in config.sequence_batching.control_input:
            if not tensor.name:
                raise InvalidArgument(f"sequence batching control tensor must have a name for {self._model}")
            if tensor.name in taken:
                raise InvalidArgument(
                    f"sequence batching control tensor '{tensor.name}' is specified more than once for {self._model}"
                )
            taken.add(tensor.name)
            if len(tensor.control) != 1:
                raise InvalidArgument(
                    f"sequence batching control tensor '{tensor.name}' must have exactly one control for {self._model}"
                )
            for control in tensor.control:
                kind = control.Kind.Name(control.kind)
                if kind in kinds:
                    raise InvalidArgument(
                        f"sequence batching specifies multiple {kind} tensors for {self._model}"
                    )
                kinds.add(kind)
                self._controls.append(self._control(tensor.name, kind, control))

    @property
    def tell_ready(self) -> bool:
        """Whether the model wants to know which slots have a request."""
        return any(isinstance(control, _Flag) and control.kind == _READY for control in self._controls)

    def check(self, request: InferenceRequest) -> None:
        """Raises `InvalidArgument` for a correlation id that the model's control input cannot hold."""
        for control in self._controls:
            if isinstance(control, _CorrelationId):
                control.tensor(request)

    def give(self, request: InferenceRequest) -> None:
        """Add the tensors to the request's inputs."""
        for control in self._controls:
            tensor = control.tensor(request)
            request.inputs[tensor.name] = tensor

    def give_empty(self, request: InferenceRequest) -> None:
        """Add the tensors of a slot without a request: nothing is true, the correlation id is 0."""
        for control in self._controls:
            tensor = control.false if isinstance(control, _Flag) else control.tensor(request)
            request.inputs[tensor.name] = tensor

    def _control(self, name: str, kind: str, control: Any) -> _Flag | _CorrelationId:
        given = [field for field in _TYPES_OF_FLAG if getattr(control, field)]
        if kind == "CONTROL_SEQUENCE_CORRID":
            if given:
                raise InvalidArgument(
                    f"sequence batching must not specify '{given[0]}' for {kind} for {self._model}"
                )
            datatype = DataType.of_message(control)
            if datatype not in _TYPES_OF_ID:
                raise InvalidArgument(
                    f"unexpected data type {datatype.config_name} for {kind} for {self._model}"
                )
            return _CorrelationId(name, datatype, self._shape)
        if len(given) != 1:
            raise InvalidArgument(
                "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
                f"for {kind} for {self._model}"
            )
        values = getattr(control, given[0])
        if len(values) != 2:
            raise InvalidArgument(
                f"sequence batching control '{given[0]}' must have exactly 2 entries for {kind} for {self._model}"
            )
        datatype = _TYPES_OF_FLAG[given[0]]
        false, true = (
            Tensor(name, datatype, np.full(self._shape, value, datatype.dtype)) for value in values
        )
        return _Flag(kind, false, true)
