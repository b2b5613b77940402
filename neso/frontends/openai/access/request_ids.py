"""Gives every request an id that its response, and the log, tell."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neso.frontends.openai.access.authentication import key_of
from neso.frontends.openai.request_id import REQUEST_ID

logger = logging.getLogger(__name__)

_HEADER = b"x-request-id"
_ACCEPTABLE = re.compile(rb"[\x21-\x7e]{1,512}")


class RequestIds:
    """ASGI middleware: the response has the request's `x-request-id`, or one that is made here.

    At verbose log level 1 it writes a line for each request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        request_id = given if _ACCEPTABLE.fullmatch(given) else b"req_" + uuid.uuid4().hex.encode()
        status = 0
        started = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (_HEADER, request_id)]}
            await send(message)

        token = REQUEST_ID.set(request_id.decode())
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            REQUEST_ID.reset(token)
            if logger.isEnabledFor(logging.DEBUG):
                _log(scope, status, time.perf_counter() - started, request_id.decode())


def _log(scope: Scope, status: int, seconds: float, request_id: str) -> None:
    key = key_of(scope)
    logger.debug(
        "%s %s: %s in %.3f s%s, request %s",
        *(scope["method"], scope["path"], status or "no answer", seconds),
        *("" if key is None else f", key '{key.name}'", request_id),
        extra={"request_id": request_id},
    )
