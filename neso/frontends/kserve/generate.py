"""The generate extension over HTTP: plain JSON instead of tensors, and streams of server-sent events."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

from neso.frontends.kserve.errors import STATUSES, retry_headers
from neso.frontends.kserve.http_infer import PROTOCOL, load_headers
from neso.frontends.kserve.http_json import (
    read_object,
    read_parameter,
    read_string,
    read_tensor,
    write_json,
    write_values,
)
from neso.frontends.kserve.service import KServeService
from neso.frontends.transport.http1 import Headers, Request, Response, StreamingResponse, error_body
from neso.generation import GenerationOutput
from neso.server.backend import TextFields
from neso.server.errors import InvalidArgument, ServerError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.metadata import TensorMetadata
from neso.server.model import Model
from neso.server.tensor import DataType
from neso.server.tracing import TraceLevel

NOT_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates "
    "various number of responses"
)
_SSE = "text/event-stream; charset=utf-8"


class GenerateEndpoint:
    """`POST /v2/models/{model}[/versions/{version}]/generate` and `…/generate_stream`."""

    def __init__(self, service: KServeService) -> None:
        self._service = service

    async def generate(self, request: Request) -> Response:
        """Return one JSON response. Its status is that of the first response, even if more follow."""
        stream, fields_of = self._submit(request)
        status = 0
        headers: Headers = ()
        bodies: list[bytes] = []
        try:
            async for response in stream:
                body, code, more = _response_body(response, fields_of)
                if not status:
                    status, headers = code, more
                if body is not None:
                    bodies.append(body)
                if len(bodies) > 1:
                    break
        finally:
            stream.cancel()
        body = bodies[0] if len(bodies) == 1 else error_body(NOT_ONE_RESPONSE)
        return Response(body, status or 200, headers=(*load_headers(request, self._service), *headers))

    async def generate_stream(self, request: Request) -> StreamingResponse:
        """Send each response as a server-sent event. The first response sets the status; later errors are events."""
        stream, fields_of = self._submit(request)
        out: StreamingResponse | None = None
        try:
            async for response in stream:
                body, code, headers = _response_body(response, fields_of)
                if out is None:
                    headers = (*load_headers(request, self._service), *headers)
                    out = StreamingResponse(request, code, _SSE, headers)
                    if request.trace is not None:
                        request.trace.sending(PROTOCOL)
                if body is not None:
                    out.write(b"data: %b\n\n" % body)
                    await out.drain()
        finally:
            stream.cancel()
        return out or StreamingResponse(request, 200, _SSE)

    def _submit(self, request: Request) -> tuple[ResponseStream, TextFields | None]:
        """Submit the request. Return the responses, and without tensors also the function that converts results."""
        version = request.params.get("version", "")
        model = self._service.find_model(request.params["model"], version)
        if request.header("content-encoding") not in (None, "", "identity"):
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        document = _read_document(request.body, model)
        client = request.connection.address
        if request.trace is None or TraceLevel.TENSORS not in request.trace.level:
            inference = InferenceRequest(model.name, {}, version, client=client)
            values = _read_text_values(document, model, inference)
            if values is not None:
                self._service.forward_headers(inference, request.header_items)
                fields_of = model.read_text_request(inference, values)
                if fields_of is not None:
                    inference.trace = request.trace
                    return model.submit(inference), fields_of
        inference = _read_tensors(document, model, version)
        inference.client, inference.input_bytes = client, len(request.body)
        return self._service.submit(model, inference, request.header_items, request.trace), None


def _read_text_values(
    document: dict[str, Any], model: Model, inference: InferenceRequest
) -> dict[str, Any] | None:
    """Read the values of the model's text inputs; other members become parameters of `inference`.

    Return None if the request needs tensors or is invalid; `_read_tensors` then raises the error.
    """
    types = model.text_inputs
    if "text_input" not in types:
        return None
    values: dict[str, Any] = {}
    members: list[tuple[str, Any]] = []
    for name, value in document.items():
        if name == "parameters":
            if type(value) is not dict:
                return None
            members += value.items()
        elif name == "id" and name not in model.signature.inputs:
            if type(value) is not str:
                return None
            inference.id = value
        else:
            members.append((name, value))
    try:
        for name, value in members:
            if name in types:
                if type(value) is not types[name] or name in values or not _is_unicode(value):
                    return None
                values[name] = value
            elif name in model.signature.inputs:
                return None
            else:
                read_parameter(inference, name, value)
    except InvalidArgument:
        return None
    return values if "text_input" in values else None


def _is_unicode(value: Any) -> bool:
    """Return False for text with a lone surrogate, which JSON can represent."""
    if type(value) is not str or value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_generate_request(body: bytes, model: Model, version: str) -> InferenceRequest:
    """Map a JSON object to input tensors and parameters. Raises `InvalidArgument`.

    A key that names an input of the model sets that input, "id" sets the request id, and any other key is a
    parameter. The members of "parameters" are treated like top-level keys.
    """
    return _read_tensors(_read_document(body, model), model, version)


def _read_document(body: bytes, model: Model) -> dict[str, Any]:
    document = read_object(body)
    _check_unique(body, document, model.signature.inputs)
    return document


def _read_tensors(document: dict[str, Any], model: Model, version: str) -> InferenceRequest:
    inputs = {spec.name: spec for spec in model.metadata().inputs}
    inference = InferenceRequest(model.name, {}, version)
    for key, value in document.items():
        if key == "parameters":
            if key in inputs:
                raise InvalidArgument(
                    "Keyword: 'parameters' for nested schema also given as input tensor name"
                )
            if type(value) is not dict:
                raise InvalidArgument(
                    "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object"
                )
            try:
                for name, member in value.items():
                    _read_member(inference, inputs, name, member)
            except InvalidArgument as error:
                raise InvalidArgument(f"Converting keyword: 'parameters': {error.message}") from None
        elif key == "id" and key not in inputs:
            inference.id = read_string(key, value)
        else:
            _read_member(inference, inputs, key, value)
    return inference


def write_generate_response(response: InferenceResponse, fields_of: TextFields | None = None) -> bytes:
    """Encode parameters and outputs as one flat JSON object; a tensor with one element becomes a scalar."""
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    for name, value in response.parameters.items():
        document.setdefault(name, value)
    for tensor in response.outputs:
        values = write_values(tensor, lossy=True)
        document.setdefault(tensor.name, values[0] if len(values) == 1 else values)
    if fields_of is not None and isinstance(response.result, GenerationOutput):
        document |= fields_of(response.result)
    return write_json(document)


def _response_body(
    response: InferenceResponse, fields_of: TextFields | None
) -> tuple[bytes | None, int, Headers]:
    """Return JSON body, status and headers of a response; the body is None for an empty final response."""
    if response.flag_only:
        return None, 200, ()
    try:
        response.raise_error()
        return write_generate_response(response, fields_of), 200, ()
    except ServerError as error:
        return error_body(error.message), STATUSES[error.code][0], retry_headers(error)


def _read_member(
    inference: InferenceRequest, inputs: dict[str, TensorMetadata], name: str, value: Any
) -> None:
    spec = inputs.get(name)
    if spec is None:
        read_parameter(inference, name, value)
        return
    if name in inference.inputs:
        raise InvalidArgument(f"input '{name}' already exists in request")
    data = value if type(value) is list else [value]
    if data and type(data[0]) is list:
        raise _shape_error(spec)  # only scalars and flat arrays: the model's config determines the shape
    shape = _shape(spec, len(data))
    inference.inputs[name] = read_tensor(name, DataType(spec.datatype), shape, data)


def _shape(spec: TensorMetadata, count: int) -> tuple[int, ...]:
    """Return the shape of `count` elements: other variable dimensions than the innermost are 1."""
    shape = list(spec.shape)
    for extent in shape:
        if extent != -1:
            if extent == 0 or count % extent:
                raise _shape_error(spec)
            count //= extent
    for i in reversed(range(len(shape))):
        if shape[i] == -1:
            shape[i], count = count, 1
    if count != 1:
        raise _shape_error(spec)
    return tuple(shape)


def _shape_error(spec: TensorMetadata) -> InvalidArgument:
    return InvalidArgument(f"The schema can not convert input '{spec.name}' to tensor with proper shape")


def _check_unique(body: bytes, document: dict[str, Any], inputs: Container[str]) -> None:
    """Reject duplicate inputs. orjson silently keeps the last duplicate.

    The slow parser runs only if the body contains the quoted name of an input more than once.
    """
    nested = document.get("parameters")
    names = [*document, *(nested if type(nested) is dict else ())]
    if all(body.count(b'"%b"' % name.encode(errors="replace")) < 2 for name in names if name in inputs):
        return

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen and name in inputs:
                raise InvalidArgument(f"input '{name}' already exists in request")
            seen.add(name)
        return dict(pairs)

    try:
        json.loads(body, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"failed to parse the request JSON buffer: {error}") from None
