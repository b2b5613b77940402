"""HTTP and gRPC statuses of server errors."""

from __future__ import annotations

import logging

from neso.server.errors import ErrorCode, InternalError, ServerError

logger = logging.getLogger(__name__)

# HTTP status and name of the gRPC status code.
STATUSES: dict[ErrorCode, tuple[int, str]] = {
    ErrorCode.UNKNOWN: (400, "UNKNOWN"),
    ErrorCode.INTERNAL: (500, "INTERNAL"),
    ErrorCode.NOT_FOUND: (404, "NOT_FOUND"),
    ErrorCode.INVALID_ARG: (400, "INVALID_ARGUMENT"),
    ErrorCode.UNAVAILABLE: (503, "UNAVAILABLE"),
    ErrorCode.UNSUPPORTED: (501, "UNIMPLEMENTED"),
    ErrorCode.ALREADY_EXISTS: (400, "ALREADY_EXISTS"),
    ErrorCode.CANCELLED: (400, "CANCELLED"),
}


def as_server_error(error: BaseException, operation: str) -> ServerError:
    """Return a `ServerError` unchanged; log any other error and wrap it in an INTERNAL error."""
    if isinstance(error, ServerError):
        return error
    logger.error("unexpected error in %s", operation, exc_info=error)
    return InternalError(f"unexpected error in {operation}: {type(error).__name__}: {error}")
