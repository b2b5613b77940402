"""Errors in OpenAI's format."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import orjson

from neso.generation import InvalidParameter, PromptTooLong
from neso.server.errors import ErrorCode, Overloaded, ServerError, Unavailable

if TYPE_CHECKING:
    from pydantic import ValidationError

    from neso.frontends.transport.http1 import Rejection

logger = logging.getLogger(__name__)

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""`x-request-id` of the current request; "" outside a request."""

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
    """An error response: HTTP status, and the fields of OpenAI's error object.

    `validation`: pydantic's errors of an invalid body. `retry_after`: seconds, 0 for none.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "",
        param: str | None = None,
        code: str | None = None,
        validation: Sequence[Mapping[str, Any]] = (),
        retry_after: int = 0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _TYPE.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.validation = validation
        self.retry_after = retry_after

    def body(self) -> bytes:
        """Return the JSON body of an error response, which is also the data of an error event in a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


class UnknownModel(ApiError):
    """An error 404 for a model that does not exist or is not loaded, or for an adapter that its model does not have."""

    def __init__(self, name: str, problem: str, triton_message: str = "") -> None:
        super().__init__(404, f"The model '{name}' {problem}.", param="model", code="model_not_found")
        self.triton_message = triton_message or f"Unknown model: {name}"


def triton_error(error: ApiError) -> tuple[int, bytes]:
    """Return the status and the body of an error in the format of Triton's OpenAI frontend.

    Like FastAPI, it answers an invalid body with 422 and pydantic's errors.
    """
    if error.validation:
        details = [{**entry, "loc": ["body", *entry["loc"]]} for entry in error.validation]
        return 422, orjson.dumps({"detail": details}, default=str)
    message = error.triton_message if isinstance(error, UnknownModel) else error.message
    return error.status, orjson.dumps({"detail": message})


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """Create an error 400 for the request field `param`."""
    return ApiError(400, message, param=param, code=code)


def invalid_parameter(error: InvalidParameter, client_names: Mapping[str, str]) -> ApiError:
    """Create an error 400 for `error`; `client_names` maps engine fields to request fields with other names."""
    name = client_names.get(error.field, error.field)
    return invalid(name, f"Invalid '{name}': {error.message}")


def prompt_too_long(param: str, error: PromptTooLong) -> ApiError:
    """Create an error 400 `context_length_exceeded` for the request field of the prompt."""
    return invalid(
        param,
        f"This model's maximum context length is {error.max_model_len} tokens, of which at least one must be left for "
        f"the output; '{param}' is {error.length} tokens long.",
        "context_length_exceeded",
    )


def to_api_error(error: Exception) -> ApiError:
    """Convert any exception to an error response. Unexpected exceptions are logged, and their text is not sent."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidParameter):
        return invalid_parameter(error, {})
    if isinstance(error, Overloaded):
        return ApiError(
            429, error.message, type="requests", code="rate_limit_exceeded", retry_after=error.retry_after
        )
    log_fields = {"request_id": REQUEST_ID.get()}
    if isinstance(error, ServerError):
        status = _STATUS.get(error.code, 500)
        if status == 500:
            logger.error("a request failed: %s", error.message, exc_info=error, extra=log_fields)
        retry_after = error.retry_after if isinstance(error, Unavailable) else 0
        return ApiError(status, error.message, retry_after=retry_after)
    logger.error("a request failed", exc_info=error, extra=log_fields)
    return ApiError(500, "The server had an error while processing the request.")


def rejection_response(rejection: Rejection) -> tuple[int, bytes]:
    """Return status and body of an error of the HTTP server, such as for a malformed or too large request."""
    status, message = rejection.status, rejection.message
    code = {413: "content_too_large"}.get(status)
    hint = ", which --http-max-input-size sets" if status == 413 else ""
    return status, ApiError(status, f"{message[:1].upper()}{message[1:]}{hint}.", code=code).body()


def validation_error(error: ValidationError) -> ApiError:
    """Create an error 400 for pydantic's first error; `param` is the path of the field, such as `messages[0].role`."""
    errors = error.errors(include_url=False, include_input=False)
    api_error = _first_error(errors)
    api_error.validation = errors
    return api_error


def _first_error(errors: Sequence[Any]) -> ApiError:
    first = errors[0]
    # For a union, the branch with the deepest error is most likely the intended branch.
    of_same_field = [entry for entry in errors if entry["loc"][:1] == first["loc"][:1]]
    first = max(of_same_field, key=lambda entry: len(entry["loc"]))
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['ctx']['error']}")
    location = first["loc"]
    if location and location[-1] == "[key]":  # a mapping's key is invalid: name the mapping
        location = location[:-2]
    fields = [part for part in location if isinstance(part, int) or _is_field(part)]
    if not fields:
        return ApiError(400, f"Invalid request: {first['msg']}")
    path = str(fields[0]) + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in fields[1:]
    )
    code = "missing_required_parameter" if first["type"] == "missing" else None
    return invalid(path, f"Invalid '{path}': {first['msg']}", code)


def _is_field(part: str) -> bool:
    """Whether a part of pydantic's location is a field name, not the name of a union branch."""
    return part.isidentifier() and part[0].islower() and part not in ("str", "int", "float", "bool")
