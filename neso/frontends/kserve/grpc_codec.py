"""Codec of infer requests and responses over gRPC.

Protobuf copies large tensors two or three times. Instead, raw inputs are cut out of the bytes before protobuf parses
the rest, and raw outputs are appended to the bytes that protobuf has serialized: a message's fields may be
concatenated, and `raw_output_contents` is the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from neso.frontends.kserve.errors import STATUSES
from neso.frontends.kserve.grpc_tensors import (
    OutputOptions,
    read_inputs,
    read_outputs,
    read_parameters,
    read_shared_inputs,
    write_parameters,
)
from neso.server.errors import InvalidArgument, ServerError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse
from neso.server.shared_memory.regions import SharedMemory, SharedMemoryWindow
from neso.server.tensor import DataType, Tensor

FINAL_RESPONSE = "triton_final_response"

GRPC_STATUSES = {code: grpc.StatusCode[name] for code, (_, name) in STATUSES.items()}

# Wire types of fields. A field's tag is its number << 3 | wire type.
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_RAW_INPUT_CONTENTS = 7 << 3 | _LENGTH
_RAW_OUTPUT_CONTENTS = bytes([6 << 3 | _LENGTH])
_INFER_RESPONSE = bytes([2 << 3 | _LENGTH])

_LARGE_MESSAGE = 64 * 1024  # bytes; protobuf is faster for smaller messages
_LARGE_TENSOR = 64 * 1024  # bytes; copying is faster than a view for smaller tensors


class InferMessage(NamedTuple):
    """A `ModelInferRequest` and its raw inputs, which may be missing in `request`."""

    request: Any
    raw_inputs: Sequence[bytes]


def decode_infer_message(data: bytes) -> InferMessage:
    """Parse a `ModelInferRequest`. Raises `InvalidArgument`."""
    try:
        if len(data) >= _LARGE_MESSAGE:
            rest, raw_inputs = _split_raw_inputs(data)
            return InferMessage(service_pb2.ModelInferRequest.FromString(rest), raw_inputs)
        request = service_pb2.ModelInferRequest.FromString(data)
    except (DecodeError, ValueError, IndexError) as error:
        raise InvalidArgument(f"malformed ModelInferRequest: {error}") from None
    return InferMessage(request, request.raw_input_contents)


def read_infer_request(
    infer: InferMessage, shared_memory: SharedMemory
) -> tuple[InferenceRequest, OutputOptions]:
    """Read the request of a message. Raises `ServerError`."""
    message = infer.request
    request = InferenceRequest(message.model_name, {}, model_version=message.model_version, id=message.id)
    output = OutputOptions()
    if message.parameters:  # much faster than iterating over an empty map
        read_parameters(message.parameters, request, output)
    if message.outputs:
        read_outputs(message, request, output, shared_memory)
    shared = read_shared_inputs(message, shared_memory)
    request.inputs = read_inputs(message, infer.raw_inputs, shared)
    request.cacheable = not shared
    return request, output


def encode_response(response: InferenceResponse, shared: Mapping[str, SharedMemoryWindow]) -> bytes:
    """Encode a `ModelInferResponse`; write outputs in `shared` to shared memory. Raises `ServerError`."""
    return b"".join(_encode_parts(response, shared, final=None))


def encode_stream_response(
    response: InferenceResponse, shared: Mapping[str, SharedMemoryWindow], *, final: bool
) -> bytes:
    """Encode a `ModelStreamInferResponse`. `final`: this is the last response to its request."""
    parts = _encode_parts(response, shared, final=final)
    return b"".join((_INFER_RESPONSE, _encode_varint(sum(map(len, parts))), *parts))


def encode_stream_error(model_name: str, request_id: str, error: ServerError, *, final: bool) -> bytes:
    """Encode a `ModelStreamInferResponse` for an error, with the id of the request."""
    message = service_pb2.ModelStreamInferResponse(error_message=error.message)
    message.infer_response.model_name = model_name
    message.infer_response.id = request_id
    message.infer_response.parameters[FINAL_RESPONSE].bool_param = final
    return message.SerializeToString()  # type: ignore[no-any-return]


def _split_raw_inputs(data: bytes) -> tuple[bytes, list[bytes]]:
    """Return the message without its raw inputs, and copies of the raw inputs (views might be unaligned)."""
    rest: list[bytes] = []
    raw_inputs: list[bytes] = []
    pos = 0
    while pos < len(data):
        start = pos
        tag, pos = _read_varint(data, pos)
        wire_type = tag & 7
        if wire_type == _LENGTH:
            length, pos = _read_varint(data, pos)
            end = pos + length
        elif wire_type == _VARINT:
            _, end = _read_varint(data, pos)
        elif wire_type in (_FIXED64, _FIXED32):
            end = pos + (8 if wire_type == _FIXED64 else 4)
        else:
            raise ValueError(f"invalid field tag {tag}")
        if end > len(data):
            raise ValueError("the last field is cut off")
        if tag == _RAW_INPUT_CONTENTS:
            raw_inputs.append(data[pos:end])
        else:
            rest.append(data[start:end])
        pos = end
    return b"".join(rest), raw_inputs


def _read_varint(data: bytes, pos: int) -> tuple[int, int]:
    """Decode the varint at `pos`; also return the position after it."""
    value = shift = 0
    while True:
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos
        shift += 7


def _encode_parts(
    response: InferenceResponse, shared: Mapping[str, SharedMemoryWindow], *, final: bool | None
) -> list[Any]:
    """Return the buffers of a `ModelInferResponse`. `final`: value of the final response parameter, None to omit it."""
    head = service_pb2.ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, id=response.id
    )
    if response.parameters:
        write_parameters(head.parameters, response.parameters)
    if final is not None:
        head.parameters[FINAL_RESPONSE].bool_param = final
    for tensor in response.outputs:
        output = head.outputs.add(name=tensor.name, datatype=tensor.datatype.value, shape=tensor.shape)
        if tensor.name in shared:
            window = shared[tensor.name]
            write_parameters(output.parameters, window.parameters(window.write(tensor)))
    parts = [head.SerializeToString()]
    for tensor in response.outputs:
        # One entry per output, empty for outputs in shared memory: clients match entries by position.
        data = b"" if tensor.name in shared else _tensor_buffer(tensor)
        parts += (_RAW_OUTPUT_CONTENTS, _encode_varint(len(data)), data)
    return parts


def _tensor_buffer(tensor: Tensor) -> Any:
    if tensor.datatype is DataType.BYTES or tensor.array.nbytes < _LARGE_TENSOR:
        return tensor.to_wire()
    return tensor.array.reshape(-1).view(np.uint8)


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
