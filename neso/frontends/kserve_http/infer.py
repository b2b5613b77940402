"""The infer endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from neso.frontends.header_forwarding import HeaderForwarding
from neso.frontends.kserve_http.compression import (
    ACCEPTED,
    IDENTITY,
    UnsupportedEncoding,
    accepted_encoding,
    compress,
    decompress,
)
from neso.frontends.kserve_http.errors import respond
from neso.frontends.kserve_http.infer_request import OutputFormat, read_infer_request
from neso.frontends.kserve_http.infer_response import write_infer_response
from neso.frontends.kserve_http.load_metrics import LOAD_FORMAT, load_headers
from neso.frontends.transport.http1 import PendingResponse, Request, Response
from neso.server.core import Core
from neso.server.errors import ServerError, Unsupported
from neso.server.inference_response import InferenceResponse, ResponseStream, SingleResponse

_SPECIAL = frozenset({b"content-encoding", b"accept-encoding", LOAD_FORMAT})


class InferEndpoint:
    """`POST /v2/models/{model}[/versions/{version}]/infer`."""

    def __init__(self, core: Core, max_input_size: int, forwarding: HeaderForwarding | None) -> None:
        self._core = core
        self._forwarding = forwarding
        self._max_input_size = max_input_size  # bytes, of a body that is decompressed

    def __call__(self, request: Request) -> PendingResponse | Awaitable[Response]:
        headers = request.headers
        if not headers.keys().isdisjoint(_SPECIAL):
            return self.answer(request)
        stream, output_format = self._submit(request)
        deferred = PendingResponse(request, stream.cancel)
        stream.consume(SingleResponse(_Answer(deferred, output_format)))
        return deferred

    def _submit(self, request: Request) -> tuple[ResponseStream, OutputFormat]:
        """Raises `ServerError`."""
        version = request.params.get("version", "")
        model = self._core.model(request.params["model"], version)
        if model.decoupled:
            raise Unsupported("HTTP end point doesn't support models with decoupled transaction policy")
        inference, output_format = read_infer_request(request, model, version, self._core.shared_memory)
        if self._forwarding is not None:
            inference.parameters.update(self._forwarding.parameters(request.header_items()))
        inference.trace = request.trace
        return model.submit(inference), output_format

    async def answer(self, request: Request) -> Response:
        """The same as a coroutine: for requests that are traced, bodies and answers that are compressed, answers that
        tell the server's load. (De)compressing is for threads, as megabytes take their time.
        """
        encoding = request.header("content-encoding")
        if encoding not in (None, "", IDENTITY):
            try:
                request.body = await asyncio.to_thread(
                    decompress, request.body, encoding, self._max_input_size
                )
            except UnsupportedEncoding as error:
                return respond(error, ACCEPTED)
        stream, output_format = self._submit(request)
        ended: asyncio.Future[InferenceResponse] = asyncio.get_running_loop().create_future()
        stream.consume(SingleResponse(lambda response: None if ended.done() else ended.set_result(response)))
        try:
            response = await ended
        finally:
            stream.cancel()  # of no effect unless this was cancelled: the client has gone
        answer = _write(response, output_format)
        if load := load_headers(request, self._core):
            answer.headers = (*answer.headers, *load)
        accepted = accepted_encoding(request.header("accept-encoding"))
        return answer if accepted == IDENTITY else await asyncio.to_thread(compress, answer, accepted)


class _Answer:
    """Answers an HTTP request with the response of the model."""

    __slots__ = ("_deferred", "_format")

    def __init__(self, deferred: PendingResponse, output_format: OutputFormat) -> None:
        self._deferred = deferred
        self._format = output_format

    def __call__(self, response: InferenceResponse) -> None:
        try:
            answer = _write(response, self._format)
        except ServerError as error:
            answer = respond(error)
        except Exception:
            self._deferred.fail()
            return
        self._deferred.send(answer)


def _write(response: InferenceResponse, output_format: OutputFormat) -> Response:
    """Raises `ServerError`, that of the response too."""
    if response.error is not None:
        raise response.error
    return write_infer_response(response, output_format)
