"""Traces of the requests that infer over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from neso.frontends.transport.http1 import HandlerResult, PendingResponse, Request
from neso.server.core import Core
from neso.server.tracing import Trace

Endpoint = Callable[[Request], PendingResponse | Awaitable[HandlerResult]]
AwaitedEndpoint = Callable[[Request], Awaitable[HandlerResult]]

PROTOCOL = "HTTP"


def traced(core: Core, endpoint: Endpoint, awaited: AwaitedEndpoint) -> Endpoint:
    """The endpoint of `/v2/models/{model}/…`, with traces; `request.trace` is the one of a request that has one.

    `awaited` is the same endpoint as a coroutine function: it answers the requests that are traced.
    """
    tracing = core.tracing

    # A plain function, and what the endpoint itself gives: while nothing is traced this costs a call.
    def handle(request: Request) -> PendingResponse | Awaitable[HandlerResult]:
        if not tracing.enabled:
            return endpoint(request)
        model = request.params["model"]
        trace = (
            tracing.sample(model, request.header, request.received_ns) if core.model_ready(model) else None
        )
        return endpoint(request) if trace is None else _traced(awaited, request, trace)

    return handle


async def _traced(endpoint: AwaitedEndpoint, request: Request, trace: Trace) -> HandlerResult:
    trace.stamp("HTTP_RECV_START", trace.started)
    trace.stamp("HTTP_RECV_END")
    request.trace = trace
    try:
        return await endpoint(request)
    finally:
        trace.sending(PROTOCOL)
        # The response is written when this has returned, before the loop gets to anything else.
        asyncio.get_running_loop().call_soon(trace.sent, PROTOCOL)
