"""What a line of the log can tell beside its message: whom it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neso.server.inference_response import ResponseStream

FIELDS = ("model", "model_version", "request_id", "trace_id")


def request_fields(stream: ResponseStream) -> dict[str, str]:
    """The `extra` of a message about a request."""
    request = stream.request
    fields = {"model": request.model_name, "model_version": request.model_version, "request_id": request.id}
    if stream.trace is not None:
        fields["trace_id"] = stream.trace.trace.name
    return fields
