"""Encoding of messages, and conversion of requests, responses, tensors and log records to messages.

A message is its length (4 bytes, little-endian) and a pickle. Pickle is in the standard library, so a model's
environment needs no additional package, and protocol 4 is compatible between Python versions. The unpickler
instantiates only the classes of `messages` and plain data.
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
    ErrorData,
    Log,
    Message,
    RequestData,
    ResponseData,
    TensorData,
    TraceData,
)
from neso.backends.python.process.shared_memory import Arena, ArenaReader
from neso.backends.python.response import RequestTrace
from neso.server.errors import CLASSES_BY_NAME, InternalError, ServerError, Unavailable
from neso.server.inference_request import InferenceRequest, ParameterValue
from neso.server.inference_response import InferenceResponse
from neso.server.log.settings import FIELDS
from neso.server.tensor import DataType, Tensor

_LENGTH_BYTES = 4
_MESSAGE_TYPES = frozenset(MESSAGES.values())


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) in _MESSAGE_TYPES or value in _MESSAGE_TYPES:
            return NotImplemented  # default pickling
        raise TypeError(f"{type(value).__name__} objects cannot be passed to the server: {value!r}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = MESSAGES.get(name) if module == messages.__name__ else None
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} must not be in a message")
        return found


def encode(message: Message) -> bytes:
    """Encode with the length prefix. Raises `TypeError` for fields that are not plain data."""
    buffer = io.BytesIO()
    buffer.write(bytes(_LENGTH_BYTES))
    _Pickler(buffer, protocol=4).dump(message)
    data = buffer.getbuffer()
    data[:_LENGTH_BYTES] = (len(data) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
    return data.tobytes()


class Decoder:
    """Decodes messages from chunks of a byte stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Add a chunk and yield the completed messages. Raises `pickle.UnpicklingError` for invalid data."""
        self._buffer += data
        start = 0
        try:
            while (message := self._next(start)) is not None:
                start, content = message
                yield _Unpickler(io.BytesIO(content)).load()
        finally:
            del self._buffer[:start]

    def _next(self, start: int) -> tuple[int, bytes] | None:
        body = start + _LENGTH_BYTES
        if len(self._buffer) < body:
            return None
        end = body + int.from_bytes(self._buffer[start:body], "little")
        return (end, bytes(self._buffer[body:end])) if len(self._buffer) >= end else None


INLINE_BYTES = 8192
"""Maximum size of tensors sent through the socket, in bytes. For these it is faster than allocating shared memory."""


class MessageCodec:
    """Packs and unpacks requests and responses on one side of a channel.

    Sending a tensor copies it once, to this side's arena `own`. Views of received blocks are sent back without a copy.
    Received tensors are views of the other side's arena (`remote_file`). `released` is called with the offset of a
    remote block that is no longer used on this side.
    """

    def __init__(self, own: Arena, remote_file: FileIO, released: Callable[[int], None]) -> None:
        self.own = own
        self._remote = ArenaReader(remote_file, released)

    def pack(self, tensor: Tensor) -> TensorData:
        """Pack a tensor. Keep it alive until the message is sent. Raises `InternalError` if memory is exhausted."""
        name, datatype, shape = str(tensor.name), tensor.datatype.value, tensor.shape
        if tensor.datatype is DataType.BYTES:
            source = np.frombuffer(tensor.to_wire(), np.uint8)
        else:
            source = np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8)
        if source.nbytes <= INLINE_BYTES:
            return TensorData(name, datatype, shape, data=source.tobytes())
        if (found := self._remote.find(source)) is not None:
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
        """Return a tensor that is a view of the shared memory or of the message."""
        datatype = DataType(data.datatype)
        if data.block is None:
            return Tensor.from_wire(data.name, datatype, data.shape, data.data or b"")
        memory = (self.own.view_again if data.block.returned else self._remote.view)(data.block)
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
            response.created_ns,
        )

    def unpack_response(self, data: ResponseData) -> InferenceResponse:
        return InferenceResponse(
            "",
            "",
            outputs=[self.unpack(tensor) for tensor in data.outputs],
            parameters=data.parameters,
            error=None if data.error is None else unpack_error(data.error),
            final=data.final,
            created_ns=data.created_ns,
        )


def pack_error(error: ServerError) -> ErrorData:
    kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in CLASSES_BY_NAME)
    return ErrorData(str(error.message), kind, error.retry_after if isinstance(error, Unavailable) else 0)


def unpack_error(data: ErrorData) -> ServerError:
    error = CLASSES_BY_NAME[data.kind](data.message)
    if isinstance(error, Unavailable):
        error.retry_after = data.retry_after
    return error


def payload_size(tensors: Iterable[Tensor]) -> int:
    """Return the number of bytes to copy for these tensors. Elements of BYTES tensors are not counted, for speed."""
    return sum(int(tensor.array.nbytes) for tensor in tensors)


def _plain(parameters: dict[str, ParameterValue]) -> dict[str, ParameterValue]:
    """Convert numpy scalars and other subclasses to plain Python types."""
    return {str(key): _plain_value(value) for key, value in parameters.items()}


def _plain_value(value: ParameterValue) -> ParameterValue:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"parameters must be bool, int, float or str, got {type(value).__name__}")


class ServerLogHandler(logging.Handler):
    """Child side: sends each log record, with a formatted traceback, to the server."""

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
    """Return the effective log level for models on the server."""
    return logging.getLogger("neso.model").getEffectiveLevel()


def write_log_record(record: Log) -> None:
    """Server side: log a record of the child with its original source location."""
    logger = logging.getLogger(record.logger)
    if logger.isEnabledFor(record.level):
        location = (record.path, record.line)
        logger.handle(
            logger.makeRecord(
                record.logger, record.level, *location, "%s", (record.message,), None, extra=record.fields
            )
        )
