"""Business logic scripting: a Python model calls other models of the server."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from functools import partial

from neso.backends.python.errors import TritonError
from neso.backends.python.loop_calls import running_loop_calls
from neso.backends.python.response import InferenceResponse
from neso.backends.python.server_access import ServerAccess
from neso.backends.python.tensor import Tensor
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse as ServerResponse


class ResponseIterator:
    """The responses of a call that is waited for, as they come. The last one may be empty: the final flag only."""

    def __init__(self, access: ServerAccess, request: InferenceRequest, decoupled: bool) -> None:
        self._responses: queue.SimpleQueue[ServerResponse] = queue.SimpleQueue()
        self._call = access.call(request, decoupled, self._responses.put)
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
        self._call = access.call(
            request, decoupled, partial(running_loop_calls().post, self._responses.put_nowait)
        )
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
