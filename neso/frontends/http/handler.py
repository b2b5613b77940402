"""What answers requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from neso.frontends.http.deferred import DeferredResponse
from neso.frontends.http.request import Request
from neso.frontends.http.response import Response, StreamingResponse

Answer = Response | StreamingResponse | None
Handler = Callable[[Request], Response | DeferredResponse | Awaitable[Answer]]
"""Answers a request: at once, from a callback, or as a coroutine. None (and a `StreamingResponse`) say that it wrote
by itself.

The coroutine's task is cancelled when the client goes away before the answer is complete.
"""
