"""KServe over gRPC: `ModelInfer`; with streaming and for decoupled models a `ModelStreamInfer` call per request."""

from __future__ import annotations

import time
from itertools import cycle
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from neso.perf.client.target import TaskTarget
from neso.perf.endpoints.base import History
from neso.perf.endpoints.kserve import Convention, ModelMetadata, decode_tensor, encode_tensor
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.errors import PerfError
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest

_SERVICE = "/inference.GRPCInferenceService/"
_METADATA_SECONDS = 30.0
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)
_ERROR_KINDS = {grpc.StatusCode.UNAVAILABLE: "connect", grpc.StatusCode.DEADLINE_EXCEEDED: "timeout"}


class _ModelError(Exception):
    """Error message in a response of a stream."""


class GrpcTarget(TaskTarget):
    """Sends requests to one or more servers in turn; each has one connection."""

    def __init__(self, options: EndpointOptions) -> None:
        super().__init__()
        self._options = options
        self._channels = [_open_channel(url, options) for url in options.server_urls]
        self._headers = [(name.lower(), value) for name, value in options.header_list]

    @classmethod
    async def open(cls, options: EndpointOptions) -> GrpcTarget:
        """Connect, and ask for the metadata of the first model. Raises `PerfError`."""
        target = cls(options)
        metadata = await _metadata(target._channels[0], options)
        target._convention = Convention(options.backend, metadata)
        target._streaming = options.streaming or metadata.is_decoupled
        target._calls = cycle([target._call(channel) for channel in target._channels])
        return target

    _convention: Convention
    _streaming: bool
    _calls: cycle[Any]

    def _call(self, channel: Any) -> Any:
        if self._streaming:
            return channel.stream_stream(
                _SERVICE + "ModelStreamInfer",
                request_serializer=pb.ModelInferRequest.SerializeToString,
                response_deserializer=pb.ModelStreamInferResponse.FromString,
            )
        return channel.unary_unary(
            _SERVICE + "ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )

    async def send(
        self,
        request: PerfRequest,
        record: RequestRecord,
        history: History,
        cancel_after: float | None = None,
    ) -> None:
        call = next(self._calls)
        try:
            message = self._message(request, record)
        except PerfError as error:
            record.start_ns = record.end_ns = time.monotonic_ns()
            record.error_kind, record.error_message = "build", str(error)
            return
        await self._run(self._exchange(call, message, record), record, cancel_after)

    async def _exchange(self, call: Any, message: Any, record: RequestRecord) -> None:
        try:
            await (self._stream if self._streaming else self._unary)(call, message, record)
            if not record.arrivals_ns:
                record.error_kind, record.error_message = "empty", "the response has no output"
        except grpc.aio.AioRpcError as error:
            record.status = error.code().value[0]
            kind = _ERROR_KINDS.get(error.code(), "http")
            if kind == "connect" and record.arrivals_ns:
                kind = "disconnect"
            record.error_kind = kind
            record.error_message = f"{error.code().name}: {error.details()}"[:500]
        except _ModelError as error:
            record.error_kind, record.error_message = "stream", str(error)[:500]
        except (ValueError, IndexError) as error:
            record.error_kind, record.error_message = "protocol", f"unexpected response: {error}"

    def _message(self, request: PerfRequest, record: RequestRecord) -> Any:
        message = pb.ModelInferRequest(model_name=record.model, id=str(record.number))
        for name, array in self._convention.tensors(request, streaming=self._streaming).items():
            datatype, data = encode_tensor(array)
            message.inputs.add(name=name, datatype=datatype, shape=array.shape)
            message.raw_input_contents.append(data)
        if self._convention.output:
            message.outputs.add(name=self._convention.output)
        record.request_bytes = message.ByteSize()
        return message

    async def _unary(self, call: Any, message: Any, record: RequestRecord) -> None:
        response = await call(message, timeout=self._options.request_timeout, metadata=self._headers)
        record.first_byte_ns = time.monotonic_ns()
        self._read(record, response, record.first_byte_ns)

    async def _stream(self, call: Any, message: Any, record: RequestRecord) -> None:
        responses = call(iter((message,)), timeout=self._options.request_timeout, metadata=self._headers)
        async for response in responses:
            now = time.monotonic_ns()
            if not record.first_byte_ns:
                record.first_byte_ns = now
            if response.error_message:
                raise _ModelError(response.error_message)
            if response.infer_response.outputs:
                self._read(record, response.infer_response, now)

    def _read(self, record: RequestRecord, response: Any, now: int) -> None:
        record.response_bytes += response.ByteSize()
        output: np.ndarray | None = None
        for position, tensor in enumerate(response.outputs):
            if tensor.name == self._convention.output:
                data = response.raw_output_contents[position]
                output = decode_tensor(tensor.datatype, list(tensor.shape), data)
        self._convention.read(record, output, now)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


def _open_channel(url: str, options: EndpointOptions) -> Any:
    scheme, _, address = url.rpartition("://")
    if scheme not in ("", "grpc", "grpcs", "http", "https") or not address:
        raise PerfError(f"--url: expected HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT, got '{url}'")
    if scheme not in ("grpcs", "https"):
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    if options.insecure:
        raise PerfError(
            "--ssl-insecure: gRPC always verifies the server; give its certificate as --ssl-ca-file"
        )
    files = (options.ca_file, options.key_file, options.cert_file)
    contents = [None if path is None else path.read_bytes() for path in files]
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*contents), options=_OPTIONS)


async def _metadata(channel: Any, options: EndpointOptions) -> ModelMetadata:
    """Ask for the metadata and the configuration of the first model."""

    async def call(method: str, request: Any, response: Any) -> Any:
        function = channel.unary_unary(
            _SERVICE + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        headers = [(name.lower(), value) for name, value in options.header_list]
        return await function(request, timeout=_METADATA_SECONDS, metadata=headers, wait_for_ready=False)

    name = options.models[0]
    try:
        metadata = await call("ModelMetadata", pb.ModelMetadataRequest(name=name), pb.ModelMetadataResponse)
        config = await call("ModelConfig", pb.ModelConfigRequest(name=name), pb.ModelConfigResponse)
    except grpc.aio.AioRpcError as error:
        raise PerfError(
            f"{options.server_urls[0]}: model '{name}': {error.code().name}: {error.details()}"
        ) from None
    inputs, outputs = (
        tuple((one.name, one.datatype, tuple(one.shape)) for one in tensors)
        for tensors in (metadata.inputs, metadata.outputs)
    )
    policy = config.config.model_transaction_policy
    return ModelMetadata(inputs, outputs, config.config.max_batch_size, policy.decoupled)


async def grpc_metadata(options: EndpointOptions) -> ModelMetadata:
    """Return the metadata of the first model. Raises `PerfError`."""
    channel = _open_channel(options.server_urls[0], options)
    try:
        return await _metadata(channel, options)
    finally:
        await channel.close()
