"""Infer responses: JSON, with the binary outputs behind it."""

from __future__ import annotations

from typing import Any

from neso._wire import write_plain_infer
from neso.frontends.kserve_http.infer_request import HEADER_LENGTH, OutputFormat
from neso.frontends.kserve_http.json_body import write_json
from neso.frontends.kserve_http.json_tensor import write_values
from neso.frontends.transport.http1 import Response
from neso.server.inference_response import InferenceResponse
from neso.server.tensor import Tensor


def write_infer_response(response: InferenceResponse, output_format: OutputFormat) -> Response:
    """The response for a client. Raises `ServerError` for an output that the form asked for cannot hold."""
    binary, default = output_format.binary, output_format.default
    if not response.parameters and not output_format.windows:
        plain = write_plain_infer(
            response.id, response.model_name, response.model_version, response.outputs, binary, default
        )
        if plain is not None:
            body, json_length = plain
            return Response(body) if len(body) == json_length else _mixed(body, json_length)
    return _write_any(response, output_format)


def _mixed(body: bytes | list[bytes | memoryview], json_length: int) -> Response:
    """JSON of that length, and binary outputs behind it."""
    return Response(body, 200, "application/octet-stream", ((HEADER_LENGTH, str(json_length)),))


def _write_any(response: InferenceResponse, output_format: OutputFormat) -> Response:
    """The same in Python, for what is not plain. Raises `ServerError`."""
    blobs: list[bytes | memoryview] = []
    outputs: list[dict[str, Any]] = []
    binary, default = output_format.binary, output_format.default
    for tensor in response.outputs:
        name = tensor.name
        entry: dict[str, Any] = {"name": name, "datatype": tensor.datatype, "shape": tensor.array.shape}
        if output_format.windows and name in output_format.windows:
            window = output_format.windows[name]
            entry["parameters"] = window.parameters(window.write(tensor))
        elif binary.get(name, default):
            _add_blob(tensor, entry, blobs)
        else:
            entry["data"] = write_values(tensor)
        outputs.append(entry)
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    if response.parameters:
        document["parameters"] = response.parameters
    document["outputs"] = outputs
    text = write_json(document)
    return _mixed([text, *blobs], len(text)) if blobs else Response(text)


def _add_blob(tensor: Tensor, entry: dict[str, Any], blobs: list[bytes | memoryview]) -> None:
    blob = tensor.to_wire()
    entry["parameters"] = {"binary_data_size": len(blob)}
    if blob:
        blobs.append(blob)
