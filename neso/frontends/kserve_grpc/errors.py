"""The server's errors as gRPC statuses."""

from __future__ import annotations

import logging

import grpc

from neso.server.errors import ErrorCode, InternalError, ServerError

log = logging.getLogger(__name__)

STATUS = {
    ErrorCode.UNKNOWN: grpc.StatusCode.UNKNOWN,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
}


def as_server_error(error: BaseException, doing: str) -> ServerError:
    """`error` if it is fit for a client; else it is logged, and an INTERNAL error says what it was."""
    if isinstance(error, ServerError):
        return error
    log.error("unexpected error in %s", doing, exc_info=error)
    return InternalError(f"unexpected error in {doing}: {type(error).__name__}: {error}")
