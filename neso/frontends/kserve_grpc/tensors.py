"""The tensors of a request, off the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.frontends.kserve_grpc.windows import read_input_windows
from neso.server.errors import InvalidArgument
from neso.server.shared_memory.regions import REGION, SharedMemory
from neso.server.tensor import DataType, Tensor, element_count

# Which field of InferTensorContents holds the elements; FP16 and BF16 have none and travel raw only.
_CONTENTS = {
    DataType.BOOL: "bool_contents",
    DataType.INT8: "int_contents",
    DataType.INT16: "int_contents",
    DataType.INT32: "int_contents",
    DataType.INT64: "int64_contents",
    DataType.UINT8: "uint_contents",
    DataType.UINT16: "uint_contents",
    DataType.UINT32: "uint_contents",
    DataType.UINT64: "uint64_contents",
    DataType.FP32: "fp32_contents",
    DataType.FP64: "fp64_contents",
    DataType.BYTES: "bytes_contents",
}


def read_inputs(message: Any, raw: Sequence[bytes], shared_memory: SharedMemory) -> dict[str, Tensor]:
    """The inputs of a `ModelInferRequest`, by name. Raises `ServerError` that names the input.

    Those of fixed-size types are views of the `raw` bytes or of shared memory: no copy, and read-only.
    """
    windows = read_input_windows(message, shared_memory)
    expected = len(message.inputs) - len(windows)
    if raw and len(raw) != expected:
        _refuse_mixed_contents(message)
        raise InvalidArgument(
            f"expected as many raw_input_contents as inputs for model '{message.model_name}', "
            f"got {len(raw)} for {expected} inputs"
        )
    inputs: dict[str, Tensor] = {}
    contents = iter(raw)
    for wire in message.inputs:
        name = wire.name
        if name in inputs:
            raise InvalidArgument(f"input '{name}' already exists in request")
        datatype = DataType.parse(wire.datatype, name)
        shape = tuple(wire.shape)
        if shape and min(shape) < 0:
            raise InvalidArgument(f"input '{name}' has a negative dimension in its shape {list(shape)}")
        if name in windows:
            inputs[name] = windows[name].read(name, datatype, shape)
        elif not raw:
            inputs[name] = _from_contents(name, datatype, shape, wire)
        elif wire.HasField("contents"):
            _refuse_mixed_contents(message)
        else:
            inputs[name] = Tensor.from_wire(name, datatype, shape, next(contents))
    return inputs


def read_requested_outputs(message: Any) -> tuple[str, ...]:
    """The names of the outputs that the client wants. Raises `Unsupported` for what we cannot do to them."""
    names: list[str] = []
    for wire in message.outputs:
        names.append(wire.name)
    return tuple(names)


def read_classification(message: Any) -> dict[str, int]:
    """How many classes the client wants of which outputs. Raises `InvalidArgument`."""
    wanted: dict[str, int] = {}
    for wire in message.outputs:
        if "classification" in wire.parameters:
            parameter = wire.parameters["classification"]
            if parameter.WhichOneof("parameter_choice") != "int64_param" or parameter.int64_param < 0:
                raise InvalidArgument(
                    "invalid value type for 'classification' parameter, expected int64_param that is not "
                    f"negative, for output '{wire.name}'"
                )
            if REGION in wire.parameters:
                raise InvalidArgument(
                    f"output '{wire.name}' cannot be classified and written to shared memory"
                )
            if parameter.int64_param:
                wanted[wire.name] = parameter.int64_param
    return wanted


def _from_contents(name: str, datatype: DataType, shape: tuple[int, ...], wire: Any) -> Tensor:
    field = _CONTENTS.get(datatype)
    if field is None:
        raise InvalidArgument(f"input '{name}' has datatype {datatype.value}, which needs raw_input_contents")
    elements = getattr(wire.contents, field)
    count = element_count(shape)
    if len(elements) != count:
        others = [each.name for each, _ in wire.contents.ListFields() if each.name != field]
        hint = f"; its {', '.join(others)} cannot hold {datatype.value}" if others else ""
        raise InvalidArgument(
            f"unexpected number of elements {len(elements)} in {field} for input '{name}', "
            f"expecting {count}{hint}"
        )
    return Tensor(name, datatype, _array(name, datatype, elements, count).reshape(shape))


def _array(name: str, datatype: DataType, elements: Any, count: int) -> npt.NDArray[Any]:
    if datatype is DataType.BYTES:
        array = np.empty(count, np.object_)
        array[:] = elements
        return array
    try:
        return np.fromiter(elements, datatype.dtype, count)
    except OverflowError:
        raise InvalidArgument(
            f"an element of input '{name}' is out of the range of {datatype.value}"
        ) from None


def _refuse_mixed_contents(message: Any) -> None:
    for wire in message.inputs:
        if wire.HasField("contents"):
            raise InvalidArgument(
                "contents field must not be specified when using raw_input_contents for "
                f"'{wire.name}' for model '{message.model_name}'"
            )
