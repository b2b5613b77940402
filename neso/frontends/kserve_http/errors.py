"""Errors of the core as HTTP responses."""

from __future__ import annotations

from neso.frontends.transport.http1 import Response, error_response
from neso.frontends.transport.http1.messages import Headers
from neso.server.errors import ErrorCode, ServerError

_STATUS = {
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNSUPPORTED: 501,
    ErrorCode.UNKNOWN: 400,
    ErrorCode.INVALID_ARG: 400,
    ErrorCode.ALREADY_EXISTS: 400,
    ErrorCode.CANCELLED: 400,
}


def status_of(error: ServerError) -> int:
    """The HTTP status of an error."""
    return _STATUS[error.code]


def respond(error: ServerError, headers: Headers = ()) -> Response:
    """The response that tells a client of an error."""
    return error_response(status_of(error), error.message, headers)
