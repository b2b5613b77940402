"""The responses of a request, for a thread that waits and for an event loop that awaits."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from neso.server.errors import ServerError
from neso.server.inference_request import ParameterValue
from neso.server.inference_response import InferenceResponse
from neso.server.inprocess.tensor import Tensor


@dataclass(slots=True)
class Response:
    """One response of a model: outputs by name, or an error."""

    model_name: str
    model_version: str
    request_id: str = ""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    error: ServerError | None = None
    final: bool = False

    @classmethod
    def of(cls, response: InferenceResponse) -> Response:
        """From the core's response."""
        return cls(
            response.model_name,
            response.model_version,
            response.id,
            {tensor.name: Tensor(tensor) for tensor in response.outputs},
            response.parameters,
            response.error,
            response.final,
        )


Item = Response | BaseException | None
"""What reaches an iterator: a response, why there will be none, or the end."""


class ResponseIterator(Iterator[Response]):
    """Responses as they come; they gather while the caller does something else.

    Raises the error of a response, unless the request was made with `raise_on_error=False`.
    """

    def __init__(self, cancel: Callable[[], None], raise_on_error: bool) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._cancel = cancel
        self._raise_on_error = raise_on_error
        self._ended = False

    @property
    def deliver(self) -> Callable[[Item], None]:
        """Called by the server's loop."""
        return self._items.put

    def cancel(self) -> None:
        """Tell the model that nobody wants the rest. The iterator still ends by itself."""
        self._cancel()

    def __next__(self) -> Response:
        if self._ended:
            raise StopIteration
        item = self._items.get()
        if isinstance(item, Response):
            return _checked(item, self._raise_on_error)
        self._ended = True
        if item is None:
            raise StopIteration
        raise item


class AsyncResponseIterator(AsyncIterator[Response]):
    """A `ResponseIterator` for `async for`, in whatever event loop the caller has."""

    def __init__(self, cancel: Callable[[], None], raise_on_error: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._cancel = cancel
        self._raise_on_error = raise_on_error
        self._ended = False

    def deliver(self, item: Item) -> None:
        """Called by the server's loop. The caller's loop may be gone by then: the request is cancelled."""
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:
            self._cancel()

    def cancel(self) -> None:
        """Tell the model that nobody wants the rest. The iterator still ends by itself."""
        self._cancel()

    async def __anext__(self) -> Response:
        if self._ended:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, Response):
            return _checked(item, self._raise_on_error)
        self._ended = True
        if item is None:
            raise StopAsyncIteration
        raise item


def _checked(response: Response, raise_on_error: bool) -> Response:
    if raise_on_error and response.error is not None:
        raise response.error
    return response
