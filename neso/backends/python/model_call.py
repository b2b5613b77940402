"""Business logic scripting: a Python model calls other models of the server."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from neso.backends.python.errors import TritonError, TritonModelException
from neso.backends.python.response import InferenceResponse
from neso.backends.python.server_access import ServerAccess
from neso.backends.python.tensor import Tensor
from neso.server.errors import ServerError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse as ServerResponse
from neso.server.inference_response import ResponseStream

if TYPE_CHECKING:
    from neso.server.model import Model

Deliver = Callable[[ServerResponse], None]


class ModelCall:
    """One request to another model. `deliver` gets each response on the core's loop; the last one is final."""

    def __init__(
        self, access: ServerAccess, request: InferenceRequest, decoupled: bool, deliver: Deliver
    ) -> None:
        self._access, self._request, self._decoupled, self._deliver = access, request, decoupled, deliver
        self._stream: ResponseStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False
        try:
            access.loop.call_soon_threadsafe(self._start)
        except RuntimeError as error:
            raise TritonModelException(f"the server has ended: {error}") from None

    def cancel(self) -> None:
        """Tell the other model that nobody wants the rest; from any thread."""
        self._access.loop.call_soon_threadsafe(self._cancel)

    def _start(self) -> None:
        try:
            model: Model = self._access.core.model(self._request.model_name, self._request.model_version)
            if model.decoupled and not self._decoupled:
                raise ServerError(
                    f"Model {model.name} is using the decoupled. The current BLS request call doesn't support models "
                    "using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
                    "'async_exec' calls for decoupled models.'"
                )
            self._stream = model.submit(self._request)
        except ServerError as error:
            self._deliver(ServerResponse("", "", error=error, final=True))
            return
        if self._cancelled:
            self._stream.cancel()
        self._task = asyncio.get_running_loop().create_task(self._pump(self._stream))

    async def _pump(self, stream: ResponseStream) -> None:
        async for response in stream:
            self._deliver(response)

    def _cancel(self) -> None:
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()


class ResponseIterator:
    """The responses of a call that is waited for, as they come. The last one may be empty: the final flag only."""

    def __init__(self, access: ServerAccess, request: InferenceRequest, decoupled: bool) -> None:
        self._responses: queue.SimpleQueue[ServerResponse] = queue.SimpleQueue()
        self._call = ModelCall(access, request, decoupled, self._responses.put)
        self._ended = False

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        if self._ended:
            raise StopIteration
        response = self._responses.get()
        self._ended = response.final
        return from_server(response)

    def cancel(self) -> None:
        self._call.cancel()


class AsyncResponseIterator:
    """The responses of an awaited call, on the event loop where it was made."""

    def __init__(self, access: ServerAccess, request: InferenceRequest, decoupled: bool) -> None:
        self._responses: asyncio.Queue[ServerResponse] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(response: ServerResponse) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._responses.put_nowait, response)

        self._call = ModelCall(access, request, decoupled, deliver)
        self._ended = False

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._ended:
            raise StopAsyncIteration
        response = await self._responses.get()
        self._ended = response.final
        return from_server(response)

    def cancel(self) -> None:
        self._call.cancel()


def from_server(response: ServerResponse) -> InferenceResponse:
    """What another model answered, as models see it."""
    error = None if response.error is None else TritonError.from_server(response.error)
    return InferenceResponse(
        [Tensor.from_server(tensor) for tensor in response.outputs], error, dict(response.parameters)
    )
