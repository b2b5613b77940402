"""Errors in OpenAI's shape, whatever raised them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

import orjson

from neso.engine.errors import EngineDead
from neso.generation import InvalidParameter, PromptTooLong
from neso.server.errors import ErrorCode, ServerError

if TYPE_CHECKING:
    from pydantic import ValidationError

logger = logging.getLogger(__name__)


REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""As its client knows it; "" outside of a request."""


_STATUS = {
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.INVALID_ARG: 400,
    ErrorCode.UNSUPPORTED: 400,
    ErrorCode.ALREADY_EXISTS: 409,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.CANCELLED: 499,
}
_TYPE = {400: "invalid_request_error", 404: "not_found_error", 503: "service_unavailable_error"}


class ApiError(Exception):
    """An error as the client is to see it: an HTTP status and the fields of OpenAI's error object."""

    def __init__(
        self, status: int, message: str, *, type: str = "", param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _type_of(status)
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """The JSON text that both a response and an event of a stream carry."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """A 400 about one field of the request."""
    return ApiError(400, message, param=param, code=code)


def renamed(error: InvalidParameter, client_names: Mapping[str, str]) -> ApiError:
    """A 400 about a field, as the client knows it."""
    name = client_names.get(error.field, error.field)
    return invalid(name, f"Invalid '{name}': {error.message}")


def too_long(param: str, error: PromptTooLong) -> ApiError:
    """A 400 about the field that a prompt comes from."""
    return invalid(
        param,
        f"This model's maximum context length is {error.max_model_len} tokens, of which at least one must be left for "
        f"the output; '{param}' is {error.num_tokens} tokens long.",
        "context_length_exceeded",
    )


def to_api_error(error: Exception) -> ApiError:
    """What to tell the client about `error`. One that nobody foresaw is logged, and told without its text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidParameter):
        return renamed(error, {})
    if isinstance(error, EngineDead):
        return ApiError(503, str(error) or "The model's engine has ended.")
    if isinstance(error, ServerError):
        status = _STATUS.get(error.code, 500)
        if status == 500:
            logger.error("a request failed: %s", error.message, exc_info=error, extra=_fields())
        return ApiError(status, error.message)
    logger.error("a request failed", exc_info=error, extra=_fields())
    return ApiError(500, "The server had an error while processing the request.")


def refusal_body(status: int, message: str) -> bytes:
    """What the HTTP server answers to what it does not pass on: requests that are broken or too large."""
    code = {413: "content_too_large"}.get(status)
    hint = ", which --http-max-input-size sets" if status == 413 else ""
    return ApiError(status, f"{message[:1].upper()}{message[1:]}{hint}.", code=code).body()


def _fields() -> dict[str, str]:
    """What the log is told of the request."""
    return {"request_id": REQUEST_ID.get()}


def _type_of(status: int) -> str:
    return _TYPE.get(status, "invalid_request_error" if status < 500 else "server_error")


def validation_error(error: ValidationError) -> ApiError:
    """The first of pydantic's errors, as a 400 that names the field as the client wrote it."""
    errors = error.errors(include_url=False, include_input=False)
    first = errors[0]
    # Of a union's branches the one that came furthest is what the client meant.
    of_same_field = [entry for entry in errors if entry["loc"][:1] == first["loc"][:1]]
    first = max(of_same_field, key=lambda entry: len(entry["loc"]))
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['ctx']['error']}")
    location = first["loc"]
    if location and location[-1] == "[key]":  # the key itself is at fault: it belongs to the mapping
        location = location[:-2]
    where = [part for part in location if isinstance(part, int) or _names_a_field(part)]
    if not where:
        return ApiError(400, f"Invalid request: {first['msg']}")
    path = str(where[0]) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where[1:])
    code = "missing_required_parameter" if first["type"] == "missing" else None
    return invalid(path, f"Invalid '{path}': {first['msg']}", code)


def _names_a_field(part: str) -> bool:
    """Whether a part of pydantic's path is a field, not the branch of a union that it tried."""
    return part.isidentifier() and part[0].islower() and part not in ("str", "int", "float", "bool")
