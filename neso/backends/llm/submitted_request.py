"""A request of text generation or pooling on its way through the engine, and joined outputs for slow clients."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from neso.backends.llm.metrics import RequestTimer
from neso.engine.client.async_requests import is_slow
from neso.engine.client.output_processor import PooledState, RequestState
from neso.engine.errors import EngineError
from neso.generation import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    InvalidParameter,
    PooledOutput,
    PoolingRequest,
)
from neso.server.errors import Cancelled
from neso.server.inference_response import ResponseStream

if TYPE_CHECKING:
    from neso.backends.llm.engine_backend import EngineBackend

_MAX_JOINED = 64
"""Number of outputs that are joined into one response for a slow client."""


class OutputJoiner:
    """Joins outputs of a request while its client reads slowly. The engine cannot wait for a client."""

    def __init__(self, stream: ResponseStream) -> None:
        self._stream = stream
        self._waiting: list[GenerationOutput] = []

    def add(self, output: GenerationOutput) -> GenerationOutput | None:
        """Return the output to send now, joined with the waiting ones; None to wait for the next one."""
        waiting = self._waiting
        if not waiting and not self._stream.congested:
            return output
        waiting.append(output)
        if not output.finished and len(waiting) < _MAX_JOINED and self._stream.congested:
            return None
        return self.flush()

    def flush(self) -> GenerationOutput | None:
        """Return the waiting outputs, joined; None if there are none."""
        waiting, self._waiting = self._waiting, []
        return GenerationOutput.joined(waiting) if waiting else None


AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest | PoolingRequest)


def with_queue_delay(request: AnyRequest, stream: ResponseStream) -> AnyRequest:
    """Return the request with the queue delay of its client, see `Ticket`."""
    if stream.ticket is None or not stream.ticket.queue_delay:
        return request
    return dataclasses.replace(request, queue_delay=stream.ticket.queue_delay)


class SubmittedRequest:
    """A request in the engine. Its outputs are passed to `deliver`. It ends together with its stream."""

    def __init__(
        self,
        backend: EngineBackend,
        stream: ResponseStream,
        deliver: Callable[[Any], None],
        timer: RequestTimer | None = None,
    ) -> None:
        self._backend = backend
        self._engine = backend.engine
        self._stream = stream
        self._deliver = deliver
        self._timer = timer
        self._joiner = OutputJoiner(stream)
        self._end_reason: FinishReason | None = FinishReason.ABORT
        self._state: RequestState | PooledState | None = None
        stream.on_close = self._on_close

    def submit(self, request: GenerationRequest | PoolingRequest) -> None:
        """Tokenize the request, a long prompt in a thread, and send it to the engine."""
        stream = self._stream
        try:
            if isinstance(request, GenerationRequest):
                stream.count_sequences(request.sampling.num_sequences)
            request = with_queue_delay(request, stream)
            if is_slow(request):
                self._backend.request_tasks.start(stream, self._submit_in_thread(request))
                return
            self._send(self._engine.process(request))
        except Exception as error:
            self._fail(error)

    async def _submit_in_thread(self, request: GenerationRequest | PoolingRequest) -> None:
        try:
            state = await asyncio.to_thread(self._engine.process, request)
            if not self._stream.closed:
                self._send(state)
        except Exception as error:
            self._fail(error)

    def _send(self, state: RequestState | PooledState) -> None:
        self._engine.submit(state, self._receive)
        self._state = state
        self._stream.request.on_cancel(self._cancel)

    def _receive(self, output: GenerationOutput | PooledOutput | Exception) -> None:
        if isinstance(output, Exception):
            self._fail(output)
            return
        try:
            if not isinstance(output, GenerationOutput):
                self._deliver(output)
                return
            if self._timer is not None:
                self._timer.observe(output)
            joined = self._joiner.add(output)
            if joined is not None:
                self._deliver(joined)
        except Exception as error:
            self._fail(error)

    def _cancel(self) -> None:
        self._stream.fail(Cancelled("the request was cancelled"))

    def _fail(self, error: Exception) -> None:
        if isinstance(error, EngineError):
            self._end_reason = FinishReason.ERROR
        elif isinstance(error, InvalidParameter):
            self._end_reason = None
        self._backend.fail(self._stream, error)

    def _on_close(self) -> None:
        if self._state is not None:
            self._engine.abort(self._state)  # no effect on a finished request
        if self._timer is not None:
            self._timer.end(self._end_reason)
