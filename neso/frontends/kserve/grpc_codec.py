"""Codec of infer requests and responses over gRPC.

Protobuf creates an object for each nested message and element, so a native scan first counts the fields of a request.

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

from neso import _wire
from neso.frontends.kserve.errors import STATUSES
from neso.frontends.kserve.grpc_tensors import (
    OutputOptions,
    read_inputs,
    read_outputs,
    read_parameters,
    read_shared_inputs,
    write_parameters,
)
from neso.frontends.kserve.request_limits import RequestLimits
from neso.server.errors import InvalidArgument, ServerError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse
from neso.server.shared_memory.regions import SharedMemory, SharedMemoryWindow
from neso.server.tensor import DataType, Tensor

FINAL_RESPONSE = "triton_final_response"

GRPC_STATUSES = {code: grpc.StatusCode[name] for code, (_, name) in STATUSES.items()}

# Tags of fields: the number << 3 | wire type 2, a length before the content.
_RAW_OUTPUT_CONTENTS = bytes([6 << 3 | 2])
_INFER_RESPONSE = bytes([2 << 3 | 2])

_MAX_LOAD_MESSAGES = 10_000  # parameters of a load request, and their parts
_LARGE_MESSAGE = 64 * 1024  # bytes; protobuf is faster for smaller messages
_LARGE_TENSOR = 64 * 1024  # bytes; copying is faster than a view for smaller tensors
INLINE_VALUES = 20_000
"""Messages with more fields and elements are not decoded on the event loop.

A value takes at least one byte, and a nested message two: messages with so few bytes need no scan.
"""


class ScannedMessage(NamedTuple):
    """The bytes of a `ModelInferRequest` within the limits.

    `values`: number of fields, and of elements of typed contents. `raw_inputs`: None if they are still in `data`.
    """

    values: int
    data: bytes
    raw_inputs: list[bytes] | None


class InferMessage(NamedTuple):
    """A `ModelInferRequest` and its raw inputs, which may be missing in `request`."""

    request: Any
    raw_inputs: Sequence[bytes]


def scan_infer_message(data: bytes, limits: RequestLimits) -> ScannedMessage:
    """Check the number of fields before protobuf creates an object for each. Raises `InvalidArgument`."""
    most = limits.members, limits.values
    try:
        if len(data) < _LARGE_MESSAGE:
            return ScannedMessage(_wire.scan_infer_request(data, *most), data, None)
        return ScannedMessage(*_wire.split_infer_request(data, *most))
    except OverflowError as error:
        raise InvalidArgument(
            f"ModelInferRequest has {error}: the limits are {limits.members} tensors and parameters, and "
            f"{limits.values} elements outside raw_input_contents"
        ) from None
    except ValueError as error:
        raise InvalidArgument(f"malformed ModelInferRequest: {error}") from None


def decode_infer_message(data: bytes, raw_inputs: list[bytes] | None = None) -> InferMessage:
    """Parse a `ModelInferRequest`, `raw_inputs`: unless they are in `data`. Raises `InvalidArgument`."""
    try:
        request = service_pb2.ModelInferRequest.FromString(data)
    except (DecodeError, ValueError) as error:
        raise InvalidArgument(f"malformed ModelInferRequest: {error}") from None
    return InferMessage(request, request.raw_input_contents if raw_inputs is None else raw_inputs)


def decode_load_request(data: bytes) -> Any:
    """Parse a `RepositoryModelLoadRequest`. Raises `InvalidArgument`."""
    try:
        _wire.scan_load_request(data, _MAX_LOAD_MESSAGES, _MAX_LOAD_MESSAGES * 8)
        return service_pb2.RepositoryModelLoadRequest.FromString(data)
    except (DecodeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"malformed RepositoryModelLoadRequest: {error}") from None


def read_infer_request(
    infer: InferMessage, shared_memory: SharedMemory, limits: RequestLimits
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
    request.inputs = read_inputs(message, infer.raw_inputs, shared, limits.strings)
    if shared:
        request.cacheable = False
        request.shared_inputs = tuple(shared.values())
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
    if value <= 0x7F:
        return bytes((value,))
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
