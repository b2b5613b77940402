"""Traces of the requests that infer over gRPC."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from neso.server.core import Core
from neso.server.tracing import Trace

PROTOCOL = "GRPC"


class HasMetadata(Protocol):
    """The context of a call."""

    def invocation_metadata(self) -> Any: ...


def begin_trace(core: Core, model: str, context: HasMetadata, read_start: int) -> Trace | None:
    """A trace if the request, which began to be read at `read_start` (ns), is to have one. Only while enabled."""
    metadata = dict(context.invocation_metadata() or ())
    trace = core.tracing.sample(model, metadata.get, read_start)
    if trace is not None:
        trace.stamp("GRPC_WAITREAD_START", trace.started)
        trace.stamp("GRPC_WAITREAD_END")
    return trace


def end_with_reply(trace: Trace) -> None:
    """End a trace whose reply gRPC sends when the method has returned, before the loop gets to anything else."""
    trace.sending(PROTOCOL)
    asyncio.get_running_loop().call_soon(trace.sent, PROTOCOL)
