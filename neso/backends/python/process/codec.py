"""Messages as bytes: a length of 4 bytes, little-endian, and a pickle in which nothing but messages can be.

The standard library's, so that a model's environment needs no package of ours; two interpreters may have different
versions. The unpickler makes the classes of `messages` and plain data, and refuses all else.
"""

from __future__ import annotations

import io
import logging
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from typing import Any

import numpy as np

from neso.backends.python.process import messages
from neso.backends.python.process.messages import (
    MESSAGES,
    Log,
    Message,
    RequestData,
    ResponseData,
    TensorData,
    TraceData,
)
from neso.backends.python.process.shared_memory import Arena, Visitor
from neso.backends.python.response import RequestTrace
from neso.server.errors import ErrorCode, InternalError, ServerError
from neso.server.inference_request import InferenceRequest, ParameterValue
from neso.server.inference_response import InferenceResponse
from neso.server.log.settings import FIELDS
from neso.server.tensor import DataType, Tensor

_LENGTH = 4
_KINDS = frozenset(MESSAGES.values())


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) in _KINDS or value in _KINDS:
            return NotImplemented  # as pickle does it
        raise TypeError(f"{type(value).__name__} objects cannot be passed to the server: {value!r}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = MESSAGES.get(name) if module == messages.__name__ else None
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} must not be in a message")
        return found


def encode(message: Message) -> bytes:
    """Raises `TypeError` for values that are no plain data."""
    buffer = io.BytesIO()
    buffer.write(bytes(_LENGTH))
    _Pickler(buffer, protocol=4).dump(message)
    data = buffer.getbuffer()
    data[:_LENGTH] = (len(data) - _LENGTH).to_bytes(_LENGTH, "little")
    return data.tobytes()


class Decoder:
    """Puts messages together from the pieces that a stream socket gives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now. Raises `pickle.UnpicklingError` for what is none."""
        self._buffer += data
        start = 0
        try:
            while (message := self._next(start)) is not None:
                start, content = message
                yield _Unpickler(io.BytesIO(content)).load()
        finally:
            del self._buffer[:start]

    def _next(self, start: int) -> tuple[int, bytes] | None:
        body = start + _LENGTH
        if len(self._buffer) < body:
            return None
        end = body + int.from_bytes(self._buffer[start:body], "little")
        return (end, bytes(self._buffer[body:end])) if len(self._buffer) >= end else None


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


class ServerLog(logging.Handler):
    """The process's side: sends each record, with its traceback as text."""

    def __init__(self, send: Callable[[Log], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            fields = {name: str(getattr(record, name)) for name in FIELDS if hasattr(record, name)}
            name, level = str(record.name), int(record.levelno)
            self._send(Log(name, level, text, record.pathname, record.lineno, fields))
        except Exception:
            self.handleError(record)


def log_level() -> int:
    """The lowest level that the server's log takes of models."""
    return logging.getLogger("neso.model").getEffectiveLevel()


def write_log_record(line: Log) -> None:
    """The server's side: as if the line had been logged here."""
    logger = logging.getLogger(line.logger)
    if logger.isEnabledFor(line.level):
        logger.handle(
            logger.makeRecord(
                line.logger, line.level, line.path, line.line, "%s", (line.message,), None, extra=line.fields
            )
        )
