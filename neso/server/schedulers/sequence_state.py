"""Implicit state: tensors that the server keeps for a sequence between its requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neso.server.datatypes import DataType
from neso.server.errors import InternalError, InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse
from neso.server.repository import stays_inside
from neso.server.signature import fits
from neso.server.tensor import Tensor

INITIAL_STATE_FOLDER = "initial_state"
"""Beside the version folders; holds the files that `data_file` names."""

States = dict[str, Tensor]
"""What a sequence has now, by the names of the model's inputs."""


@dataclass(frozen=True, slots=True)
class _Spec:
    input_name: str
    output_name: str
    datatype: DataType
    initial: Tensor
    varies: bool


class SequenceStates:
    """The `state` of a configuration. Tensors have the shape `dims`, [1, *dims] for models that batch."""

    def __init__(self, config: Any, directory: Path | None) -> None:
        """Reads initial states below the model's `directory`; without one they are zeros, to check the rest.

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
        """Whether states of sequences may differ in shape."""
        return any(spec.varies for spec in self._specs)

    def initial(self) -> States:
        """What a sequence begins with."""
        return {spec.input_name: spec.initial for spec in self._specs}

    def give(self, states: States, request: InferenceRequest) -> None:
        """Add the states to the request's inputs."""
        request.inputs.update(states)

    def take(self, states: States, response: InferenceResponse) -> None:
        """Keep the states that the model gave; the client sees only those that are declared outputs as well.

        One of another datatype makes the response an error. A model that gives none leaves the state as it is.
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
                # A copy: the model may go on to write in its array.
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
            if not stays_inside(data_file):
                raise InvalidArgument(
                    f"data_file '{data_file}' of state '{state.input_name}' must stay inside the model's folder "
                    f"{self._where}"
                )
        # What varies begins with 1, as in Triton, unless an initial state says otherwise.
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
