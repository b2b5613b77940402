"""Inputs that the sequence batcher adds to requests: control inputs and implicit state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neso.server.errors import InternalError, InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse
from neso.server.repository.names import is_inside
from neso.server.signature import fits
from neso.server.tensor import DataType, Tensor

_TYPES_OF_FLAG = {
    "int32_false_true": DataType.INT32,
    "fp32_false_true": DataType.FP32,
    "bool_false_true": DataType.BOOL,
}
_TYPES_OF_ID = (DataType.UINT64, DataType.INT64, DataType.UINT32, DataType.INT32, DataType.BYTES)


_READY = "CONTROL_SEQUENCE_READY"


@dataclass(frozen=True, slots=True)
class _Flag:
    """START, END or READY: one of two constant tensors."""

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
    """CORRID: the sequence id, as a decimal string for BYTES."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]

    def tensor(self, request: InferenceRequest) -> Tensor:
        """Create the control tensor. Raises `InvalidArgument` if the id does not fit the datatype."""
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
    """Control inputs of a configuration. Tensors have shape [1], or [1, 1] for models that batch."""

    def __init__(self, config: Any) -> None:
        """Parse a configuration. Raises `InvalidArgument` if it is invalid."""
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
    def has_ready_input(self) -> bool:
        """Whether the model has a READY input."""
        return any(isinstance(control, _Flag) and control.kind == _READY for control in self._controls)

    def check(self, request: InferenceRequest) -> None:
        """Raise `InvalidArgument` for a correlation id that does not fit the control input."""
        for control in self._controls:
            if isinstance(control, _CorrelationId):
                control.tensor(request)

    def give(self, request: InferenceRequest) -> None:
        """Add the control tensors to the request's inputs."""
        for control in self._controls:
            tensor = control.tensor(request)
            request.inputs[tensor.name] = tensor

    def give_empty(self, request: InferenceRequest) -> None:
        """Add the control tensors of an empty slot: all flags false, correlation id 0."""
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


INITIAL_STATE_FOLDER = "initial_state"
"""Folder of the `data_file`s, next to the version folders."""

States = dict[str, Tensor]
"""Current states of a sequence, by input name."""


@dataclass(frozen=True, slots=True)
class _Spec:
    input_name: str
    output_name: str
    datatype: DataType
    initial: Tensor
    varies: bool


class SequenceStates:
    """Implicit states of a configuration. Tensors have shape `dims`, or [1, *dims] for models that batch."""

    def __init__(self, config: Any, directory: Path | None) -> None:
        """Read initial states from the model's `directory`; None to check the configuration without files.

        Raises `InvalidArgument`.
        """
        self._where = f"for {config.name}"
        self._batch = (1,) if config.max_batch_size else ()
        self._declared = {tensor.name for tensor in config.output}
        self._specs: list[_Spec] = []
        inputs = {tensor.name for tensor in config.input}
        inputs.update(tensor.name for tensor in config.sequence_batching.control_input)
        outputs: set[str] = set()
        for state in config.sequence_batching.state:
            spec = self._spec(state, directory)
            for name, known, kind in (
                (spec.input_name, inputs, "input"),
                (spec.output_name, outputs, "output"),
            ):
                if name in known:
                    raise InvalidArgument(f"state {kind} '{name}' is specified more than once {self._where}")
                known.add(name)
            self._specs.append(spec)

    @property
    def vary(self) -> bool:
        """Whether states have variable shapes."""
        return any(spec.varies for spec in self._specs)

    def initial(self) -> States:
        """Return the initial states of a sequence."""
        return {spec.input_name: spec.initial for spec in self._specs}

    def give(self, states: States, request: InferenceRequest) -> None:
        """Add the states to the request's inputs."""
        request.inputs.update(states)

    def take(self, states: States, response: InferenceResponse) -> None:
        """Store the states in a response, and remove states that are not declared as outputs.

        A state with a wrong datatype turns the response into an error. A missing state stays unchanged.
        """
        for spec in self._specs:
            for tensor in response.outputs:
                if tensor.name != spec.output_name:
                    continue
                if tensor.datatype is not spec.datatype:
                    response.error = InternalError(
                        f"state '{spec.output_name}' is {tensor.datatype.value}, its configuration says "
                        f"{spec.datatype.value} {self._where}"
                    )
                    response.outputs = []
                    return
                # A copy, because the model can reuse its array.
                states[spec.input_name] = Tensor(spec.input_name, tensor.datatype, tensor.array.copy())
        hidden = {spec.output_name for spec in self._specs} - self._declared
        response.outputs = [tensor for tensor in response.outputs if tensor.name not in hidden]

    def _spec(self, state: Any, directory: Path | None) -> _Spec:
        if not state.input_name or not state.output_name:
            raise InvalidArgument(f"state must specify 'input_name' and 'output_name' {self._where}")
        datatype = DataType.of_message(state)
        if len(state.initial_state) > 1:
            raise InvalidArgument(
                f"state '{state.input_name}' must have at most one initial_state {self._where}"
            )
        dims = tuple(state.dims)
        data_file = ""
        for initial in state.initial_state:
            if DataType.of_message(initial) is not datatype:
                raise InvalidArgument(
                    f"initial_state of '{state.input_name}' has another data type {self._where}"
                )
            if not fits(tuple(initial.dims), dims):
                raise InvalidArgument(f"initial_state of '{state.input_name}' has other dims {self._where}")
            if initial.WhichOneof("state_data") is None:
                raise InvalidArgument(
                    f"initial_state of '{state.input_name}' must specify 'zero_data' or 'data_file' {self._where}"
                )
            dims, data_file = tuple(initial.dims), initial.data_file
            if not is_inside(data_file):
                raise InvalidArgument(
                    f"data_file '{data_file}' of state '{state.input_name}' must stay inside the model's folder "
                    f"{self._where}"
                )
        # As in Triton, variable dimensions start with 1 unless an initial state is given.
        shape = tuple(1 if extent == -1 else extent for extent in dims)
        tensor = Tensor.zeros(state.input_name, datatype, self._batch + shape)
        if data_file and directory is not None:
            tensor = self._read(
                state.input_name, datatype, shape, directory / INITIAL_STATE_FOLDER / data_file
            )
        return _Spec(state.input_name, state.output_name, datatype, tensor, -1 in state.dims)

    def _read(self, name: str, datatype: DataType, shape: tuple[int, ...], path: Path) -> Tensor:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InvalidArgument(f"failed to read initial state '{name}' {self._where}: {error}") from None
        return Tensor.from_wire(name, datatype, self._batch + shape, data)
