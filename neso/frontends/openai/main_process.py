"""Operations that only the main process of several server processes executes, because it has their state.

A front-end process checks access, reads the body and forwards the request; the main process counts it against the rate
limits, executes it and sends the response back as it arises.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neso.frontends.openai.errors import REQUEST_ID, ApiError
from neso.frontends.openai.routing import ClientDisconnected, error_response, read_body, while_connected
from neso.frontends.openai_options import OpenAIOptions
from neso.server.errors import ServerError
from neso.server.processes.front_end_core import FrontEndCore

if TYPE_CHECKING:
    from neso.server.core import Core

_OPERATION = "openai"
_PASSED = (
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
)
_ALSO_PASSED = ("headers", "client", "server", "path_params", "neso.api_key")
"""Members of the ASGI scope that the main process gets."""
_MAX_WAITING = 16
"""Messages of a response that wait to be sent to the front-end process."""


def share_routes(routes: Iterable[Route], core: Core, options: OpenAIOptions) -> None:
    """Forward the requests of `routes` in a front-end process; accept them in the main process."""
    if isinstance(core, FrontEndCore):
        for route in routes:
            route.app = _Forwarded(_key(route), core, options)
    else:
        core.operations[_OPERATION] = _Accepted(routes).serve


def _key(route: Route) -> tuple[str, str]:
    return min(route.methods or {""}), route.path


class _Forwarded:
    """The ASGI application of a route in a front-end process."""

    def __init__(self, key: tuple[str, str], core: FrontEndCore, options: OpenAIOptions) -> None:
        self._key = key
        self._core = core
        self._max_body_size = options.max_body_size
        self._like_triton = options.triton_compatibility

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, self._max_body_size)
        except ClientDisconnected:
            return
        except ApiError as error:
            await error_response(error, like_triton=self._like_triton)(scope, receive, send)
            return
        await while_connected(receive, self._forward(scope, body, receive, send))

    async def _forward(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        passed = {name: scope[name] for name in (*_PASSED, *_ALSO_PASSED) if name in scope}
        started = False
        try:
            async with aclosing(
                self._core.remote_stream(_OPERATION, self._key, passed, body, REQUEST_ID.get())
            ) as messages:
                async for message in messages:
                    started = True
                    await send(message)
        except ServerError as error:
            if started:
                raise
            unavailable = ApiError(503, error.message)
            await error_response(unavailable, like_triton=self._like_triton)(scope, receive, send)


class _Accepted:
    """Serves the forwarded requests in the main process."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._apps: dict[tuple[str, str], ASGIApp] = {_key(route): route.app for route in routes}

    async def serve(
        self, key: tuple[str, str], scope: dict[str, Any], body: bytes, request_id: str
    ) -> AsyncGenerator[Message, None]:
        """Yield the ASGI messages of the response. Closing the generator is a disconnect of the client."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        room = asyncio.Semaphore(_MAX_WAITING)
        body_messages = [{"type": "http.request", "body": body, "more_body": False}]
        disconnected = asyncio.Event()

        async def receive() -> Message:
            if body_messages:
                return body_messages.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def put(message: Message) -> None:
            await room.acquire()
            messages.put_nowait(message)

        async def run() -> None:
            REQUEST_ID.set(request_id)
            await self._apps[key](scope, receive, put)

        task = asyncio.create_task(run())
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
                room.release()
            await task
        finally:
            disconnected.set()
            task.cancel()
            await asyncio.wait((task,))
