"""A response that comes later, without a task that waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neso.frontends.http.request import Request
    from neso.frontends.http.response import Response


class DeferredResponse:
    """What a handler gives back that will call `send` from a callback: cheaper than a coroutine.

    `on_disconnect` is called when the client goes away before that; what is sent then is dropped.
    """

    __slots__ = ("_request", "on_disconnect")

    def __init__(self, request: Request, on_disconnect: Callable[[], None]) -> None:
        self._request = request
        self.on_disconnect = on_disconnect

    def send(self, response: Response) -> None:
        """Answer, and let the connection go on."""
        self._request.connection.send(self._request, response)

    def fail(self) -> None:
        """Answer that something went wrong here, and log the exception that is being handled."""
        self._request.connection.fail(self._request)
