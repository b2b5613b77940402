"""Inference responses and the stream that carries them from a backend to the consumer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from neso.server.errors import Cancelled, InternalError, ServerError
from neso.server.inference_request import InferenceRequest, ParameterValue
from neso.server.statistics import FailureReason, Timeline
from neso.server.tensor import Tensor

if TYPE_CHECKING:
    from neso.server.tracing import ModelTrace

NEVER_EXECUTED = "the request was cancelled before it was executed"


@dataclass(slots=True, eq=False)
class InferenceResponse:
    """One response. The last of a request has `final` set; it may be the flag only, without outputs.

    Either `error` is set, or the outputs are good. `made`: when it came into being, in ns of the monotonic clock.
    """

    model_name: str
    model_version: str
    id: str = ""
    outputs: list[Tensor] = field(default_factory=list)
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    error: ServerError | None = None
    final: bool = False
    made: int = field(default_factory=time.monotonic_ns)

    @property
    def flag_only(self) -> bool:
        """Whether this says no more than that the request has ended."""
        return self.final and self.error is None and not self.outputs

    def output(self, name: str) -> Tensor:
        """The output of that name. Raises `KeyError`."""
        for tensor in self.outputs:
            if tensor.name == name:
                return tensor
        raise KeyError(name)


class ResponseStream(AsyncIterator[InferenceResponse]):
    """The responses of one request in flight: a backend writes, one consumer iterates.

    `batch_size` is that of the request, 1 for models that do not batch. A backend notes on `timeline` when it
    began to compute and so on. `on_response(stream, response)` sees each response before the consumer does;
    `failure` is why the request counts as failed, None while it does not. `trace`: None unless it is traced.

    All methods belong to the core's event loop; a thread uses `loop.call_soon_threadsafe(stream.send, …)`.
    Iteration ends after the response with `final`; a consumer may have its responses by `consume` instead. One that
    stops early calls `cancel()`.
    """

    __slots__ = (
        "_closed",
        "_drained",
        "_held",
        "_on_response",
        "_responses",
        "_sink",
        "_waiter",
        "batch_size",
        "failure",
        "on_close",
        "request",
        "timeline",
        "trace",
    )

    def __init__(
        self,
        request: InferenceRequest,
        on_response: Callable[[ResponseStream, InferenceResponse], None] | None = None,
        batch_size: int = 1,
    ) -> None:
        self.request = request
        self.batch_size = batch_size
        self.timeline = Timeline()
        self.failure: FailureReason | None = None
        self.trace: ModelTrace | None = None
        self._on_response = on_response
        self._responses: deque[InferenceResponse] | None = None  # made when one has to wait for its consumer
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[InferenceResponse], None] | None = None
        self.on_close: Callable[[], None] | None = None
        self._held: list[InferenceResponse] | None = None
        self._closed = False
        self._drained = False

    @property
    def closed(self) -> bool:
        """Whether the final response was sent; later ones are dropped."""
        return self._closed

    def send(self, response: InferenceResponse, *, final: bool = False) -> None:
        """Deliver a response; the one that is final closes the stream."""
        if self._closed:
            return
        response.final = response.final or final
        response.id = response.id or self.request.id
        self._closed = response.final
        if self._on_response is not None:
            self._on_response(self, response)
        if self._held is not None:
            self._held.append(response)
        else:
            self._deliver(response)
        if self._closed:
            self.request.ended()
            if self.on_close is not None:
                self.on_close()

    def consume(self, sink: Callable[[InferenceResponse], None]) -> None:
        """Give each response to `sink` as it comes, at once those that have come. It must not raise.

        In place of iterating: no task, and no round of the event loop for each response.
        """
        self._sink = sink
        while self._responses:
            sink(self._responses.popleft())

    def unobserve(self) -> None:
        """Let nobody but the consumer see what comes from now on: an answer that the model did not give."""
        self._on_response = None

    def hold(self) -> None:
        """Keep responses from the consumer until `release`."""
        self._held = []

    def release(self) -> None:
        """Deliver what was held, and all that comes from now on."""
        held, self._held = self._held or [], None
        for response in held:
            self._deliver(response)

    def finish(self) -> None:
        """Close the stream with a response that is the final flag only."""
        self.send(InferenceResponse(self.request.model_name, self.request.model_version, final=True))

    def fail(self, error: ServerError) -> None:
        """Close the stream with an error."""
        self.send(
            InferenceResponse(self.request.model_name, self.request.model_version, error=error, final=True)
        )

    def reject(self, error: ServerError) -> None:
        """Close the stream with an error, for a request that was never executed."""
        self.failure = self.failure or FailureReason.REJECTED
        self.fail(error)

    def fail_if_cancelled_while_waiting(self) -> None:
        """Answer a cancellation at once until the execution begins; then the backend may notice, and answers."""
        self.request.on_cancel(self._leave_queue)

    def cancel(self) -> None:
        """Tell the backend that nobody wants the rest."""
        if not self._closed:
            self.request.cancel()

    def _leave_queue(self) -> None:
        if not self.timeline.compute_start:
            self.fail(Cancelled(NEVER_EXECUTED))

    def _deliver(self, response: InferenceResponse) -> None:
        sink = self._sink
        if sink is not None:
            if response.final:
                self._sink = None  # it may know this stream: neither shall keep the other
            sink(response)
            return
        if self._responses is None:
            self._responses = deque()
        self._responses.append(response)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

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
        self._drained = response.final
        return response


class SingleResponse:
    """What a `ResponseStream` gives its responses to: calls `done` once, when the request has ended.

    `done` gets the response, or if there were more of them a response with an `InternalError`.
    """

    __slots__ = ("_count", "_done", "_first")

    def __init__(self, done: Callable[[InferenceResponse], None]) -> None:
        self._done = done
        self._first: InferenceResponse | None = None
        self._count = 0

    def __call__(self, response: InferenceResponse) -> None:
        # One without outputs is an answer too, unless it only says that there was one.
        if self._first is None:
            self._first = response
            self._count = 1
        elif not response.flag_only:
            self._count += 1
        if response.final:
            if self._count > 1:
                self._first.error = InternalError(f"expected a single response, got {self._count}")
            self._done(self._first)
