"""Infer requests: JSON, JSON with binary tensors behind it, and a raw tensor alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from neso.frontends.http import Request
from neso.frontends.kserve_http.json_body import read_object
from neso.frontends.kserve_http.json_tensor import read_tensor
from neso.frontends.kserve_http.parameters import (
    read_array_member,
    read_bool,
    read_object_member,
    read_parameter,
    read_string,
    read_unsigned,
)
from neso.frontends.kserve_http.shared_memory import read_window
from neso.server.datatypes import DataType
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.metadata import TensorMetadata
from neso.server.model import Model
from neso.server.shared_memory.manager import SharedMemory
from neso.server.shared_memory.window import REGION, SharedMemoryWindow
from neso.server.tensor import Tensor

HEADER_LENGTH = "Inference-Header-Content-Length"
_MOST_DIGITS = 20  # of a length; Python refuses to read numbers of some thousands


@dataclass(slots=True)
class OutputFormat:
    """Which outputs go back as binary data: those named in `binary`, the others by `default`.

    Those named in `windows` do not go back: they are written to shared memory.
    """

    default: bool = False
    binary: dict[str, bool] = field(default_factory=dict)
    windows: dict[str, SharedMemoryWindow] = field(default_factory=dict)

    def is_binary(self, name: str) -> bool:
        return self.binary.get(name, self.default)


def read_infer_request(
    request: Request, model: Model, version: str, shared_memory: SharedMemory
) -> tuple[InferenceRequest, OutputFormat]:
    """The inference request that a client sent, and the form of its answer. Raises `ServerError`.

    The body is no longer compressed here.
    """
    body = request.body
    header_length = _header_length(request)
    if header_length == 0 and HEADER_LENGTH.lower().encode() in request.headers:
        return _read_raw(body, model, version), OutputFormat(default=True)
    binary = memoryview(body)[header_length:]
    document = read_object(body if header_length == len(body) else memoryview(body)[:header_length])
    inference = InferenceRequest(model.name, {}, version)
    output_format = OutputFormat()
    if "id" in document:
        inference.id = read_string("id", document["id"])
    if "parameters" in document:
        for name, value in read_object_member("parameters", document["parameters"]).items():
            if name == "binary_data_output":
                output_format.default = read_bool(name, value)
            else:
                read_parameter(inference, name, value)
    _read_inputs(inference, read_array_member(document, "inputs"), binary, shared_memory)
    if "outputs" in document:
        _read_outputs(inference, read_array_member(document, "outputs"), output_format, shared_memory)
    return inference, output_format


def _header_length(request: Request) -> int:
    """Length of the JSON at the start of the body: all of it, unless the header says otherwise."""
    size = len(request.body)
    value = request.header(HEADER_LENGTH)
    if value is None:
        return size
    if not value.isascii() or not value.removeprefix("-").isdigit():
        raise InvalidArgument(f"Unable to parse {HEADER_LENGTH}, got: {value}")
    if len(value) > _MOST_DIGITS:
        raise InvalidArgument(f"Unable to parse {HEADER_LENGTH}, got a number of {len(value)} digits")
    if not 0 <= int(value) <= size:
        raise InvalidArgument(f"inference header size should be in range (0, {size}), got: {value}")
    return int(value)


def _read_inputs(
    inference: InferenceRequest, inputs: list[Any], binary: memoryview, shared_memory: SharedMemory
) -> None:
    offset = 0
    for entry in inputs:
        if type(entry) is not dict:
            raise InvalidArgument("Unable to parse 'inputs': attempt to access JSON non-object as object")
        name = _member_string(entry, "name")
        if name in inference.inputs:
            raise InvalidArgument(f"input '{name}' already exists in request")
        datatype = DataType.parse(_member_string(entry, "datatype"), name)
        shape = _shape(entry)
        parameters = read_object_member("parameters", entry.get("parameters", {}))
        _check_source(entry, parameters)
        if "data" in entry:
            inference.inputs[name] = read_tensor(name, datatype, shape, read_array_member(entry, "data"))
            continue
        if (window := read_window(name, parameters, shared_memory)) is not None:
            inference.inputs[name] = window.read(name, datatype, shape)
            inference.cacheable = False
            continue
        size = read_unsigned("binary_data_size", parameters["binary_data_size"])
        if size > len(binary) - offset:
            missing = size - (len(binary) - offset)
            raise InvalidArgument(
                f"unexpected size for input '{name}', expecting {missing} additional bytes for model "
                f"'{inference.model_name}'"
            )
        inference.inputs[name] = Tensor.from_wire(name, datatype, shape, binary[offset : offset + size])
        offset += size
    if offset != len(binary):
        raise InvalidArgument(f"unexpected additional input data for model '{inference.model_name}'")


def _check_source(entry: dict[str, Any], parameters: dict[str, Any]) -> None:
    """A tensor's elements come by exactly one way."""
    sources = [
        name
        for name, given in (
            ("data", "data" in entry),
            ("binary_data_size", "binary_data_size" in parameters),
            (REGION, REGION in parameters),
        )
        if given
    ]
    if len(sources) != 1:
        found = " set " + " ".join(f"'{name}'" for name in sources) if sources else " no field is set"
        raise InvalidArgument(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. But{found}"
        )


def _read_outputs(
    inference: InferenceRequest, outputs: list[Any], output_format: OutputFormat, shared_memory: SharedMemory
) -> None:
    names: list[str] = []
    for entry in outputs:
        if type(entry) is not dict:
            raise InvalidArgument("Unable to parse 'outputs': attempt to access JSON non-object as object")
        name = _member_string(entry, "name")
        parameters = read_object_member("parameters", entry.get("parameters", {}))
        window = read_window(name, parameters, shared_memory)
        classes = read_unsigned("classification", parameters.get("classification", 0))
        if window is not None and classes:
            raise InvalidArgument(f"output '{name}' cannot be classified and written to shared memory")
        if window is not None:
            output_format.windows[name] = window
        if classes:
            inference.classification[name] = classes
        # As in Triton: a requested output is JSON unless it says otherwise itself, whatever the default.
        output_format.binary[name] = read_bool("binary_data", parameters.get("binary_data", False))
        names.append(name)
    inference.requested_outputs = tuple(names)


def _member_string(entry: dict[str, Any], name: str) -> str:
    if name not in entry:
        raise InvalidArgument(
            f"Unable to parse '{name}': attempt to access non-existing object member '{name}'"
        )
    return read_string(name, entry[name])


def _shape(entry: dict[str, Any]) -> tuple[int, ...]:
    return tuple(read_unsigned("shape", extent) for extent in read_array_member(entry, "shape"))


def _read_raw(body: bytes, model: Model, version: str) -> InferenceRequest:
    """The body is the one input, of batch size 1."""
    inputs = model.metadata().inputs
    if len(inputs) != 1:
        raise InvalidArgument(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(inputs)} inputs in "
            f"'{model.name}' model configuration"
        )
    spec = inputs[0]
    batched = model.config.max_batch_size > 0
    dims = spec.shape[1:] if batched else spec.shape
    shape, data = _raw_shape(spec, dims, body)
    tensor = Tensor.from_wire(spec.name, DataType(spec.datatype), (1, *shape) if batched else shape, data)
    return InferenceRequest(model.name, {spec.name: tensor}, version)


def _raw_shape(spec: TensorMetadata, dims: tuple[int, ...], body: bytes) -> tuple[tuple[int, ...], bytes]:
    if spec.datatype == DataType.BYTES:
        if any(extent not in (1, -1) for extent in dims) or len(dims) > 1:
            raise InvalidArgument(
                f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]"
            )
        return (1,) * len(dims), len(body).to_bytes(4, "little") + body
    if dims.count(-1) > 1:
        raise InvalidArgument(
            f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    itemsize = DataType(spec.datatype).dtype.itemsize
    known = itemsize
    for extent in dims:
        known *= 1 if extent == -1 else extent
    return tuple(len(body) // max(known, 1) if extent == -1 else extent for extent in dims), body
