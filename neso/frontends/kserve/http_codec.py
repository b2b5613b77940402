"""Infer requests and responses over HTTP: JSON, JSON followed by binary tensors, and a raw tensor.

`neso._wire` (C++) parses and writes the common cases. It returns None for all others, which are handled here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neso._wire import parse_plain_infer, write_plain_infer
from neso.frontends.kserve.http_json import (
    read_array_member,
    read_bool,
    read_object,
    read_object_member,
    read_parameter,
    read_string,
    read_tensor,
    read_unsigned,
    write_json,
    write_values,
)
from neso.frontends.kserve.request_limits import RequestLimits
from neso.frontends.transport.http1 import Request, Response
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse
from neso.server.metadata import TensorMetadata
from neso.server.model import Model
from neso.server.shared_memory.regions import BYTE_SIZE, OFFSET, REGION, SharedMemory, SharedMemoryWindow
from neso.server.tensor import DataType, Tensor, element_count

PlainInputs = list[tuple[str, str, tuple[int, ...], bytearray | list[bytes] | int]]
PlainOutputs = list[tuple[str, bool]] | None
PlainInfer = tuple[str, PlainInputs, PlainOutputs, bool] | tuple[str, PlainInputs, PlainOutputs, bool, bytes]
"""Result of `parse_plain_infer`: id, inputs, outputs, `binary_by_default`, JSON of other outputs and parameters."""

HEADER_LENGTH = "Inference-Header-Content-Length"
HEADER_LENGTH_FIELD = HEADER_LENGTH.lower().encode()
_EMPTY = memoryview(b"")
_MAX_DIGITS = 20  # digits of a length; int() raises for thousands of digits


@dataclass(slots=True)
class OutputFormat:
    """Output encoding: `binary` says by output name whether to return binary data; `default` applies to other names.

    Outputs in `shared` are written to shared memory instead.
    """

    default: bool = False
    binary: dict[str, bool] = field(default_factory=dict)
    shared: dict[str, SharedMemoryWindow] = field(default_factory=dict)


def read_infer_request(
    request: Request,
    model: Model,
    version: str,
    shared_memory: SharedMemory,
    limits: RequestLimits,
) -> tuple[InferenceRequest, OutputFormat]:
    """Decode a request whose body is not compressed. Raises `ServerError`."""
    text: bytes | memoryview
    text, binary = request.body, _EMPTY
    if HEADER_LENGTH_FIELD in request.headers:
        header_length = _header_length(request)
        if header_length == 0:
            return _read_raw(request.body, model, version, limits), OutputFormat(default=True)
        whole = memoryview(request.body)
        text, binary = whole[:header_length], whole[header_length:]
    inference = InferenceRequest(model.name, {}, version)
    output_format = OutputFormat()
    plain = parse_plain_infer(text)
    document = _read_others(plain, limits) if plain is not None else None
    if plain is None or document is None:
        plain = None
        document = read_object(text, limits.values)
        _check_members(document, limits.members)
        if "id" in document:
            inference.id = read_string("id", document["id"])
    else:
        inference.id, inputs, outputs, output_format.default = plain[:4]
        _check_members({"inputs": inputs, "outputs": outputs, **document}, limits.members)
    if "parameters" in document:
        for name, value in read_object_member("parameters", document["parameters"]).items():
            if name == "binary_data_output":
                output_format.default = read_bool(name, value)
            else:
                read_parameter(inference, name, value)
    if plain is None:
        _read_inputs(inference, read_array_member(document, "inputs"), binary, shared_memory, limits.strings)
    else:
        _read_plain_inputs(inputs, inference, binary, limits.strings)
    if "outputs" in document:
        _read_outputs(inference, read_array_member(document, "outputs"), output_format, shared_memory)
    elif plain is not None and outputs is not None:
        output_format.binary = dict(outputs)
        inference.requested_outputs = tuple([name for name, _ in outputs])
    return inference, output_format


def _read_others(plain: PlainInfer, limits: RequestLimits) -> dict[str, Any] | None:
    """Return the outputs and parameters that were not read natively. None if they are invalid."""
    if len(plain) == 4:
        return {}
    try:
        return read_object(plain[4], limits.values)
    except InvalidArgument:
        return None  # the message is about the whole document


def _check_members(document: dict[str, Any], most: int) -> None:
    for name in ("inputs", "outputs", "parameters"):
        members = document.get(name)
        if isinstance(members, list | dict) and len(members) > most:
            raise InvalidArgument(f"'{name}' has {len(members)} members, at most {most} are supported")


def write_infer_response(response: InferenceResponse, output_format: OutputFormat) -> Response:
    """Encode a response. Raises its error, or `ServerError` for an output that the format cannot represent."""
    if response.error is not None:
        response.raise_error()
    binary, default = output_format.binary, output_format.default
    if not response.parameters and not output_format.shared:
        plain = write_plain_infer(
            response.id, response.model_name, response.model_version, response.outputs, binary, default
        )
        if plain is not None:
            body, json_length = plain
            return Response(body) if len(body) == json_length else _binary_response(body, json_length)
    return _write_in_python(response, output_format)


def _read_plain_inputs(
    inputs: PlainInputs, inference: InferenceRequest, binary: memoryview, max_strings: int
) -> None:
    """Apply the inputs that `parse_plain_infer` returned. Raises `InvalidArgument`."""
    offset = 0
    for name, datatype_name, shape, content in inputs:
        if name in inference.inputs:
            raise _duplicate_input(name)
        datatype = DataType.parse(datatype_name, name)
        if 0 in shape:
            element_count(shape, name)  # checks the other extents
        if isinstance(content, bytearray):
            inference.inputs[name] = Tensor(name, datatype, np.ndarray(shape, datatype.dtype, content))
        elif isinstance(content, int):
            inference.inputs[name] = _read_binary(
                name, datatype, shape, content, binary[offset:], inference, max_strings
            )
            offset += content
        else:
            elements = np.empty(len(content), np.object_)
            elements[:] = content
            inference.inputs[name] = Tensor(name, datatype, elements.reshape(shape))
    if len(binary) > offset:
        raise _additional_data(inference)


def _header_length(request: Request) -> int:
    """Return the length of the JSON at the start of the body, from the request header."""
    size = len(request.body)
    value = request.headers[HEADER_LENGTH_FIELD].decode("latin-1")
    if not value.isascii() or not value.removeprefix("-").isdigit():
        raise InvalidArgument(f"Unable to parse {HEADER_LENGTH}, got: {value}")
    if len(value) > _MAX_DIGITS:
        raise InvalidArgument(f"Unable to parse {HEADER_LENGTH}, got a number of {len(value)} digits")
    if not 0 <= int(value) <= size:
        raise InvalidArgument(f"inference header size should be in range (0, {size}), got: {value}")
    return int(value)


def _read_inputs(
    inference: InferenceRequest,
    inputs: list[Any],
    binary: memoryview,
    shared_memory: SharedMemory,
    max_strings: int,
) -> None:
    offset = 0
    for entry in inputs:
        if type(entry) is not dict:
            raise InvalidArgument("Unable to parse 'inputs': attempt to access JSON non-object as object")
        name = _member_string(entry, "name")
        if name in inference.inputs:
            raise _duplicate_input(name)
        datatype = DataType.parse(_member_string(entry, "datatype"), name)
        shape = _shape(entry)
        parameters = read_object_member("parameters", entry["parameters"]) if "parameters" in entry else {}
        if parameters or "data" not in entry:
            _check_source(entry, parameters)
        if "data" in entry:
            inference.inputs[name] = read_tensor(name, datatype, shape, read_array_member(entry, "data"))
            continue
        if (shared := _read_shared(name, parameters, shared_memory)) is not None:
            inference.inputs[name] = shared.read(name, datatype, shape, max_strings, inference.model_name)
            inference.cacheable = False
            inference.shared_inputs += (shared,)
            continue
        size = read_unsigned("binary_data_size", parameters["binary_data_size"])
        inference.inputs[name] = _read_binary(
            name, datatype, shape, size, binary[offset:], inference, max_strings
        )
        offset += size
    if len(binary) > offset:
        raise _additional_data(inference)


def _duplicate_input(name: str) -> InvalidArgument:
    return InvalidArgument(f"input '{name}' already exists in request")


def _read_binary(
    name: str,
    datatype: DataType,
    shape: tuple[int, ...],
    size: int,
    binary: memoryview,
    inference: InferenceRequest,
    max_strings: int,
) -> Tensor:
    """Read a tensor from the first `size` bytes of `binary`."""
    if size > len(binary):
        raise InvalidArgument(
            f"unexpected size for input '{name}', expecting {size - len(binary)} additional bytes for model "
            f"'{inference.model_name}'"
        )
    return Tensor.from_wire(name, datatype, shape, binary[:size], inference.model_name, max_strings)


def _additional_data(inference: InferenceRequest) -> InvalidArgument:
    return InvalidArgument(f"unexpected additional input data for model '{inference.model_name}'")


def _check_source(entry: dict[str, Any], parameters: dict[str, Any]) -> None:
    """Check that an input has exactly one source of data."""
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
        shared = _read_shared(name, parameters, shared_memory)
        classes = read_unsigned("classification", parameters.get("classification", 0))
        if shared is not None and classes:
            raise InvalidArgument(f"output '{name}' cannot be classified and written to shared memory")
        if shared is not None:
            output_format.shared[name] = shared
        if classes:
            inference.classification[name] = classes
        # As in Triton, a requested output is JSON unless its parameters request binary data.
        output_format.binary[name] = read_bool("binary_data", parameters.get("binary_data", False))
        names.append(name)
    inference.requested_outputs = tuple(names)


def _read_shared(
    tensor: str, parameters: dict[str, Any], shared_memory: SharedMemory
) -> SharedMemoryWindow | None:
    """Return the location of a tensor in shared memory, None if no region is given. Raises `ServerError`."""
    if REGION not in parameters:
        return None
    shared_memory.check_enabled()
    if BYTE_SIZE not in parameters:
        raise InvalidArgument(f"'{BYTE_SIZE}' is missing, '{tensor}' is in shared memory")
    return shared_memory.window(
        read_string(REGION, parameters[REGION]),
        read_unsigned(OFFSET, parameters.get(OFFSET, 0)),
        read_unsigned(BYTE_SIZE, parameters[BYTE_SIZE]),
    )


def _member_string(entry: dict[str, Any], name: str) -> str:
    value = entry.get(name)
    if type(value) is str:
        return value
    if name not in entry:
        raise InvalidArgument(
            f"Unable to parse '{name}': attempt to access non-existing object member '{name}'"
        )
    return read_string(name, value)


def _shape(entry: dict[str, Any]) -> tuple[int, ...]:
    extents = read_array_member(entry, "shape")
    for extent in extents:
        read_unsigned("shape", extent)
    return tuple(extents)


def _read_raw(body: bytes, model: Model, version: str, limits: RequestLimits) -> InferenceRequest:
    """Read a body that consists of the only input, with batch size 1."""
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
    shape = (1, *shape) if batched else shape
    tensor = Tensor.from_wire(spec.name, DataType(spec.datatype), shape, data, model.name, limits.strings)
    return InferenceRequest(model.name, {spec.name: tensor}, version)


def _raw_shape(spec: TensorMetadata, dims: tuple[int, ...], body: bytes) -> tuple[tuple[int, ...], bytes]:
    """Return shape and data of a raw input. Raises `InvalidArgument` if `dims` do not determine the shape."""
    if dims.count(-1) > 1:
        raise InvalidArgument(
            f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    if spec.datatype == DataType.BYTES:
        if any(extent != 1 for extent in dims):
            raise InvalidArgument(
                f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]"
            )
        return dims, len(body).to_bytes(4, "little") + body
    itemsize = DataType(spec.datatype).dtype.itemsize
    known = itemsize
    for extent in dims:
        known *= 1 if extent == -1 else extent
    return tuple(len(body) // max(known, 1) if extent == -1 else extent for extent in dims), body


def _binary_response(body: bytes | list[bytes | memoryview], json_length: int) -> Response:
    """Create a response body of JSON followed by binary outputs."""
    return Response(body, 200, "application/octet-stream", ((HEADER_LENGTH, str(json_length)),))


def _write_in_python(response: InferenceResponse, output_format: OutputFormat) -> Response:
    """Encode a response that `write_plain_infer` does not support. Raises `ServerError`."""
    blobs: list[bytes | memoryview] = []
    outputs: list[dict[str, Any]] = []
    binary, default = output_format.binary, output_format.default
    for tensor in response.outputs:
        name = tensor.name
        entry: dict[str, Any] = {"name": name, "datatype": tensor.datatype, "shape": tensor.array.shape}
        if output_format.shared and name in output_format.shared:
            # No parameters, as in Triton: its C++ client fails on an output with parameters but no binary_data_size.
            output_format.shared[name].write(tensor)
        elif binary.get(name, default):
            _add_blob(tensor, entry, blobs)
        else:
            entry["data"] = write_values(tensor)
        outputs.append(entry)
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    if response.parameters:
        document["parameters"] = response.parameters
    document["outputs"] = outputs
    text = write_json(document)
    return _binary_response([text, *blobs], len(text)) if blobs else Response(text)


def _add_blob(tensor: Tensor, entry: dict[str, Any], blobs: list[bytes | memoryview]) -> None:
    blob = tensor.to_wire()
    entry["parameters"] = {"binary_data_size": len(blob)}
    if blob:
        blobs.append(blob)
