"""The responses of a request, for a thread that waits and for an event loop that awaits."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from neso.server.errors import InternalError, InvalidArgument, ServerError
from neso.server.inference_response import InferenceResponse as CoreResponse
from neso.server.inprocess.flight import Flight

R = TypeVar("R")


class Responses(Generic[R]):
    """What both iterators share: how a response is made of the core's, and when it is raised or left out.

    `flag_only`: whether a final response that carries nothing but the flag is given as well.
    """

    waits = False
    """Whether the thread that asks for the next response waits for it."""

    def __init__(self, make: Callable[[CoreResponse], R], raise_on_error: bool, flag_only: bool) -> None:
        self._make = make
        self._raise_on_error = raise_on_error
        self._flag_only = flag_only
        self._ended = False
        self.flight: Flight | None = None

    def deliver(self, response: CoreResponse) -> None:
        """Called on the core's loop with each response."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Tell the model that nobody wants the rest. The iterator still ends by itself."""
        if self.flight is not None:
            self.flight.cancel()

    def _next(self, response: CoreResponse) -> R | None:
        """The next response, or None for the end. Raises its error."""
        self._ended = response.final
        if self._raise_on_error and response.error is not None:
            raise response.error
        if response.flag_only and not self._flag_only:
            return None
        return self._make(response)

    def _copy(self, response: CoreResponse) -> R:
        """For a queue, whose reader cannot be raised what goes wrong."""
        try:
            return self._make(response)
        except Exception as error:
            failure = error if isinstance(error, ServerError) else InternalError(str(error))
            return self._make(replace(response, outputs=[], error=failure))


class ResponseIterator(Responses[R], Iterator[R]):
    """Responses as they come; they gather while the caller does something else.

    Raises the error of a response, unless the request was sent with `raise_on_error=False`.
    `copies` gets each response too, the flag at the end included.
    """

    waits = True

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
    """A `ResponseIterator` for `async for`, in whatever event loop the caller has."""

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
        # The caller's loop may be gone by then: nobody reads the rest.
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
