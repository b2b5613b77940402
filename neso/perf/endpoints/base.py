"""Protocol of an HTTP endpoint: builds the bytes of requests and reads the events of responses."""

from __future__ import annotations

from typing import Any, ClassVar

import orjson

from neso.perf.endpoints.options import EndpointOptions
from neso.perf.errors import PerfError
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest

History = list[dict[str, Any]]
"""Chat messages of the earlier turns of a session."""


class ResponseError(Exception):
    """An error that a response reports, or a response without the expected fields. The record gets the message."""


class HttpEndpoint:
    """An endpoint that is called by POST with a JSON body.

    Subclass it for an endpoint of your own, and name it as `--endpoint-type MODULE:CLASS`, or register it as an entry
    point of the group `neso.perf.endpoints`. `options` are those of the command line.

    A method that raises `ResponseError`, or `ValueError`, `KeyError`, `IndexError` or `TypeError` on an unexpected
    response, fails this request; `PerfError` in `body` too.
    """

    path: ClassVar[str] = ""
    """Path on the server, unless `--endpoint` gives another."""
    can_stream: ClassVar[bool] = True
    text_key: ClassVar[bytes] = b""
    """Key of the text in the JSON of an event, as in `b'"text":"'`, for the fast path of `ServerSentEvents`; or b"".
    Only for a key whose text, if not empty, is output and no reasoning."""
    content_type: ClassVar[str] = "application/json"

    def __init__(self, options: EndpointOptions) -> None:
        if options.streaming and not self.can_stream:
            raise PerfError(f"--streaming: endpoint type '{options.endpoint_type}' has no streamed responses")
        self.options = options
        self.streaming = options.streaming

    def url_path(self, model: str) -> str:
        """Return the path of requests to a model."""
        return self.options.path or self.path

    def headers(self) -> list[tuple[str, str]]:
        """Return headers of all requests of this endpoint, beside those of the options."""
        return []

    def body(self, request: PerfRequest, model: str, history: History) -> bytes:
        """Return the body of a request. `history`: messages of earlier turns of the session."""
        raise NotImplementedError

    def wire(self, request: PerfRequest, model: str, history: History) -> tuple[bytes, bytes]:
        """Return additional header lines, each with its line end, and the body of a request."""
        return b"", self.body(request, model, history)

    def items(self, request: PerfRequest) -> int:
        """Return the number of texts or passages in a request."""
        return 1

    def event(self, record: RequestRecord, data: bytes, now: int) -> None:
        """Read the data of a server-sent event that arrived at `now`. "[DONE]" is not passed."""
        raise NotImplementedError

    def response(self, record: RequestRecord, body: bytes, now: int) -> None:
        """Read a complete response that is not streamed."""
        raise NotImplementedError

    def message(self, request: PerfRequest) -> dict[str, Any]:
        """Return the user message of a turn, for the history."""
        return {"role": "user", "content": request.text}


def encode(fields: dict[str, Any], request: PerfRequest) -> bytes:
    """Return the JSON of a request with the extra fields of its source. Raises `PerfError`."""
    try:
        return orjson.dumps({**fields, **request.extra} if request.extra else fields)
    except TypeError as error:
        raise PerfError(f"a request has no JSON form: {error}") from None


def require_text(request: PerfRequest, endpoint: str) -> str:
    """Return the text of a request. Raises `PerfError` if it has none."""
    if not request.text and request.messages is None:
        raise PerfError(f"endpoint type '{endpoint}' needs requests with a text")
    return request.text


def add_text(record: RequestRecord, text: str) -> None:
    """Append to the kept text of a response; does nothing if texts are not kept."""
    if record.output_text is not None:
        record.output_text += text


def add_output(record: RequestRecord, text: str, now: int) -> None:
    """Note an event with output that is not reasoning."""
    record.arrivals_ns.append(now)
    if not record.first_output_ns:
        record.first_output_ns = now
    add_text(record, text)


def set_usage(record: RequestRecord, usage: dict[str, Any]) -> None:
    """Take the counts of a `usage` object of the OpenAI API (chat and completions or responses)."""
    get = usage.get
    prompt = get("prompt_tokens", get("input_tokens"))
    if prompt is not None:
        record.input_tokens = prompt
    output = get("completion_tokens", get("output_tokens"))
    if output is not None:
        record.output_tokens = output
    details = get("completion_tokens_details") or get("output_tokens_details")
    if details and details.get("reasoning_tokens") is not None:
        record.reasoning_tokens = details["reasoning_tokens"]
    details = get("prompt_tokens_details") or get("input_tokens_details")
    if details and details.get("cached_tokens") is not None:
        record.cached_tokens = details["cached_tokens"]


def set_event_usage(record: RequestRecord, usage: dict[str, Any], had_output: bool) -> None:
    """Take the `usage` of an event. If it has output, the difference to the event before it is its number of tokens."""
    before = max(0, record.output_tokens)
    set_usage(record, usage)
    if had_output and len(record.event_tokens) == len(record.arrivals_ns) - 1:
        record.event_tokens.append(max(0, record.output_tokens - before))


def error_text(value: Any) -> str:
    """Return the message in an `error` field of a response."""
    if isinstance(value, dict):
        return str(value.get("message") or value)
    return str(value)


def raise_error(message: dict[str, Any]) -> None:
    """Raise `ResponseError` if a message reports an error."""
    error = message.get("error")
    if error:
        raise ResponseError(error_text(error))
