"""HTTP and gRPC statuses of server errors."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from neso.frontends.transport.http1 import Headers, error_body
from neso.server.errors import ErrorCode, InternalError, ServerError, Unavailable

if TYPE_CHECKING:
    from neso.frontends.transport.http1 import Rejection

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


def retry_headers(error: ServerError) -> Headers:
    """Return the header that tells when the client can try again, if that is known."""
    if isinstance(error, Unavailable) and error.retry_after:
        return (("retry-after", str(error.retry_after)),)
    return ()


INPUT_SIZE_HINT = "Use --http-max-input-size to increase the limit."


def rejection_response(rejection: Rejection, max_input_size: int) -> tuple[int, bytes]:
    """Return status and body of an error of the HTTP server. As in Triton, a body that is too large gets status 400."""
    if rejection.status != 413 or not rejection.target.startswith(b"/v2"):
        return rejection.status, error_body(rejection.message)
    size = rejection.headers.get(b"content-length", b"").decode("latin-1") or f"more than {max_input_size}"
    if rejection.headers.get(b"inference-header-content-length") == b"0":
        text = f"Raw input has a byte_size ({size} bytes) that exceeds the maximum allowed value of {max_input_size}"
    else:
        text = f"request JSON size of {size} bytes exceeds the maximum allowed input size of {max_input_size}"
    return 400, error_body(f"{text} bytes. {INPUT_SIZE_HINT}")
