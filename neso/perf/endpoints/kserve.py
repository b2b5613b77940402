"""KServe v2: tensors of language models as vLLM and TensorRT-LLM name them, and tensors of any model.

`Convention` turns requests into tensors and reads those of responses; the endpoint over HTTP and the target over gRPC
share it.
"""

from __future__ import annotations

import json
import math
import struct
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import orjson

from neso.perf.endpoints.base import History, HttpEndpoint, add_output, raise_error, require_text
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.errors import PerfError
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest, SharedTensor

Spec = tuple[str, str, tuple[int, ...]]
"""Name, datatype and shape of a tensor, as in the metadata of its model."""

_DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64",
    "bfloat16": "BF16", "object": "BYTES",
}  # fmt: skip
_METADATA_SECONDS = 30.0
_REGIONS = "/v2/systemsharedmemory/region"


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Inputs and outputs of a model.

    `max_batch_size` above 0: the first dimension is the batch. `is_decoupled`: a request has any number of responses.
    `is_sequence`: requests belong to sequences.
    """

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    max_batch_size: int = 0
    is_decoupled: bool = False
    is_sequence: bool = False

    @classmethod
    def from_json(cls, metadata: dict[str, Any], config: dict[str, Any]) -> ModelMetadata:
        """Read the metadata and the configuration as Triton's HTTP API responds with them."""
        inputs, outputs = (
            tuple(
                (one["name"], one["datatype"], tuple(int(d) for d in one["shape"])) for one in metadata[key]
            )
            for key in ("inputs", "outputs")
        )
        policy = config.get("model_transaction_policy") or {}
        return cls(
            inputs,
            outputs,
            int(config.get("max_batch_size", 0)),
            bool(policy.get("decoupled")),
            "sequence_batching" in config,
        )


class Convention:
    """Tensors of one model. `backend` is that of the options, or "auto"."""

    def __init__(self, backend: str, metadata: ModelMetadata) -> None:
        self.metadata = metadata
        self._shapes = {name: shape for name, _, shape in metadata.inputs}
        self.kind = self._kind() if backend == "auto" else backend
        self.output = {"engine": "output_ids", "tensor": ""}.get(self.kind, "text_output")

    def _kind(self) -> str:
        if "input_ids" in self._shapes and "input_lengths" in self._shapes:
            return "engine"
        if "text_input" in self._shapes:
            return "tensorrtllm" if "max_tokens" in self._shapes else "vllm"
        return "tensor"

    def tensors(self, request: PerfRequest, *, streaming: bool) -> dict[str, np.ndarray | SharedTensor]:
        """Return the inputs of a request. Raises `PerfError` if the request lacks what the model needs."""
        if request.tensors is not None:
            return request.tensors
        if self.kind == "engine":
            return self._engine(request, streaming)
        if self.kind == "tensor":
            raise PerfError(
                "the model takes tensors; they are generated for endpoint types kserve_http and kserve_grpc"
            )
        text = require_text(request, "kserve")
        values: dict[str, Any] = {
            "text_input": (f"{request.system}\n{text}" if request.system else text).encode()
        }
        if self.kind == "vllm":
            sampling: dict[str, Any] = dict(request.extra)
            if request.max_tokens is not None:
                sampling["max_tokens"] = request.max_tokens
            if request.min_tokens is not None:
                sampling["min_tokens"] = request.min_tokens
            if request.adapter:
                sampling["lora_name"] = request.adapter
            values |= {
                "stream": streaming,
                "sampling_parameters": json.dumps(sampling).encode(),
                "exclude_input_in_output": True,
            }
        else:
            values |= {
                "stream": streaming,
                "max_tokens": np.int32(16 if request.max_tokens is None else request.max_tokens),
            }
            if request.min_tokens is not None:
                values["min_length"] = np.int32(request.min_tokens)
            values |= request.extra
        return {name: self._scalar(name, value) for name, value in values.items() if name in self._shapes}

    def parameters(self, request: PerfRequest) -> dict[str, Any]:
        """Return the parameters of a request: extra fields for a tensor model, and its place in a sequence."""
        found = dict(request.extra) if self.kind == "tensor" else {}
        if self.metadata.is_sequence and request.session:
            number = int(request.session.rpartition("#")[2])
            found |= {
                "sequence_id": number + 1,
                "sequence_start": request.turn == 0,
                "sequence_end": request.ends_session,
            }
        return found

    def _engine(self, request: PerfRequest, streaming: bool) -> dict[str, np.ndarray | SharedTensor]:
        """The token-level model of TensorRT-LLM, named tensorrt_llm."""
        if request.token_ids is None:
            raise PerfError("the model takes token ids; the input source has only texts")
        values = {
            "input_lengths": np.int32(len(request.token_ids)),
            "request_output_len": np.int32(16 if request.max_tokens is None else request.max_tokens),
            "streaming": streaming,
            "min_length": None if request.min_tokens is None else np.int32(request.min_tokens),
            **request.extra,
        }
        tensors = {
            name: self._scalar(name, value)
            for name, value in values.items()
            if value is not None and name in self._shapes
        }
        return {"input_ids": np.array([request.token_ids], np.int32), **tensors}

    def _scalar(self, name: str, value: Any) -> np.ndarray:
        """Return an array of one element, with the rank of the input."""
        datatype = next(kind for input_name, kind, _ in self.metadata.inputs if input_name == name)
        if datatype == "BYTES":
            array = np.array([value if isinstance(value, bytes) else str(value).encode()], np.object_)
        else:
            array = np.array([value], _numpy_type(datatype))
        return array.reshape((1,) * max(1, len(self._shapes[name])))

    def read(self, record: RequestRecord, output: np.ndarray | None, now: int) -> None:
        """Note the output tensor of a response: texts or token ids."""
        if self.kind == "tensor":
            add_output(record, "", now)
            return
        if output is None:
            raise ValueError(f"the response has no tensor '{self.output}'")
        if self.kind == "engine":
            tokens = int(output.size)
            if tokens:
                add_output(record, "", now)
                record.event_tokens.append(tokens)
                record.output_tokens = max(0, record.output_tokens) + tokens
            return
        text = b"".join(output.ravel().tolist()).decode("utf-8", "replace")
        if text:
            add_output(record, text, now)


def shared_memory_parameters(tensor: SharedTensor) -> dict[str, str | int]:
    """Return the parameters of an input or output in shared memory."""
    return {
        "shared_memory_region": tensor.region,
        "shared_memory_offset": tensor.offset,
        "shared_memory_byte_size": tensor.byte_size,
    }


def byte_size(spec: Spec, batch: int) -> int:
    """Return the size of a tensor in bytes, 0 if it is variable. `batch` above 0 is the first dimension."""
    _, datatype, shape = spec
    shape = (batch, *shape[1:]) if batch else shape
    if datatype == "BYTES" or -1 in shape:
        return 0
    return math.prod(shape) * int(np.dtype(_numpy_type(datatype)).itemsize)


def encode_tensor(array: np.ndarray) -> tuple[str, bytes]:
    """Return the datatype of an array and its content in Triton's binary format."""
    datatype = datatype_of(array)
    if datatype == "BYTES":
        elements = [one if isinstance(one, bytes) else str(one).encode() for one in array.ravel().tolist()]
        return datatype, b"".join(struct.pack("<I", len(one)) + one for one in elements)
    return datatype, np.ascontiguousarray(array).tobytes()


def decode_tensor(datatype: str, shape: list[int], data: bytes) -> np.ndarray:
    """Return the array of a tensor in Triton's binary format. Raises `ValueError`."""
    if datatype != "BYTES":
        return np.frombuffer(data, _numpy_type(datatype)).reshape(shape)
    elements, position = [], 0
    while position < len(data):
        (length,) = struct.unpack_from("<I", data, position)
        elements.append(data[position + 4 : position + 4 + length])
        position += 4 + length
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def datatype_of(array: np.ndarray) -> str:
    """Return the KServe datatype of an array. Raises `PerfError`."""
    name = "object" if array.dtype.kind in "SU" else array.dtype.name
    if name not in _DATATYPES:
        raise PerfError(f"tensors of type {array.dtype} cannot be sent")
    return _DATATYPES[name]


def _numpy_type(datatype: str) -> Any:
    names = {kserve: numpy for numpy, kserve in _DATATYPES.items()}
    if datatype not in names:
        raise ValueError(f"unknown datatype '{datatype}'")
    if datatype == "BF16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(names[datatype])


class KServeHttpEndpoint(HttpEndpoint):
    """`/v2/models/MODEL/infer` with binary tensors."""

    can_stream: ClassVar[bool] = False
    content_type: ClassVar[str] = "application/octet-stream"

    def __init__(self, options: EndpointOptions) -> None:
        super().__init__(options)
        metadata = http_metadata(options)
        if metadata.is_decoupled:
            raise PerfError(
                f"model '{options.models[0]}' is decoupled: use --endpoint-type kserve_grpc or generate"
            )
        self._convention = Convention(options.backend, metadata)

    def url_path(self, model: str) -> str:
        return self.options.path or f"/v2/models/{model}/infer"

    def wire(self, request: PerfRequest, model: str, history: History) -> tuple[bytes, bytes]:
        inputs, contents = [], []
        for name, tensor in self._convention.tensors(request, streaming=False).items():
            place: dict[str, str | int]
            if isinstance(tensor, SharedTensor):
                datatype, place = tensor.datatype, shared_memory_parameters(tensor)
            else:
                datatype, data = encode_tensor(tensor)
                place = {"binary_data_size": len(data)}
                contents.append(data)
            inputs.append({"name": name, "datatype": datatype, "shape": tensor.shape, "parameters": place})
        parameters = self._convention.parameters(request)
        fields: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
        if request.shared_outputs:
            fields["outputs"] = [
                {"name": name, "parameters": shared_memory_parameters(tensor)}
                for name, tensor in request.shared_outputs.items()
            ]
        elif self._convention.kind == "tensor":
            parameters["binary_data_output"] = True
        else:
            fields["outputs"] = [{"name": self._convention.output}]
        head = orjson.dumps(fields)
        return b"Inference-Header-Content-Length: %d\r\n" % len(head), b"".join([head, *contents])

    def response(self, record: RequestRecord, body: bytes, now: int) -> None:
        if self._convention.kind == "tensor":
            self._convention.read(record, None, now)
            return
        message = orjson.loads(body)
        raise_error(message)
        [output] = message["outputs"]
        data = output["data"]
        if output["datatype"] == "BYTES":
            data = [text.encode() for text in data]
        self._convention.read(record, np.array(data), now)


def http_metadata(options: EndpointOptions) -> ModelMetadata:
    """Ask the server for the metadata of the first model. Raises `PerfError`."""
    path = f"/v2/models/{options.models[0]}"
    url = options.server_urls[0]
    return ModelMetadata.from_json(_call(url, path, options), _call(url, f"{path}/config", options))


def http_register(options: EndpointOptions, name: str, size: int) -> None:
    """Register shared memory, whose key is its name, with all servers. Raises `PerfError`."""
    for url in options.server_urls:
        _call(
            url, f"{_REGIONS}/{name}/register", options, {"key": f"/{name}", "offset": 0, "byte_size": size}
        )


def http_unregister(options: EndpointOptions, name: str) -> None:
    """Unregister shared memory. A server that is gone is no error."""
    for url in options.server_urls:
        with suppress(PerfError):
            _call(url, f"{_REGIONS}/{name}/unregister", options, {})


def _call(
    url: str, path: str, options: EndpointOptions, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """GET a path, or POST `body` to it, and return the JSON of the response. Raises `PerfError`."""
    url = (url if "://" in url else f"http://{url}").rstrip("/") + path
    try:
        data = None if body is None else orjson.dumps(body)
        request = urllib.request.Request(url, data, headers=dict(options.header_list))
        context = options.ssl_context() if url.startswith("https") else None
        with urllib.request.urlopen(request, timeout=_METADATA_SECONDS, context=context) as response:
            content: dict[str, Any] = orjson.loads(response.read() or b"{}")
            return content
    except urllib.error.HTTPError as error:
        raise PerfError(f"{url}: HTTP {error.code}: {error.read(500).decode('utf-8', 'replace')}") from None
    except (OSError, ValueError) as error:
        raise PerfError(f"{url}: {error}") from None
