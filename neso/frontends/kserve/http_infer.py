"""The infer endpoint over HTTP, its traces, and load metrics in response headers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import orjson

from neso.frontends.decoding import LARGE_JSON, decode
from neso.frontends.kserve.errors import STATUSES, retry_headers
from neso.frontends.kserve.http_codec import (
    HEADER_LENGTH_FIELD,
    OutputFormat,
    read_infer_request,
    write_infer_response,
)
from neso.frontends.kserve.http_compression import (
    ACCEPTED,
    IDENTITY,
    UnsupportedEncoding,
    accepted_encoding,
    compress,
    decompress,
)
from neso.frontends.kserve.request_limits import RequestLimits
from neso.frontends.kserve.service import KServeService, finish_trace
from neso.frontends.transport.http1 import (
    HandlerResult,
    Headers,
    PendingResponse,
    Request,
    Response,
    error_response,
)
from neso.server.errors import ServerError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream, SingleResponse
from neso.server.model import Model
from neso.server.tracing import Trace

logger = logging.getLogger(__name__)

PROTOCOL = "HTTP"  # part of the names of trace activities
_API = "HTTP end point"  # in error messages

LOAD_FORMAT = b"endpoint-load-metrics-format"
"""Request header for load metrics in the response (ORCA): `text` or `json`."""
_LOAD_METRICS = "endpoint-load-metrics"

_SLOW_HEADERS = frozenset({b"content-encoding", LOAD_FORMAT})  # handled only by `infer_async`

Endpoint = Callable[[Request], PendingResponse | Awaitable[HandlerResult]]
AsyncEndpoint = Callable[[Request], Awaitable[HandlerResult]]


def error_to_response(error: ServerError, headers: Headers = ()) -> Response:
    """Create the HTTP response for a server error."""
    return error_response(STATUSES[error.code][0], error.message, (*headers, *retry_headers(error)))


class InferEndpoint:
    """`POST /v2/models/{model}[/versions/{version}]/infer`.

    `max_input_size`: bytes of a decompressed body.
    """

    def __init__(self, service: KServeService, max_input_size: int, limits: RequestLimits) -> None:
        self._service = service
        self._max_input_size = max_input_size
        self._limits = limits

    def infer(self, request: Request) -> PendingResponse | Awaitable[Response]:
        """Respond from the model's callback, without a task, unless headers of the request need `infer_async`."""
        headers = request.headers
        if (
            headers.get(b"accept-encoding", b"identity") != b"identity"
            or not headers.keys().isdisjoint(_SLOW_HEADERS)
            or (len(request.body) > LARGE_JSON and _has_large_json(request))
        ):
            return self.infer_async(request)
        version = request.params.get("version", "")
        model = self._service.find_unary_model(request.params["model"], version, _API)
        inference, output_format = read_infer_request(
            request, model, version, self._service.shared_memory, self._limits
        )
        stream = self._submit(request, model, inference)
        pending = _PendingInfer(request, output_format)
        pending.on_disconnect = stream.cancel
        stream.consume(SingleResponse(pending.respond))
        return pending

    async def infer_async(self, request: Request) -> Response:
        """Coroutine version of `infer`, with support for traces, compression and load metrics."""
        encoding = request.header("content-encoding")
        if encoding not in (None, "", IDENTITY):
            try:
                request.body = await asyncio.to_thread(
                    decompress, request.body, encoding, self._max_input_size
                )
            except UnsupportedEncoding as error:
                return error_to_response(error, ACCEPTED)
        version = request.params.get("version", "")
        model = self._service.find_unary_model(request.params["model"], version, _API)
        arguments = (request, model, version, self._service.shared_memory, self._limits)
        if _has_large_json(request):
            inference, output_format = await decode(read_infer_request, *arguments)
        else:
            inference, output_format = read_infer_request(*arguments)
        stream = self._submit(request, model, inference)
        future: asyncio.Future[InferenceResponse] = asyncio.get_running_loop().create_future()
        stream.consume(
            SingleResponse(lambda response: None if future.done() else future.set_result(response))
        )
        try:
            inference_response = await future
        finally:
            stream.cancel()  # no effect unless a disconnect cancelled this task
        response = write_infer_response(inference_response, output_format)
        if load := load_headers(request, self._service):
            response.headers = (*response.headers, *load)
        accepted = accepted_encoding(request.header("accept-encoding"))
        return response if accepted == IDENTITY else await asyncio.to_thread(compress, response, accepted)

    def _submit(self, request: Request, model: Model, inference: InferenceRequest) -> ResponseStream:
        inference.client, inference.input_bytes = request.connection.address, len(request.body)
        return self._service.submit(model, inference, request.header_items, request.trace)


def _has_large_json(request: Request) -> bool:
    """Whether a body, or its part before binary tensors, is so much JSON that it is parsed in a thread."""
    if len(request.body) <= LARGE_JSON:
        return False
    length = request.headers.get(HEADER_LENGTH_FIELD)
    if length is None:
        return True
    return length.isdigit() and len(length) < 20 and int(length) > LARGE_JSON  # others are rejected later


class _PendingInfer(PendingResponse):
    """The pending response to a request that a model executes."""

    __slots__ = ("_output_format",)

    def __init__(self, request: Request, output_format: OutputFormat) -> None:
        super().__init__(request)
        self._output_format = output_format

    def respond(self, inference_response: InferenceResponse) -> None:
        """Send the model's response."""
        try:
            response = write_infer_response(inference_response, self._output_format)
        except ServerError as error:
            response = error_to_response(error)
        except Exception:
            self.fail()
            return
        self.send(response)


def traced(service: KServeService, endpoint: Endpoint, async_endpoint: AsyncEndpoint) -> Endpoint:
    """Wrap an endpoint of a model so that sampled requests go to `async_endpoint`, with `request.trace` set."""
    tracing = service.tracing

    # A plain function that returns the endpoint's result, so that untraced requests cost only one more call.
    def handle(request: Request) -> PendingResponse | Awaitable[HandlerResult]:
        if not tracing.enabled:
            return endpoint(request)
        stamps = ("HTTP_RECV_START", "HTTP_RECV_END")
        trace = service.start_trace(request.params["model"], request.header, request.received_ns, stamps)
        return endpoint(request) if trace is None else _run_traced(async_endpoint, request, trace)

    return handle


async def _run_traced(endpoint: AsyncEndpoint, request: Request, trace: Trace) -> HandlerResult:
    request.trace = trace
    try:
        return await endpoint(request)
    finally:
        finish_trace(trace, PROTOCOL)


def load_headers(request: Request, service: KServeService) -> Headers:
    """Return a header with the server's load for load balancers, if requested and a model has a KV cache."""
    load_format = request.headers.get(LOAD_FORMAT)
    if load_format is None:
        return ()
    load_format = load_format.lower()
    load = service.kv_cache_load() if load_format in (b"text", b"json") else None
    if load is None:
        logger.debug(
            "no %s header: unknown format %r, or no model has a KV cache", _LOAD_METRICS, load_format
        )
        return ()
    utilization, capacity = load
    if load_format == b"json":
        named = {"kv_cache_utilization": utilization, "max_token_capacity": capacity}
        return ((_LOAD_METRICS, "JSON " + orjson.dumps({"named_metrics": named}).decode()),)
    text = (
        f"TEXT named_metrics.kv_cache_utilization={utilization:.6f}, "
        f"named_metrics.max_token_capacity={capacity}"
    )
    return ((_LOAD_METRICS, text),)
