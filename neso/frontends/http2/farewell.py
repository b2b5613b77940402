"""How a connection ends without the loss of a request (RFC 9113, section 6.8).

A client may have sent requests that have not come yet. So it is told first that the connection will end, and asked to
answer a PING; what came before the answer is served. Then it is told which stream was the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from neso.frontends.http2.frames import MAX_WINDOW, ErrorCode, goaway_frame, ping_frame
from neso.frontends.http2.output import Output

_PAYLOAD = b"farewell"
_PATIENCE = 1.0  # seconds


class Farewell:
    """`on_last_call` is called when no more streams are to be taken."""

    def __init__(self, output: Output, on_last_call: Callable[[], None]) -> None:
        self._output = output
        self._on_last_call = on_last_call
        self._timer: asyncio.TimerHandle | None = None
        self.begun = False

    def begin(self) -> None:
        """Tell the client."""
        if self.begun:
            return
        self.begun = True
        self._output.write(goaway_frame(MAX_WINDOW, ErrorCode.NO_ERROR) + ping_frame(_PAYLOAD))
        self._timer = asyncio.get_running_loop().call_later(_PATIENCE, self._last_call)

    def answered(self, payload: bytes) -> None:
        """The client has answered a PING."""
        if payload == _PAYLOAD and self._timer is not None:
            self._last_call()

    def stop(self) -> None:
        """The connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _last_call(self) -> None:
        self.stop()
        self._on_last_call()
