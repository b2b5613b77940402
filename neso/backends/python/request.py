"""`pb_utils.InferenceRequest`, and the responses of BLS calls."""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import AsyncIterator, Iterator, Sequence
from enum import IntEnum
from typing import Any

from neso.backends.python.arguments import as_integer, as_list, as_parameters, as_text
from neso.backends.python.errors import TritonError, TritonModelException
from neso.backends.python.response import InferenceResponse, RequestTrace, Responder, ResponseSender
from neso.backends.python.server_access import LoopCalls, ServerAccess, current_access, running_loop_calls
from neso.backends.python.tensor import Tensor
from neso.server.inference_request import InferenceRequest as ServerRequest
from neso.server.inference_response import InferenceResponse as ServerResponse

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

MAX_KEPT_BYTES = 16 << 20
"""Size of the responses of a call up to which a second loop over them is possible."""
TAKEN_BYTES = 64 << 10
"""Size of responses that are reported together as taken. Less than the smallest `max_call_backlog`."""


class InferenceRequest:
    """A request passed to `execute`, or created by a model for a BLS call.

    As in Triton, `inputs`, `requested_output_names` and `model_name` are required: without them, `TypeError` is raised.
    """

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | bytes | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        if requested_output_names is None:
            raise TypeError("requested_output_names must be a list, got NoneType")
        self._request_id = as_text(request_id, "request_id")
        self._correlation_id = (
            correlation_id
            if isinstance(correlation_id, str)
            else as_integer(correlation_id, "correlation_id")
        )
        self._inputs = as_list(inputs, Tensor, "inputs")
        self._requested_output_names = [
            as_text(name, "requested_output_names") for name in requested_output_names
        ]
        self._model_name = as_text(model_name, "model_name")
        self._model_version = as_integer(model_version, "model_version")
        self._flags = as_integer(flags, "flags")
        self._timeout = as_integer(timeout, "timeout")
        self._trace = trace
        self._parameters = as_parameters(parameters)
        self._responder: Responder | None = None

    @classmethod
    def from_server(
        cls, responder: Responder, output_names: Sequence[str], state_names: Sequence[str] = ()
    ) -> InferenceRequest:
        """Wrap a server request. If the client does not select outputs, all `output_names` are requested.

        The implicit states (`state_names`) are always requested, because the server needs them.
        """
        source, traced = responder.stream.request, responder.stream.trace
        # Bypasses __init__, which copies its arguments and would double the time.
        request = cls.__new__(cls)
        request._request_id = source.id
        request._correlation_id = source.sequence_id
        request._inputs = [Tensor.from_server(tensor) for tensor in source.inputs.values()]
        requested = source.requested_outputs
        request._requested_output_names = [*requested, *state_names] if requested else list(output_names)
        request._model_name = source.model_name
        request._model_version = int(source.model_version)
        request._flags = (TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if source.sequence_start else 0) | (
            TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if source.sequence_end else 0
        )
        request._timeout = source.timeout_us
        request._trace = None if traced is None else InferenceTrace(traced)
        request._parameters = dict(source.parameters)
        request._responder = responder
        return request

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        return self._requested_output_names

    def model_name(self) -> str:
        return self._model_name

    def model_version(self) -> int:
        return self._model_version

    def flags(self) -> int:
        """Return the bitwise OR of `TRITONSERVER_REQUEST_FLAG_*`."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = as_integer(flags, "flags")

    def timeout(self) -> int:
        """Return the timeout in microseconds; 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """Return the request parameters as JSON."""
        return json.dumps(self._parameters)

    def is_cancelled(self) -> bool:
        """Return whether the request was cancelled."""
        return self._responder is not None and self._responder.stream.request.cancelled

    def get_response_sender(self) -> ResponseSender:
        """Return a sender of responses for any thread, during or after `execute`."""
        if self._responder is None:
            raise TritonModelException("only requests that were passed to execute have a response sender")
        return ResponseSender(self._responder)

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Execute this request on another model. Returns its response or, with `decoupled`, an iterator of responses.

        Errors of the other model are set in the response. Raises `TritonModelException` without a model name.
        """
        responses = ResponseIterator(current_access(), self._to_server(), decoupled)
        return responses if decoupled else next(responses)

    async def async_exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Like `exec`, for coroutines. With `decoupled`, waits for the first response, as in Triton.

        The iterator works with `async for`. With `for`, it blocks the event loop while it waits for further responses.
        """
        responses = ResponseIterator(current_access(), self._to_server(), decoupled, running_loop_calls())
        try:
            if not decoupled:
                return await anext(responses)
            await responses.wait()
            return responses
        except asyncio.CancelledError:
            responses.cancel()
            raise

    def _to_server(self) -> ServerRequest:
        if not self._model_name:
            raise TritonModelException("InferenceRequest needs a model_name to be executed")
        return ServerRequest(
            self._model_name,
            {tensor.name(): tensor.to_server() for tensor in self._inputs},
            "" if self._model_version < 1 else str(self._model_version),
            self._request_id,
            tuple(self._requested_output_names),
            dict(self._parameters),
            timeout_us=self._timeout,
            sequence_id=self._correlation_id,
            sequence_start=bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
            sequence_end=bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
            trace=None if self._trace is None else self._trace.to_server(),  # type: ignore[arg-type]
        )

    def set_release_flags(self, flags: int) -> None:
        """Set the treatment of the request after `execute`: ALL (1) releases it, RESCHEDULE (2) executes it again.

        Raises `TritonModelException` for other flags, and if the model does not support rescheduling.
        """
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(
                f"Unable to set request release flags. Unsupported flag provided: {flags}"
            )
        if self._responder is None:
            raise TritonModelException("only requests that were passed to execute can be rescheduled")
        self._responder.set_reschedule(flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)

    def trace(self) -> InferenceTrace:
        """Return the trace of the request. If the request is not traced, the trace has no context."""
        return self._trace or InferenceTrace()


class ResponseIterator:
    """Iterator over the responses of a BLS call. The last response can be empty (final flag only).

    `next` blocks. `anext` works on the event loop of `loop_calls`. As in Triton, a loop continues where the one before
    was left, or starts again if all responses have been returned; they are kept for this up to `MAX_KEPT_BYTES`.
    """

    def __init__(
        self,
        access: ServerAccess,
        request: ServerRequest,
        decoupled: bool,
        loop_calls: LoopCalls | None = None,
    ) -> None:
        self._responses: queue.SimpleQueue[ServerResponse] = queue.SimpleQueue()
        self._loop_calls = loop_calls
        self._arrived = asyncio.Event()
        self._received: list[InferenceResponse] = []
        self._position = 0  # in the responses received
        self._kept_bytes = 0
        self._untold_bytes = 0  # taken, and not yet reported
        self._ended = False
        self._call = access.call(request, decoupled, self._deliver)

    def __iter__(self) -> Iterator[InferenceResponse]:
        self._start_again_at_end()
        return self

    def __next__(self) -> InferenceResponse:
        if self._at_end():
            raise StopIteration
        if self._position == len(self._received):
            self._receive(self._responses.get())
        return self._take()

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        self._start_again_at_end()
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._loop_calls is None:
            raise TypeError("the responses of exec() cannot be iterated with 'async for': use async_exec()")
        if self._at_end():
            raise StopAsyncIteration
        await self.wait()
        return self._take()

    async def wait(self) -> None:
        """Wait until there is a next response. For iterators of `async_exec`, before the end."""
        while self._position == len(self._received):
            try:
                self._receive(self._responses.get_nowait())
            except queue.Empty:
                self._arrived.clear()
                await self._arrived.wait()

    def cancel(self) -> None:
        """Cancel the call."""
        self._call.cancel()

    def _deliver(self, response: ServerResponse) -> None:
        """Add a response. Called from any thread."""
        self._responses.put(response)
        if self._loop_calls is not None:
            self._loop_calls.post(self._arrived.set)

    def _receive(self, response: ServerResponse) -> None:
        self._ended = response.final
        self._kept_bytes += response.backlog_size
        self._untold_bytes += response.backlog_size
        if self._kept_bytes > MAX_KEPT_BYTES:
            self._received.clear()
            self._position = 0
        self._received.append(_response_from_server(response))
        if self._untold_bytes >= TAKEN_BYTES and not self._ended:
            self._call.taken(self._untold_bytes)
            self._untold_bytes = 0

    def _take(self) -> InferenceResponse:
        self._position += 1
        return self._received[self._position - 1]

    def _at_end(self) -> bool:
        return self._ended and self._position == len(self._received)

    def _start_again_at_end(self) -> None:
        if not self._at_end():
            return
        if self._kept_bytes > MAX_KEPT_BYTES:
            raise TritonModelException(
                f"responses of more than {MAX_KEPT_BYTES >> 20} MiB can only be iterated once: keep those needed again"
            )
        self._position = 0


def _response_from_server(response: ServerResponse) -> InferenceResponse:
    """Convert a response of the server."""
    error = None if response.error is None else TritonError.from_server(response.error)
    return InferenceResponse(
        [Tensor.from_server(tensor) for tensor in response.outputs], error, dict(response.parameters)
    )


class InferenceTrace:
    """A request's trace. It can be passed to `InferenceRequest(trace=...)` or used to create spans."""

    def __init__(self, trace: RequestTrace | None = None) -> None:
        self._trace = trace

    def get_context(self) -> str | None:
        """Return the W3C trace context (`traceparent`, `tracestate`) as JSON; None unless traced with OpenTelemetry."""
        context = None if self._trace is None else self._trace.context
        return None if context is None else json.dumps(context)

    def to_server(self) -> RequestTrace | None:
        """Return the wrapped trace; None if the request is not traced."""
        return self._trace


class MemoryType(IntEnum):
    """Memory types."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 1


TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU


class PreferredMemory:
    """Preferred memory of the outputs of a BLS call. A hint: Neso returns outputs in CPU memory."""

    def __init__(
        self, preferred_memory_type: MemoryType = TRITONSERVER_MEMORY_CPU, preferred_device_id: int = 0
    ) -> None:
        self._type = MemoryType(preferred_memory_type)
        self._device_id = preferred_device_id

    def preferred_memory_type(self) -> MemoryType:
        return self._type

    def preferred_device_id(self) -> int:
        return self._device_id
