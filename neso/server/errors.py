"""Errors that reach a client, with Triton's error codes."""

from __future__ import annotations

import copy
from enum import Enum


class ErrorCode(str, Enum):
    """Triton's error codes; each frontend maps them to the status codes of its protocol."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"


class ServerError(Exception):
    """An error with a message for the client and one of Triton's codes.

    `ServerError(message, code)` creates an instance of the subclass for that code.
    """

    code = ErrorCode.INTERNAL

    def __new__(cls, message: str, code: ErrorCode | None = None) -> ServerError:
        if cls is ServerError and code is not None:
            cls = _CLASSES[code]
        return super().__new__(cls, message)

    def __init__(self, message: str, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code

    def with_message(self, message: str) -> ServerError:
        """Return an error of the same class with another message, and without traceback and cause."""
        error = copy.copy(self)
        error.message = message
        error.args = (message,)
        return error


class UnknownError(ServerError):
    code = ErrorCode.UNKNOWN


class InternalError(ServerError):
    code = ErrorCode.INTERNAL


class NotFound(ServerError):
    code = ErrorCode.NOT_FOUND


class InvalidArgument(ServerError):
    code = ErrorCode.INVALID_ARG


class Unavailable(ServerError):
    """`retry_after`: seconds after which the client can try again; 0: not known."""

    code = ErrorCode.UNAVAILABLE
    retry_after = 0


class Overloaded(Unavailable):
    """Too many requests are in flight."""

    retry_after = 1


class LostTensor(Unavailable):
    """An input is on a worker that has ended."""


class Restarting(Unavailable):
    """The process that executes the request has ended and is restarted."""

    retry_after = 1


class Unsupported(ServerError):
    code = ErrorCode.UNSUPPORTED


class AlreadyExists(ServerError):
    code = ErrorCode.ALREADY_EXISTS


class Cancelled(ServerError):
    code = ErrorCode.CANCELLED


_CLASSES: dict[ErrorCode, type[ServerError]] = {
    error.code: error
    for error in (
        UnknownError,
        InternalError,
        NotFound,
        InvalidArgument,
        Unavailable,
        Unsupported,
        AlreadyExists,
        Cancelled,
    )
}

_ALL: tuple[type[ServerError], ...] = (ServerError, *_CLASSES.values(), Overloaded, Restarting)
CLASSES_BY_NAME = {error.__name__: error for error in _ALL}


def as_server_error(error: Exception) -> ServerError:
    """Convert `error` to a `ServerError` whose `__cause__` is the original."""
    if isinstance(error, ServerError):
        return error
    # Imports numpy, which the options of `neso serve` must not import.
    from neso.generation import InvalidParameter

    wrapped = (InvalidArgument if isinstance(error, InvalidParameter) else InternalError)(str(error))
    wrapped.__cause__ = error
    return wrapped
