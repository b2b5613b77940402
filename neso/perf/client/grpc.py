"""KServe over gRPC: `ModelInfer`; with streaming and for decoupled models a `ModelStreamInfer` call per request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import cycle
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from neso.perf.client.target import OnFirstOutput, TaskTarget
from neso.perf.endpoints.base import History
from neso.perf.endpoints.kserve import (
    Convention,
    ModelMetadata,
    decode_tensor,
    encode_tensor,
    shared_memory_parameters,
)
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.errors import PerfError
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest, SharedTensor

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
        metadata = await _read_metadata(options)
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
        on_first_output: OnFirstOutput | None = None,
    ) -> None:
        call = next(self._calls)
        try:
            message = self._message(request, record)
        except PerfError as error:
            record.start_ns = record.end_ns = time.monotonic_ns()
            record.error_kind, record.error_message = "build", str(error)
            return
        await self._run(self._exchange(call, message, record, on_first_output), record, cancel_after)

    async def _exchange(
        self, call: Any, message: Any, record: RequestRecord, on_first_output: OnFirstOutput | None
    ) -> None:
        try:
            if self._streaming:
                await self._stream(call, message, record, on_first_output)
            else:
                await self._unary(call, message, record)
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
        _set_parameters(message, self._convention.parameters(request))
        for name, tensor in self._convention.tensors(request, streaming=self._streaming).items():
            if isinstance(tensor, SharedTensor):
                place = message.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
                _set_parameters(place, shared_memory_parameters(tensor))
            else:
                datatype, data = encode_tensor(tensor)
                message.inputs.add(name=name, datatype=datatype, shape=tensor.shape)
                message.raw_input_contents.append(data)
        for name, tensor in request.shared_outputs.items():
            _set_parameters(message.outputs.add(name=name), shared_memory_parameters(tensor))
        if self._convention.output:
            message.outputs.add(name=self._convention.output)
        record.request_bytes = message.ByteSize()
        return message

    async def _unary(self, call: Any, message: Any, record: RequestRecord) -> None:
        response = await call(message, timeout=self._options.request_timeout, metadata=self._headers)
        record.first_byte_ns = time.monotonic_ns()
        self._read(record, response, record.first_byte_ns)

    async def _stream(
        self, call: Any, message: Any, record: RequestRecord, on_first_output: OnFirstOutput | None
    ) -> None:
        responses = call(iter((message,)), timeout=self._options.request_timeout, metadata=self._headers)
        async for response in responses:
            now = time.monotonic_ns()
            if not record.first_byte_ns:
                record.first_byte_ns = now
            if response.error_message:
                raise _ModelError(response.error_message)
            if response.infer_response.outputs:
                self._read(record, response.infer_response, now)
            if on_first_output is not None and record.arrivals_ns:
                on_first_output()

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


_PARAMETERS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def _set_parameters(message: Any, parameters: Mapping[str, Any]) -> None:
    """Set the parameters of a request, an input or an output. Raises `PerfError`."""
    for name, value in parameters.items():
        if type(value) not in _PARAMETERS:
            raise PerfError(f"parameter '{name}': expected a text, number or boolean, got {value!r}")
        setattr(message.parameters[name], _PARAMETERS[type(value)], value)


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


def grpc_metadata(options: EndpointOptions) -> ModelMetadata:
    """Return the metadata of the first model. Raises `PerfError`."""
    return asyncio.run(_read_metadata(options))


async def _read_metadata(options: EndpointOptions) -> ModelMetadata:
    url, name = options.server_urls[0], options.models[0]
    metadata = await _call(
        url, options, "ModelMetadata", pb.ModelMetadataRequest(name=name), pb.ModelMetadataResponse
    )
    response = await _call(
        url, options, "ModelConfig", pb.ModelConfigRequest(name=name), pb.ModelConfigResponse
    )
    config = response.config
    inputs, outputs = (
        tuple((one.name, one.datatype, tuple(one.shape)) for one in tensors)
        for tensors in (metadata.inputs, metadata.outputs)
    )
    return ModelMetadata(
        inputs,
        outputs,
        config.max_batch_size,
        config.model_transaction_policy.decoupled,
        config.HasField("sequence_batching"),
    )


def grpc_register(options: EndpointOptions, name: str, size: int) -> None:
    """Register shared memory, whose key is its name, with all servers. Raises `PerfError`."""
    request = pb.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", offset=0, byte_size=size)
    for url in options.server_urls:
        call = _call(
            url, options, "SystemSharedMemoryRegister", request, pb.SystemSharedMemoryRegisterResponse
        )
        asyncio.run(call)


def grpc_unregister(options: EndpointOptions, name: str) -> None:
    """Unregister shared memory. A server that is gone is no error."""
    request = pb.SystemSharedMemoryUnregisterRequest(name=name)
    for url in options.server_urls:
        call = _call(
            url, options, "SystemSharedMemoryUnregister", request, pb.SystemSharedMemoryUnregisterResponse
        )
        with suppress(PerfError):
            asyncio.run(call)


async def _call(url: str, options: EndpointOptions, method: str, request: Any, response: Any) -> Any:
    """Call a method of a server; `response` is the class of its response. Raises `PerfError`."""
    channel = _open_channel(url, options)
    function = channel.unary_unary(
        _SERVICE + method,
        request_serializer=type(request).SerializeToString,
        response_deserializer=response.FromString,
    )
    headers = [(name.lower(), value) for name, value in options.header_list]
    try:
        return await function(request, timeout=_METADATA_SECONDS, metadata=headers, wait_for_ready=False)
    except grpc.aio.AioRpcError as error:
        raise PerfError(f"{url}: {error.code().name}: {error.details()}") from None
    finally:
        await channel.close()
