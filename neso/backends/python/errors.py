"""Errors of Python models: `pb_utils.TritonError` and `pb_utils.TritonModelException`."""

from __future__ import annotations

from neso.server.errors import ErrorCode, ServerError

# Values of TRITONSERVER_Error_Code.
_CODES = {
    0: ErrorCode.UNKNOWN,
    1: ErrorCode.INTERNAL,
    2: ErrorCode.NOT_FOUND,
    3: ErrorCode.INVALID_ARG,
    4: ErrorCode.UNAVAILABLE,
    5: ErrorCode.UNSUPPORTED,
    6: ErrorCode.ALREADY_EXISTS,
    7: ErrorCode.CANCELLED,
}


class TritonError:
    """Error of a response: a message and one of the codes below."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if message is None or code not in _CODES:
            raise TypeError(
                f"TritonError needs a message and a code of TritonError, got {message!r}, {code!r}"
            )
        self._message = str(message)
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message

    @classmethod
    def from_server(cls, error: ServerError) -> TritonError:
        """Convert an error of the server."""
        return cls(error.message, next(number for number, code in _CODES.items() if code is error.code))

    def to_server(self) -> ServerError:
        """Convert to an error of the server."""
        return ServerError(self._message, _CODES.get(self._code, ErrorCode.INTERNAL))


class TritonModelException(Exception):
    """Raised by functions of pb_utils and by models. Fails the requests of the current `execute`."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self._message = message

    def message(self) -> str:
        return self._message


def describe(error: BaseException) -> str:
    """Return the error message for an exception raised by a model."""
    if isinstance(error, TritonModelException | ServerError):
        return str(error)
    return f"{type(error).__name__}: {error}"
