"""Requests and responses of the in-process API, and their transfer between the caller's thread and the core's loop."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from neso.server.errors import InternalError, InvalidArgument, ServerError, Unavailable
from neso.server.inference_request import InferenceRequest as CoreRequest
from neso.server.inference_request import ParameterValue
from neso.server.inference_response import InferenceResponse as CoreResponse
from neso.server.inprocess.tensor import Device, Tensor, make_input, parse_device
from neso.server.model import Model as CoreModel

if TYPE_CHECKING:
    from neso.server.inprocess.model import Model
    from neso.server.inprocess.server import Server

logger = logging.getLogger(__name__)


class InFlightRequest:
    """Submits a request on the core's loop, where each response is passed to `deliver`; the last one is `final`.

    Drops its references to the request and the responses once it has `ended`, so that a reference to this object does
    not keep tensors alive.
    """

    __slots__ = ("_deliver", "_request", "_server", "ended")

    def __init__(self, server: Server, request: CoreRequest, deliver: Callable[[CoreResponse], None]) -> None:
        self._server = server
        self._request = request
        self._deliver = deliver
        self.ended = False

    def start(self) -> None:
        """Submit the request. Thread-safe. Raises `Unavailable` when the server is not running."""
        self._server.post(self._submit)

    def cancel(self) -> None:
        """Cancel the request. Thread-safe."""
        if self.ended:
            return
        try:
            self._server.post(self._cancel)
        except Unavailable:
            return  # the server has stopped and thereby ended the request

    def fail(self, error: ServerError) -> None:
        """End with an error unless already ended. Called on the core's loop."""
        if not self.ended:
            self._deliver_response(
                CoreResponse(
                    self._request.model_name,
                    self._request.model_version,
                    self._request.id,
                    error=error,
                    final=True,
                )
            )

    def _submit(self) -> None:
        self._server.in_flight.add(self)
        try:
            core = self._server.core
            model = core.model(self._request.model_name, self._request.model_version)
            self._request.trace = trace = core.tracing.sample(model.name) if core.tracing.enabled else None
            try:
                stream = model.submit(self._request)
            finally:
                if trace is not None:
                    trace.end()  # ends when the model's part of the trace ends
        except ServerError as error:
            self.fail(error)
        except Exception as error:
            logger.exception("a request for model '%s' could not be submitted", self._request.model_name)
            self.fail(InternalError(f"the request could not be submitted: {error}"))
        else:
            stream.consume(self._deliver_response)

    def _cancel(self) -> None:
        if not self.ended:
            self._request.cancel()

    def _deliver_response(self, response: CoreResponse) -> None:
        deliver = self._deliver
        if response.final:
            self.ended = True
            self._server.in_flight.discard(self)
            del self._deliver, self._request
        deliver(response)


@dataclass(slots=True)
class InferenceResponse:
    """One response of a model: outputs by name, or an error. `final` marks the last response of a request."""

    model_name: str
    model_version: str
    request_id: str = ""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    error: ServerError | None = None
    final: bool = False

    @classmethod
    def of(cls, response: CoreResponse) -> InferenceResponse:
        """Convert a response of the core."""
        return cls(
            response.model_name,
            response.model_version,
            response.id,
            {tensor.name: Tensor(tensor) for tensor in response.outputs},
            response.parameters,
            response.error,
            response.final,
        )

    @classmethod
    def on(cls, device: Device, response: CoreResponse) -> InferenceResponse:
        """Convert a response of the core and move its outputs to a device. Raises `ServerError`."""
        made = cls.of(response)
        made.outputs = {name: tensor.to_device(device) for name, tensor in made.outputs.items()}
        return made


R = TypeVar("R")


class Responses(Generic[R]):
    """Base class of both iterators: converts responses, raises errors, skips empty final responses.

    `flag_only`: also yield a final response that is empty except for its flag.
    """

    blocks = False
    """Whether `next()` blocks the calling thread."""

    def __init__(self, make: Callable[[CoreResponse], R], raise_on_error: bool, flag_only: bool) -> None:
        self._make = make
        self._raise_on_error = raise_on_error
        self._flag_only = flag_only
        self._ended = False
        self.in_flight: InFlightRequest | None = None

    def deliver(self, response: CoreResponse) -> None:
        """Called on the core's loop with each response."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Cancel the request. The iterator still yields the final response."""
        if self.in_flight is not None:
            self.in_flight.cancel()

    def _next(self, response: CoreResponse) -> R | None:
        """Return the converted response; None at the end. Raises the response's error."""
        self._ended = response.final
        if self._raise_on_error and response.error is not None:
            raise response.error
        if response.flag_only and not self._flag_only:
            return None
        return self._make(response)

    def _copy(self, response: CoreResponse) -> R:
        """Convert a response for a queue; a failed conversion becomes an error response."""
        try:
            return self._make(response)
        except Exception as error:
            failure = error if isinstance(error, ServerError) else InternalError(str(error))
            return self._make(replace(response, outputs=[], error=failure))


class ResponseIterator(Responses[R], Iterator[R]):
    """Iterates over responses as they arrive; blocks until the next response.

    Raises the error of a response unless `raise_on_error` is False. `copies`: a queue that also receives each response,
    including an empty final one.
    """

    blocks = True

    def __init__(
        self,
        make: Callable[[CoreResponse], R],
        *,
        raise_on_error: bool = True,
        flag_only: bool = False,
        copies: object = None,
    ) -> None:
        if copies is not None and not isinstance(copies, queue.SimpleQueue):
            raise InvalidArgument("the response_queue of infer() must be a queue.SimpleQueue")
        super().__init__(make, raise_on_error, flag_only)
        self._responses: queue.SimpleQueue[CoreResponse] = queue.SimpleQueue()
        self._copies: queue.SimpleQueue[R] | None = copies

    def deliver(self, response: CoreResponse) -> None:
        self._responses.put(response)
        if self._copies is not None:
            self._copies.put(self._copy(response))

    def __next__(self) -> R:
        response = None if self._ended else self._next(self._responses.get())
        if response is None:
            raise StopIteration
        return response


class AsyncResponseIterator(Responses[R], AsyncIterator[R]):
    """A `ResponseIterator` for `async for`, on the caller's event loop."""

    def __init__(
        self,
        make: Callable[[CoreResponse], R],
        *,
        raise_on_error: bool = True,
        flag_only: bool = False,
        copies: object = None,
    ) -> None:
        if copies is not None and not (isinstance(copies, asyncio.Queue) and copies.maxsize <= 0):
            raise InvalidArgument(
                "the response_queue of async_infer() must be an asyncio.Queue without maxsize"
            )
        super().__init__(make, raise_on_error, flag_only)
        self._loop = asyncio.get_running_loop()
        self._responses: deque[CoreResponse] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._copies: asyncio.Queue[R] | None = copies

    def deliver(self, response: CoreResponse) -> None:
        # If the caller's loop is closed, cancel the request.
        try:
            self._loop.call_soon_threadsafe(self._arrive, response)
        except RuntimeError:
            self.cancel()

    def _arrive(self, response: CoreResponse) -> None:
        self._responses.append(response)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._copies is not None:
            self._copies.put_nowait(self._copy(response))

    async def __anext__(self) -> R:
        while not self._responses:
            if self._ended:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError("another task awaits the next response already")
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        response = self._next(self._responses.popleft())
        if response is None:
            raise StopAsyncIteration
        return response


@dataclass(eq=False)
class InferenceRequest:
    """A request to a model. It may be modified and sent several times.

    - inputs: by name; arrays, `Tensor`s, DLPack objects, lists or scalars
    - outputs: names of the requested outputs; all if empty
    - timeout: µs, 0 for none
    - classification: output name to the number of top classes to return
    - output_memory_type: target device of the outputs, as for `Tensor.to_device`
    - response_queue: also receives each response, including an empty final one; a `queue.SimpleQueue` for `infer`, an
      `asyncio.Queue` for `async_infer`
    """

    model: Model
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: Iterable[str] = ()
    request_id: str = ""
    parameters: Mapping[str, ParameterValue] | None = None
    priority: int = 0
    timeout: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    classification: Mapping[str, int] | None = None
    output_memory_type: Device | None = None
    response_queue: queue.SimpleQueue[InferenceResponse] | asyncio.Queue[InferenceResponse] | None = None
    _in_flight: list[InFlightRequest] = field(default_factory=list, init=False, repr=False)

    def cancel(self) -> None:
        """Cancel all unfinished submissions of this request. Thread-safe."""
        for submitted in self._in_flight:
            submitted.cancel()

    def track(self, submitted: InFlightRequest) -> None:
        """Register a submission for `cancel`."""
        self._in_flight = [other for other in self._in_flight if not other.ended]
        self._in_flight.append(submitted)

    def response_factory(self) -> Callable[[CoreResponse], InferenceResponse]:
        """Return the converter of responses to this request. Raises `InvalidArgument` for an unknown device."""
        if self.output_memory_type is None:
            return InferenceResponse.of
        parse_device(self.output_memory_type)
        return partial(InferenceResponse.on, self.output_memory_type)

    def to_core(self, model: CoreModel, version: str) -> CoreRequest:
        """Convert to a request of the core. Raises `InvalidArgument` if it does not match the model's signature."""
        specs = model.signature.inputs
        tensors = {
            name: make_input(name, value, specs[name].datatype if name in specs else None)
            for name, value in self.inputs.items()
        }
        request = CoreRequest(
            model.name,
            tensors,
            version,
            self.request_id,
            tuple(self.outputs),
            dict(self.parameters) if self.parameters else {},
            self.priority,
            self.timeout,
            self.sequence_id,
            self.sequence_start,
            self.sequence_end,
        )
        for name, value in request.parameters.items():
            if not isinstance(value, bool | int | float | str):
                raise InvalidArgument(
                    f"parameter '{name}' is {type(value).__name__}, expected a bool, a number or text"
                )
        if self.classification:
            request.classification = dict(self.classification)
        model.signature.validate(request)
        return request
