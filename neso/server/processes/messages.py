"""Messages between the main process and a front-end process, encoded as msgpack.

Both sides are the same program on the same machine, so rare values (payloads, arguments of calls) are pickled.
"""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import numpy as np

import neso.server.errors as errors
from neso.server.admission import CLIENT
from neso.server.errors import InvalidArgument, ServerError, as_server_error
from neso.server.inference_request import InferenceRequest, ParameterValue
from neso.server.inference_response import InferenceResponse
from neso.server.tensor import DataType, Tensor

WireTensor = tuple[str, str, tuple[int, ...], bytes]
"""Name, datatype, shape, and elements in the binary tensor format of KServe."""
WireError = tuple[str, str]
"""Message, and name of the class in `neso.server.errors`."""


class Infer(msgspec.Struct, array_like=True, tag=0):
    """Start a request; answered by `Response` messages with the same number."""

    number: int
    model_name: str
    model_version: str
    namespace: str
    id: str
    inputs: list[WireTensor]
    requested_outputs: tuple[str, ...]
    parameters: dict[str, ParameterValue]
    priority: int
    timeout_us: int
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool
    cacheable: bool
    classification: dict[str, int]
    client: str
    input_bytes: int
    single_response: bool
    payload: bytes = b""


class Response(msgspec.Struct, array_like=True, tag=1):
    """A response of a request; the last one is final."""

    number: int
    model_name: str
    model_version: str
    id: str
    outputs: list[WireTensor]
    parameters: dict[str, ParameterValue]
    final: bool
    created_ns: int
    error: WireError | None = None
    result: bytes = b""


class Cancel(msgspec.Struct, array_like=True, tag=2):
    """Cancel a request."""

    number: int


class Flow(msgspec.Struct, array_like=True, tag=3):
    """Send no more responses of a request or items of a stream for now, or send them again."""

    number: int
    paused: bool


class Call(msgspec.Struct, array_like=True, tag=4):
    """Call an operation of the other process; answered by `Result`, with number 0 not at all.

    A streaming operation first sends `Item` messages.
    """

    number: int
    operation: str
    arguments: bytes


class Item(msgspec.Struct, array_like=True, tag=5):
    """An item of a streaming operation."""

    number: int
    value: bytes


class Result(msgspec.Struct, array_like=True, tag=6):
    """The result of a call: a value or a `ServerError`."""

    number: int
    value: bytes = b""
    error: WireError | None = None


class EndCall(msgspec.Struct, array_like=True, tag=7):
    """Cancel a call."""

    number: int


Message = Infer | Response | Cancel | Flow | Call | Item | Result | EndCall

encoder = msgspec.msgpack.Encoder()
decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack_error(error: Exception) -> WireError:
    """Convert an exception for another process."""
    wrapped = as_server_error(error)
    return wrapped.message, type(wrapped).__name__


def unpack_error(error: WireError) -> ServerError:
    """Return the error that another process has sent."""
    message, name = error
    kind: type[ServerError] = getattr(errors, name)
    return kind(message)


def pack_tensor(tensor: Tensor) -> WireTensor:
    """Copy a tensor into a message."""
    if tensor.datatype is DataType.BYTES:
        data = bytes(tensor.to_wire())
    else:
        data = tensor.array.tobytes()
    return tensor.name, tensor.datatype.value, tensor.array.shape, data


def unpack_tensor(wire: WireTensor) -> Tensor:
    """Return a tensor whose elements are a read-only view of the message."""
    name, type_name, shape, data = wire
    datatype = DataType(type_name)
    if datatype is DataType.BYTES:
        return Tensor.from_wire(name, datatype, shape, data)
    return Tensor(name, datatype, np.frombuffer(data, datatype.dtype).reshape(shape))


def pack_request(number: int, request: InferenceRequest, version: str, namespace: str) -> bytes:
    """Encode a request. Raises `InvalidArgument` for values that a message cannot hold."""
    client = CLIENT.get() if request.client is None else request.client
    message = Infer(
        number,
        request.model_name,
        version,
        namespace,
        request.id,
        [pack_tensor(tensor) for tensor in request.inputs.values()],
        request.requested_outputs,
        request.parameters,
        request.priority,
        request.timeout_us,
        request.sequence_id,
        request.sequence_start,
        request.sequence_end,
        request.cacheable,
        request.classification,
        client,
        request.input_bytes,
        request.single_response,
        b"" if request.payload is None else pickle.dumps(request.payload, pickle.HIGHEST_PROTOCOL),
    )
    try:
        return encoder.encode(message)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument(f"the request holds a value that is not supported: {error}") from None


def unpack_request(message: Infer) -> InferenceRequest:
    """Return the request of a message."""
    inputs = [unpack_tensor(wire) for wire in message.inputs]
    return InferenceRequest(
        message.model_name,
        {tensor.name: tensor for tensor in inputs},
        model_version=message.model_version,
        id=message.id,
        requested_outputs=message.requested_outputs,
        parameters=message.parameters,
        priority=message.priority,
        timeout_us=message.timeout_us,
        sequence_id=message.sequence_id,
        sequence_start=message.sequence_start,
        sequence_end=message.sequence_end,
        cacheable=message.cacheable,
        classification=message.classification,
        client=message.client,
        input_bytes=message.input_bytes,
        single_response=message.single_response,
        payload=pickle.loads(message.payload) if message.payload else None,
    )


def pack_response(number: int, response: InferenceResponse) -> bytes:
    """Encode a response."""
    result: Any = response.result
    message = Response(
        number,
        response.model_name,
        response.model_version,
        response.id,
        [pack_tensor(tensor) for tensor in response.outputs],
        response.parameters,
        response.final,
        response.created_ns,
        None if response.error is None else pack_error(response.error),
        b"" if result is None else pickle.dumps(result, pickle.HIGHEST_PROTOCOL),
    )
    try:
        return encoder.encode(message)
    except (ValueError, TypeError, OverflowError) as error:
        failure = pack_error(InvalidArgument(f"the response holds a value that is not supported: {error}"))
        return encoder.encode(Response(number, "", "", "", [], {}, True, response.created_ns, failure))


def unpack_response(message: Response) -> InferenceResponse:
    """Return the response of a message."""
    return InferenceResponse(
        message.model_name,
        message.model_version,
        message.id,
        [unpack_tensor(wire) for wire in message.outputs],
        message.parameters,
        None if message.error is None else unpack_error(message.error),
        message.final,
        message.created_ns,
        pickle.loads(message.result) if message.result else None,
    )
