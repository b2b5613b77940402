"""Forwards requests of stateful OpenAI routes, such as stored responses, from front-end processes to the main process.

A front-end process checks the API key, reads the body and forwards the request. The main process applies the rate
limits, executes the request and streams the response back.
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
_FORWARDED_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"),
    *("headers", "client", "server", "path_params", "neso.api_key"),
)
"""Keys of the ASGI scope that are sent to the main process."""
_MAX_QUEUED = 16
"""Messages of a response that may wait for the front-end process; then the application waits."""


def share_routes(routes: Iterable[Route], core: Core, options: OpenAIOptions) -> None:
    """In a front-end process, forward requests of `routes`; in the main process, execute forwarded requests."""
    if isinstance(core, FrontEndCore):
        for route in routes:
            route.app = _ForwardingApp(_key(route), core, options)
    else:
        core.operations[_OPERATION] = _ForwardedRequests(routes).serve


def _key(route: Route) -> tuple[str, str]:
    return min(route.methods or {""}), route.path


class _ForwardingApp:
    """ASGI application of a route in a front-end process: forwards each request to the main process."""

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
        forwarded = {name: scope[name] for name in _FORWARDED_SCOPE if name in scope}
        started = False
        try:
            async with aclosing(
                self._core.remote_stream(_OPERATION, self._key, forwarded, body, REQUEST_ID.get())
            ) as messages:
                async for message in messages:
                    started = True
                    await send(message)
        except ServerError as error:
            if started:
                raise
            unavailable = ApiError(503, error.message)
            await error_response(unavailable, like_triton=self._like_triton)(scope, receive, send)


class _ForwardedRequests:
    """Executes forwarded requests in the main process."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._apps: dict[tuple[str, str], ASGIApp] = {_key(route): route.app for route in routes}

    async def serve(
        self, key: tuple[str, str], scope: dict[str, Any], body: bytes, request_id: str
    ) -> AsyncGenerator[Message, None]:
        """Yield the ASGI messages of the response. Closing the generator signals a client disconnect."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        free_slots = asyncio.Semaphore(_MAX_QUEUED)
        body_messages = [{"type": "http.request", "body": body, "more_body": False}]
        disconnected = asyncio.Event()

        async def receive() -> Message:
            if body_messages:
                return body_messages.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def put(message: Message) -> None:
            await free_slots.acquire()
            messages.put_nowait(message)

        async def run() -> None:
            REQUEST_ID.set(request_id)
            await self._apps[key](scope, receive, put)

        task = asyncio.create_task(run())
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
                free_slots.release()
            await task
        finally:
            disconnected.set()
            task.cancel()
            await asyncio.wait((task,))
