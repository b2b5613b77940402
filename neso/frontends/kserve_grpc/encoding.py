"""Responses as the bytes of their messages.

Protobuf would copy each output three times: to `bytes`, into the message and out of it again. The fields of a
message may be written one after the other, and `raw_output_contents` is the last one, so the small fields go
through protobuf, then the tensors' own memory is joined on: one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from neso.frontends.kserve_grpc.parameters import FINAL_RESPONSE, write_parameters
from neso.server.errors import ServerError
from neso.server.inference_response import InferenceResponse
from neso.server.shared_memory.regions import SharedMemoryWindow
from neso.server.tensor import DataType, Tensor

# A field's tag is its number << 3 | 2: what follows has a length.
_RAW_OUTPUT_CONTENTS = bytes([6 << 3 | 2])
_INFER_RESPONSE = bytes([2 << 3 | 2])

Windows = Mapping[str, SharedMemoryWindow]

_SMALL = 64 * 1024  # below, a copy is cheaper than a view


def encode_response(response: InferenceResponse, windows: Windows) -> bytes:
    """A `ModelInferResponse`. Outputs that have a window go there. Raises `ServerError` if they do not fit."""
    return b"".join(_parts(response, windows, final=None))


def encode_stream_response(response: InferenceResponse, windows: Windows, *, final: bool) -> bytes:
    """A `ModelStreamInferResponse` that says whether it is the last one of its request. Else the same."""
    parts = _parts(response, windows, final=final)
    return b"".join((_INFER_RESPONSE, _varint(sum(map(len, parts))), *parts))


def encode_stream_error(model_name: str, request_id: str, error: ServerError, *, final: bool) -> bytes:
    """A `ModelStreamInferResponse` for an error; the id in it tells the client whose error it is."""
    message = service_pb2.ModelStreamInferResponse(error_message=error.message)
    message.infer_response.model_name = model_name
    message.infer_response.id = request_id
    message.infer_response.parameters[FINAL_RESPONSE].bool_param = final
    return message.SerializeToString()  # type: ignore[no-any-return]


def _parts(response: InferenceResponse, windows: Windows, *, final: bool | None) -> list[Any]:
    head = service_pb2.ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, id=response.id
    )
    if response.parameters:
        write_parameters(head.parameters, response.parameters)
    if final is not None:
        head.parameters[FINAL_RESPONSE].bool_param = final
    for tensor in response.outputs:
        output = head.outputs.add(name=tensor.name, datatype=tensor.datatype.value, shape=tensor.shape)
        if tensor.name in windows:
            window = windows[tensor.name]
            write_parameters(output.parameters, window.parameters(window.write(tensor)))
    parts = [head.SerializeToString()]
    for tensor in response.outputs:
        # One for each output: clients count them. What is in shared memory is empty here.
        data = b"" if tensor.name in windows else _data(tensor)
        parts += (_RAW_OUTPUT_CONTENTS, _varint(len(data)), data)
    return parts


def _data(tensor: Tensor) -> Any:
    if tensor.datatype is DataType.BYTES or tensor.array.nbytes < _SMALL:
        return tensor.to_wire()
    return tensor.array.reshape(-1).view(np.uint8)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
