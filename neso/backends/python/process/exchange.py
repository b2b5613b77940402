"""Tensors, requests and responses as messages: small tensors inside, large ones through shared memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from io import FileIO

import numpy as np

from neso.backends.python.process.arena import Arena, Visitor
from neso.backends.python.process.messages import RequestData, ResponseData, TensorData, TraceData
from neso.backends.python.trace import RequestTrace
from neso.server.errors import ErrorCode, InternalError, ServerError
from neso.server.inference_request import InferenceRequest, ParameterValue
from neso.server.inference_response import InferenceResponse
from neso.server.tensor import DataType, Tensor

INLINE_BYTES = 8192
"""Up to here, a copy through the socket costs less than the books of shared memory."""


class Exchange:
    """One end: `own` memory for what it sends, and a look at the other side's for what it gets.

    A tensor that is sent is copied once, into shared memory, unless it is there already: a view of what came from the
    other side goes back as it is. A tensor that is received is a view. `released` is called with the offset of a block
    of the other side that can be used again.
    """

    def __init__(self, own: Arena, others: FileIO, released: Callable[[int], None]) -> None:
        self.own = own
        self._visitor = Visitor(others, released)

    def pack(self, tensor: Tensor) -> TensorData:
        """The tensor must live until the message is sent. Raises `InternalError` when there is no more memory."""
        name, datatype, shape = str(tensor.name), tensor.datatype.value, tensor.shape
        if tensor.datatype is DataType.BYTES:
            source = np.frombuffer(tensor.to_wire(), np.uint8)
        else:
            source = np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8)
        if source.nbytes <= INLINE_BYTES:
            return TensorData(name, datatype, shape, data=source.tobytes())
        if (found := self._visitor.find(source)) is not None:
            return TensorData(name, datatype, shape, block=found[0]._replace(returned=True), start=found[1])
        try:
            block, memory = self.own.allocate(source.nbytes)
        except OSError as error:
            raise InternalError(
                f"no shared memory for tensor '{name}', {source.nbytes} bytes: {error}"
            ) from None
        memory[:] = source
        return TensorData(name, datatype, shape, block=block)

    def unpack(self, data: TensorData) -> Tensor:
        """A view of the memory, or of the message."""
        datatype = DataType(data.datatype)
        if data.block is None:
            return Tensor.from_wire(data.name, datatype, data.shape, data.data or b"")
        memory = (self.own.look_again if data.block.returned else self._visitor.view)(data.block)
        if datatype is DataType.BYTES:
            return Tensor.from_wire(data.name, datatype, data.shape, memory[data.start :].data)
        size = math.prod(data.shape) * datatype.dtype.itemsize
        array = memory[data.start : data.start + size].view(datatype.dtype).reshape(data.shape)
        return Tensor(data.name, datatype, array)

    def pack_request(self, request: InferenceRequest, trace: RequestTrace | None) -> RequestData:
        return RequestData(
            str(request.model_name),
            tuple(self.pack(tensor) for tensor in request.inputs.values()),
            request.model_version,
            str(request.id),
            tuple(map(str, request.requested_outputs)),
            _plain(request.parameters),
            request.priority,
            int(request.timeout_us),
            request.sequence_id if isinstance(request.sequence_id, str) else int(request.sequence_id),
            request.sequence_start,
            request.sequence_end,
            None if trace is None else TraceData(trace.id, trace.name, trace.context),
        )

    def unpack_request(self, data: RequestData) -> InferenceRequest:
        return InferenceRequest(
            data.model_name,
            {tensor.name: self.unpack(tensor) for tensor in data.inputs},
            data.model_version,
            data.id,
            data.requested_outputs,
            data.parameters,
            data.priority,
            data.timeout_us,
            data.sequence_id,
            data.sequence_start,
            data.sequence_end,
        )

    def pack_response(self, response: InferenceResponse) -> ResponseData:
        error = response.error
        return ResponseData(
            tuple(self.pack(tensor) for tensor in response.outputs),
            _plain(response.parameters),
            None if error is None else pack_error(error),
            response.final,
            response.made,
        )

    def unpack_response(self, data: ResponseData) -> InferenceResponse:
        return InferenceResponse(
            "",
            "",
            outputs=[self.unpack(tensor) for tensor in data.outputs],
            parameters=data.parameters,
            error=None if data.error is None else unpack_error(data.error),
            final=data.final,
            made=data.made,
        )


def pack_error(error: ServerError) -> tuple[str, str]:
    return str(error.message), error.code.value


def unpack_error(error: tuple[str, str]) -> ServerError:
    return ServerError(error[0], ErrorCode(error[1]))


def payload(tensors: Iterable[Tensor]) -> int:
    """Bytes that are to be copied, but for those of strings, which are slow to count."""
    return sum(int(tensor.array.nbytes) for tensor in tensors)


def _plain(parameters: dict[str, ParameterValue]) -> dict[str, ParameterValue]:
    """Without numpy's scalars and other subclasses, which the other side may not know."""
    return {str(key): _plain_value(value) for key, value in parameters.items()}


def _plain_value(value: ParameterValue) -> ParameterValue:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} is no type for a parameter")
