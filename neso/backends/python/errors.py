"""Errors of Python models: `pb_utils.TritonError` and `pb_utils.TritonModelException`."""

from __future__ import annotations

import logging
import sys

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
_NUMBERS = {code: number for number, code in _CODES.items()}


logger = logging.getLogger(__name__)

_TRACEBACK = "Traceback (most recent call last):"


class _Message(str):
    """The message of a called model's error, with the error."""

    __slots__ = ("error",)
    error: ServerError


class TritonError:
    """Error of a response: a message and one of the codes below.

    Some models send a traceback. It is logged; the message is that of the exception, because a traceback shows the
    server's paths. If the exception reports the error of a called model, the code is that error's.

    An error of a called model that is passed on keeps its class, for example "retry after a second".
    """

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
        self._message = message if isinstance(message, str) else str(message)
        self._code = code
        self._source: ServerError | None = None
        if self._message.startswith(_TRACEBACK):
            self._drop_traceback()

    def _drop_traceback(self) -> None:
        logger.error("a model sent an error with a traceback: %s", self._message)
        error = sys.exc_info()[1]
        if error is None:
            self._message = self._message.rstrip().rpartition("\n")[2].strip()
            return
        self._message = describe(error)
        of_called_model = error.args[0] if error.args else None
        if isinstance(of_called_model, _Message) and self._code == self.INTERNAL:
            self._source = of_called_model.error
            self._code = _NUMBERS[self._source.code]

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message

    @classmethod
    def from_server(cls, error: ServerError) -> TritonError:
        """Convert an error of the server."""
        source = error.with_message(error.message)
        message = _Message(source.message)
        message.error = source
        converted = cls(message, _NUMBERS[source.code])
        converted._source = source
        return converted

    def to_server(self) -> ServerError:
        """Convert to an error of the server."""
        if self._source is not None:
            return self._source.with_message(self._message)
        return ServerError(self._message, _CODES[self._code])


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
