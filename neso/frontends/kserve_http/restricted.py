"""Routes that are answered only with the header that their group requires."""

from __future__ import annotations

from collections.abc import Awaitable

from neso.frontends.security import RequiredHeader
from neso.frontends.transport.http1 import (
    Handler,
    HandlerResult,
    PendingResponse,
    Request,
    Response,
    error_response,
)

_BY_LAST_SEGMENT = {
    "live": "health",
    "ready": "health",
    "config": "model-config",
    "stats": "statistics",
    "infer": "inference",
    "generate": "inference",
    "generate_stream": "inference",
    "setting": "trace",
    "logging": "logging",
}


def group_of(pattern: str) -> str:
    """The group that a route's pattern belongs to."""
    first, last = pattern.split("/")[2:3], pattern.rsplit("/", 1)[-1]
    if first == ["repository"]:
        return "model-repository"
    if first in (["systemsharedmemory"], ["cudasharedmemory"]):
        return "shared-memory"
    return _BY_LAST_SEGMENT.get(last, "metadata")


def restrict(handler: Handler, required: RequiredHeader) -> Handler:
    """`handler`, for those who have the header; 403 for the others."""
    name = required.name.encode()
    message = f"This API is restricted, expecting header '{required.name}'"

    def restricted(request: Request) -> Response | PendingResponse | Awaitable[HandlerResult]:
        if not required.matches(request.headers.get(name)):
            return error_response(403, message)
        return handler(request)

    return restricted
