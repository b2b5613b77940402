"""The infer endpoint."""

from __future__ import annotations

import asyncio

from neso.frontends.http import Request, Response
from neso.frontends.kserve_http.compression import (
    ACCEPTED,
    IDENTITY,
    UnsupportedEncoding,
    accepted_encoding,
    compress,
    decompress,
)
from neso.frontends.kserve_http.errors import respond
from neso.frontends.kserve_http.infer_request import read_infer_request
from neso.frontends.kserve_http.infer_response import write_infer_response
from neso.server.core import Core
from neso.server.errors import InternalError, Unsupported
from neso.server.inference_response import InferenceResponse, ResponseStream


class InferEndpoint:
    """`POST /v2/models/{model}[/versions/{version}]/infer`."""

    def __init__(self, core: Core, max_input_size: int) -> None:
        self._core = core
        self._max_input_size = max_input_size  # bytes, of a body that is decompressed

    async def __call__(self, request: Request) -> Response:
        version = request.params.get("version", "")
        model = self._core.model(request.params["model"], version)
        if model.decoupled:
            raise Unsupported("HTTP end point doesn't support models with decoupled transaction policy")
        encoding = request.header("content-encoding")
        if encoding not in (None, "", IDENTITY):
            try:
                # In a thread: decompressing megabytes would keep every other request waiting.
                request.body = await asyncio.to_thread(
                    decompress, request.body, encoding, self._max_input_size
                )
            except UnsupportedEncoding as error:
                return respond(error, ACCEPTED)
        inference, output_format = read_infer_request(request, model, version, self._core.shared_memory)
        inference.trace = request.trace
        stream = model.submit(inference)
        try:
            response = await single_response(stream)
        finally:
            stream.cancel()  # of no effect unless this was cancelled: the client has gone
        if response.error is not None:
            raise response.error
        answer = write_infer_response(response, output_format)
        accepted = accepted_encoding(request.header("accept-encoding"))
        return answer if accepted == IDENTITY else await asyncio.to_thread(compress, answer, accepted)


async def single_response(stream: ResponseStream) -> InferenceResponse:
    """The one response of a request. Raises `InternalError` for any other number."""
    found: InferenceResponse | None = None
    count = 0
    async for response in stream:
        if response.flag_only:
            continue
        count += 1
        found = found or response
    if found is None:
        raise InternalError("received an unexpected null response")
    if count > 1:
        raise InternalError(f"expected a single response, got {count}")
    return found
