"""Inference responses and the stream that carries them from a backend to the consumer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from neso.server.backlog import Backlog
from neso.server.errors import Cancelled, InternalError, ServerError, Unavailable, as_server_error
from neso.server.inference_request import InferenceRequest, ParameterValue
from neso.server.statistics import FailureReason, Timeline
from neso.server.tensor import DataType, Tensor

if TYPE_CHECKING:
    from neso.generation import GenerationOutput, GenerationRequest, PooledOutput
    from neso.server.admission import Ticket
    from neso.server.tracing import ModelTrace

logger = logging.getLogger(__name__)

NEVER_EXECUTED = "the request was cancelled before it was executed"


@dataclass(slots=True, eq=False)
class InferenceResponse:
    """One response. The last response of a request has `final` set and can be otherwise empty.

    - outputs: tensors
    - result: output of a text-generation or pooling request
    - error: if set, the outputs are not valid
    - created_ns: creation time in ns of the monotonic clock
    - backlog_size: bytes that the response takes in the backlog of its stream; 0 if it is not counted
    """

    model_name: str
    model_version: str
    id: str = ""
    outputs: list[Tensor] = field(default_factory=list)
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    error: ServerError | None = None
    final: bool = False
    created_ns: int = field(default_factory=time.monotonic_ns)
    result: GenerationOutput | PooledOutput | None = None
    backlog_size: int = 0

    @property
    def size(self) -> int:
        """Approximate memory of the response in bytes."""
        size = 512
        for tensor in self.outputs:
            array = tensor.array
            size += array.nbytes + 128
            if tensor.datatype is DataType.BYTES:
                size += sum(32 + len(element) for element in array.flat)
        return size + getattr(self.result, "size", 0)

    @property
    def flag_only(self) -> bool:
        """Whether the response is empty except for the final flag."""
        return self.final and self.error is None and not self.outputs and self.result is None

    def output(self, name: str) -> Tensor:
        """Return the output tensor with this name. Raises `KeyError`."""
        for tensor in self.outputs:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    def raise_error(self, *, unwrap: bool = False) -> None:
        """Raise the response's error, if any. `unwrap`: if it wraps another exception of the backend, raise that one.

        The response no longer has the error then: its traceback refers to frames, and these to the response.
        """
        if self.error is None:
            return
        error, self.error = self.error, None
        try:
            raise (error.__cause__ if unwrap else None) or error
        finally:
            del error


class ResponseStream(AsyncIterator[InferenceResponse]):
    """Responses of one request in flight: written by a backend, read by one consumer.

    - batch_size: batch size of the request; 1 for models that do not batch
    - timeline: filled in by the backend
    - on_response(stream, response): called with each response before the consumer gets it
    - closed: whether the final response was sent; later responses are dropped
    - failure: why the request counts as failed in the statistics; None if it does not
    - trace: None unless the request is traced
    - ticket: the part of the request in the limits of requests in flight; None if it is not counted
    - backlog: bounds the responses that the consumer has not taken; None for requests with one response. Backends that
      can wait do so before each response: `await stream.backlog.wait()`

    All methods run on the core's event loop; other threads call `admit`, then
    `loop.call_soon_threadsafe(stream.send, …)`.
    The consumer iterates, or registers a callback with `consume`, and calls `cancel()` if it stops early.
    """

    __slots__ = (
        "_drained",
        "_frees",
        "_held",
        "_on_response",
        "_responses",
        "_sink",
        "_waiter",
        "backlog",
        "batch_size",
        "closed",
        "failure",
        "on_close",
        "request",
        "ticket",
        "timeline",
        "trace",
    )

    def __init__(
        self,
        request: InferenceRequest,
        on_response: Callable[[ResponseStream, InferenceResponse], None] | None = None,
        batch_size: int = 1,
        backlog: Backlog | None = None,
    ) -> None:
        self.request = request
        self.backlog = backlog
        self.batch_size = batch_size
        self.timeline = Timeline()
        self.failure: FailureReason | None = None
        self.trace: ModelTrace | None = None
        self.ticket: Ticket | None = None
        self._on_response = on_response
        self._responses: deque[InferenceResponse] | None = None  # created when the first response is buffered
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[InferenceResponse], None] | None = None
        self._frees = True
        self.on_close: Callable[[], None] | None = None
        self._held: list[InferenceResponse] | None = None
        self.closed = False
        self._drained = False

    def send(self, response: InferenceResponse, *, final: bool = False) -> None:
        """Deliver a response; the final one closes the stream."""
        if self.closed:
            return
        response.final = response.final or final
        response.id = response.id or self.request.id
        self.closed = response.final
        if self._on_response is not None:
            self._on_response(self, response)
        if self._held is not None:
            self._held.append(response)
        else:
            self._deliver(response)
        if self.closed:
            self.request.ended()
            if self.backlog is not None:
                self._close_backlog()
            on_close, self.on_close = self.on_close, None
            if on_close is not None:
                on_close()

    @property
    def congested(self) -> bool:
        """Whether the consumer is too slow: responses that can be joined or dropped should be."""
        return self.backlog is not None and self.backlog.full

    def count_sequences(self, count: int) -> None:
        """Count the sequences of a request with tensors, admitted as one. Raises `InvalidArgument`, `Overloaded`."""
        if self.ticket is not None and self.request.payload is None:
            self.ticket.grow(count - self.ticket.sequences)

    def admit(self, response: InferenceResponse) -> None:
        """Wait until the consumer has room for a response that a thread is about to send."""
        backlog = self.backlog
        if backlog is not None and not response.final:
            backlog.wait_in_thread()
            response.backlog_size = response.size
            backlog.add(response.backlog_size)

    def consume(self, sink: Callable[[InferenceResponse], None], *, frees: bool = True) -> None:
        """Call `sink` with each response instead of iterating. Buffered responses are passed to it immediately.

        Avoids a task, and an event-loop iteration per response. `sink` must not raise. With `frees` set to False, the
        caller removes the responses from the backlog itself.
        """
        self._sink = sink
        self._frees = frees
        while self._responses:
            response = self._responses.popleft()
            if response.final:
                self._sink = None  # breaks the reference cycle
            if response.backlog_size and frees:
                self._take(response)
            sink(response)

    def pause(self) -> None:
        """Buffer the responses until `consume` is called again."""
        self._sink = None

    def unobserve(self) -> None:
        """Stop calling `on_response`; used for responses that do not come from the model."""
        self._on_response = None

    def hold(self) -> None:
        """Buffer responses until `release`."""
        self._held = []

    def release(self) -> None:
        """Deliver the buffered responses and stop buffering."""
        held, self._held = self._held or [], None
        for response in held:
            self._deliver(response)

    def finish(self) -> None:
        """Close the stream with an empty final response."""
        self.send(InferenceResponse(self.request.model_name, self.request.model_version, final=True))

    def fail(self, error: ServerError) -> None:
        """Close the stream with an error response."""
        self.send(
            InferenceResponse(self.request.model_name, self.request.model_version, error=error, final=True)
        )

    def fail_with(self, error: Exception) -> None:
        """Close the stream with an exception of the backend; `InvalidParameter` counts as a rejection."""
        # Imported here: processes of Python models import this module in environments without msgspec.
        from neso.generation import InvalidParameter

        if isinstance(error, InvalidParameter):
            self.failure = self.failure or FailureReason.REJECTED
        self.fail(as_server_error(error))

    def reject(self, error: ServerError) -> None:
        """Close the stream with an error, for a request that was not executed."""
        self.failure = self.failure or FailureReason.REJECTED
        self.fail(error)

    def cancel(self) -> None:
        """Cancel the request unless it has ended. Later responses are dropped, except the final one."""
        if not self.closed:
            self._close_backlog()
            self.request.cancel()

    def abort(self, error: ServerError) -> None:
        """Close the stream with an error response and cancel the execution of the request."""
        stop = self.request.begin_cancel()
        self.fail(error)
        for callback in stop:
            callback()

    def begin_generation(self, request: GenerationRequest | None) -> None:
        """Mark this as a text-generation request, which affects its response times and its trace.

        `request` is None if it is split into several engine requests; its generation is then not traced.
        """
        self.timeline.response_start = self.timeline.queue_start
        if self.trace is not None and request is not None:
            self.trace.begin_generation(request)

    def observe_generation(self, output: GenerationOutput) -> None:
        """Record the times of a text-generation output in the timeline and the trace, before it is sent."""
        if not self.timeline.compute_start:
            self.timeline.compute_start = output.scheduled_ns or time.monotonic_ns()
        if self.trace is not None and self.trace.generation is not None:
            self.trace.generation.observe(output)

    def fail_if_queued(self) -> None:
        """Fail a cancelled request whose execution has not started. Afterwards, the backend ends it."""
        if not self.timeline.compute_start:
            self.fail(Cancelled(NEVER_EXECUTED))

    def _deliver(self, response: InferenceResponse) -> None:
        sink = self._sink
        if sink is not None:
            if response.final:
                self._sink = None  # breaks the reference cycle
            if response.backlog_size and self._frees:
                self._take(response)
            sink(response)
            return
        if self._responses is None:
            self._responses = deque()
        if self.backlog is not None and not response.final:
            if self.request.cancelled:
                return
            if self._responses or self._waiter is None:
                self._count(self.backlog, response)
                if self.closed:
                    return
        self._responses.append(response)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _count(self, backlog: Backlog, response: InferenceResponse) -> None:
        """Account for a response that waits for the consumer. Fails and cancels the request if there are too many."""
        if backlog.overflows(response.backlog_size):
            logger.warning(
                "request '%s' of model '%s' is cancelled: its client does not read the responses",
                *(self.request.id, self.request.model_name),
            )
            self.abort(Unavailable("the client does not read the responses, the request is cancelled"))
        elif not response.backlog_size:
            response.backlog_size = response.size
            backlog.add(response.backlog_size)

    def _take(self, response: InferenceResponse) -> None:
        assert self.backlog is not None
        self.backlog.remove(response.backlog_size)
        response.backlog_size = 0

    def _close_backlog(self) -> None:
        """Let waiting producers continue. A step of another request shares the backlog of that request."""
        if self.backlog is not None and self.request.backlog is None:
            self.backlog.close()

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> InferenceResponse:
        while not self._responses:
            if self._drained:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._drained:
            raise StopAsyncIteration
        response = self._responses.popleft()
        if response.backlog_size:
            self._take(response)
        self._drained = response.final
        return response


class SingleResponse:
    """Sink for `ResponseStream.consume` that expects one response and passes it to `done` when the request has ended.

    If there are several responses, `done` gets a response with an `InternalError`.
    """

    __slots__ = ("_count", "_done", "_first")

    def __init__(self, done: Callable[[InferenceResponse], None]) -> None:
        self._done = done
        self._first: InferenceResponse | None = None
        self._count = 0

    def __call__(self, response: InferenceResponse) -> None:
        # An empty final response counts only if it is the only response.
        if self._first is None:
            self._first = response
            self._count = 1
        elif not response.flag_only:
            self._count += 1
        if response.final:
            if self._count > 1:
                self._first.error = InternalError(f"expected a single response, got {self._count}")
            self._done(self._first)
