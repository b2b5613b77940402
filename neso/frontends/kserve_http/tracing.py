"""Traces of the requests that infer over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from neso.frontends.http import Answer, Request
from neso.server.core import Core
from neso.server.tracing import Trace

Endpoint = Callable[[Request], Awaitable[Answer]]

SEND_START = "HTTP_SEND_START"


class TracedEndpoint:
    """An endpoint `/v2/models/{model}/…` whose requests may be traced; `request.trace` is theirs then.

    Costs a look at one attribute while nothing is traced.
    """

    def __init__(self, core: Core, endpoint: Endpoint) -> None:
        self._core = core
        self._tracing = core.tracing
        self._endpoint = endpoint

    def __call__(self, request: Request) -> Awaitable[Answer]:
        if not self._tracing.enabled:
            return self._endpoint(request)
        model = request.params["model"]
        if not self._core.model_ready(model):
            return self._endpoint(request)
        trace = self._tracing.sample(model, request.header)
        return self._endpoint(request) if trace is None else self._traced(request, trace)

    async def _traced(self, request: Request, trace: Trace) -> Answer:
        trace.stamp("HTTP_RECV_START", request.begun)
        trace.stamp("HTTP_RECV_END")
        request.trace = trace
        try:
            return await self._endpoint(request)
        finally:
            if not trace.has(SEND_START):
                trace.stamp(SEND_START)
            # The response is written when this has returned, before the loop gets to anything else.
            asyncio.get_running_loop().call_soon(_sent, trace)


def _sent(trace: Trace) -> None:
    trace.stamp("HTTP_SEND_END", time.monotonic_ns())
    trace.end()
