"""The errors that reach a client, by Triton's codes."""

from __future__ import annotations

from enum import Enum


class ErrorCode(str, Enum):
    """Triton's error codes; each front end maps them to a status of its protocol."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"


class ServerError(Exception):
    """An error with a message fit for the client and one of Triton's codes.

    `ServerError(message, code)` makes an instance of the class of that code, so that handlers go by class.
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


class UnknownError(ServerError):
    code = ErrorCode.UNKNOWN


class InternalError(ServerError):
    code = ErrorCode.INTERNAL


class NotFound(ServerError):
    code = ErrorCode.NOT_FOUND


class InvalidArgument(ServerError):
    code = ErrorCode.INVALID_ARG


class Unavailable(ServerError):
    code = ErrorCode.UNAVAILABLE


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
