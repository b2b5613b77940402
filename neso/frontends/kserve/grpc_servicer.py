"""The methods of `inference.GRPCInferenceService` and of the standard health service.

Each method reads the request message, calls the service and writes the reply message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from grpc.aio import ServicerContext as Context
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from neso.frontends.kserve.grpc_calls import ActiveCalls, rpc
from neso.frontends.kserve.grpc_codec import decode_load_request
from neso.frontends.kserve.grpc_infer import ModelInfer
from neso.frontends.kserve.grpc_stream import InferStream
from neso.frontends.kserve.request_limits import RequestLimits
from neso.frontends.kserve.service import KServeService, parse_load_parameters
from neso.frontends.transport.grpc import CallbackHandler, GrpcServer
from neso.server.errors import InvalidArgument

# grpc.health.v1.HealthCheckResponse, whose only field is 1: status. Encoded by hand to avoid a dependency.
SERVING = b"\x08\x01"
NOT_SERVING = b"\x08\x02"

# Type of each log setting, and its name in Triton's error message.
_LOG_TYPES = {
    "log_info": ("bool_param", "boolean"),
    "log_warning": ("bool_param", "boolean"),
    "log_error": ("bool_param", "boolean"),
    "log_verbose_level": ("uint32_param", "int32"),
    "log_format": ("string_param", "string"),
}


def register_methods(
    service: KServeService, calls: ActiveCalls, server: GrpcServer, limits: RequestLimits
) -> None:
    """Add all methods to a server.

    Methods with large messages receive bytes instead of protobuf messages.
    """
    servicer = Servicer(service, calls, limits)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    server.add_registered_method_handlers(
        "inference.GRPCInferenceService",
        {
            "ModelInfer": CallbackHandler(ModelInfer(service, calls, limits)),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(servicer.ModelStreamInfer),
            "RepositoryModelLoad": grpc.unary_unary_rpc_method_handler(
                servicer.RepositoryModelLoad,
                response_serializer=pb.RepositoryModelLoadResponse.SerializeToString,
            ),
        },
    )
    server.add_registered_method_handlers(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(servicer.Check)}
    )


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, service: KServeService, calls: ActiveCalls, limits: RequestLimits) -> None:
        self._service = service
        self._limits = limits
        self.calls = calls

    # Health.

    async def Check(self, request: bytes, context: Context) -> bytes:
        """`grpc.health.v1.Health/Check`, for any service name."""
        return SERVING if self._service.live() else NOT_SERVING

    @rpc
    async def ServerLive(self, request: Any, context: Context) -> Any:
        return pb.ServerLiveResponse(live=self._service.live())

    @rpc
    async def ServerReady(self, request: Any, context: Context) -> Any:
        return pb.ServerReadyResponse(ready=self._service.ready())

    @rpc
    async def ModelReady(self, request: Any, context: Context) -> Any:
        ready = await self._service.model_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    # Metadata, configuration and statistics.

    @rpc
    async def ServerMetadata(self, request: Any, context: Context) -> Any:
        metadata = self._service.server_metadata()
        return pb.ServerMetadataResponse(
            name=metadata.name, version=metadata.version, extensions=metadata.extensions
        )

    @rpc
    async def ModelMetadata(self, request: Any, context: Context) -> Any:
        metadata = self._service.model_metadata(request.name, request.version)
        reply = pb.ModelMetadataResponse(
            name=metadata.name, versions=metadata.versions, platform=metadata.platform
        )
        for target, tensors in ((reply.inputs, metadata.inputs), (reply.outputs, metadata.outputs)):
            for tensor in tensors:
                target.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        return reply

    @rpc
    async def ModelConfig(self, request: Any, context: Context) -> Any:
        return pb.ModelConfigResponse(config=self._service.model_config(request.name, request.version))

    @rpc
    async def ModelStatistics(self, request: Any, context: Context) -> Any:
        # A snapshot has the same structure as the message.
        reply = pb.ModelStatisticsResponse()
        for snapshot in await self._service.statistics(request.name, request.version):
            reply.model_stats.add(**snapshot)
        return reply

    # Model repository.

    @rpc
    async def RepositoryIndex(self, request: Any, context: Context) -> Any:
        reply = pb.RepositoryIndexResponse()
        for entry in await self._service.repository_index(request.repository_name, request.ready):
            state = entry.state.value if entry.state is not None else ""
            reply.models.add(name=entry.name, version=entry.version, state=state, reason=entry.reason)
        return reply

    @rpc
    async def RepositoryModelLoad(self, data: bytes, context: Context) -> Any:
        request = decode_load_request(data)
        config, files = parse_load_parameters(request.parameters, _read_string, _read_bytes)
        await self._service.load_model(request.repository_name, request.model_name, config, files)
        return pb.RepositoryModelLoadResponse()

    @rpc
    async def RepositoryModelUnload(self, request: Any, context: Context) -> Any:
        dependents = _read_unload_dependents(request)
        await self._service.unload_model(request.repository_name, request.model_name, dependents)
        return pb.RepositoryModelUnloadResponse()

    # Shared memory.

    @rpc
    async def SystemSharedMemoryStatus(self, request: Any, context: Context) -> Any:
        reply = pb.SystemSharedMemoryStatusResponse()
        for region in self._service.shared_memory.status(request.name):
            status = reply.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return reply

    @rpc
    async def SystemSharedMemoryRegister(self, request: Any, context: Context) -> Any:
        await self._service.change_shared_memory(
            "register", request.name, request.key, request.offset, request.byte_size
        )
        return pb.SystemSharedMemoryRegisterResponse()

    @rpc
    async def SystemSharedMemoryUnregister(self, request: Any, context: Context) -> Any:
        await self._service.change_shared_memory("unregister", request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    @rpc
    async def CudaSharedMemoryStatus(self, request: Any, context: Context) -> Any:
        reply = pb.CudaSharedMemoryStatusResponse()
        for region in self._service.shared_memory.cuda_status(request.name):
            status = reply.regions[region.name]
            status.name, status.device_id, status.byte_size = region.name, region.device_id, region.byte_size
        return reply

    @rpc
    async def CudaSharedMemoryRegister(self, request: Any, context: Context) -> Any:
        await self._service.change_shared_memory(
            "register_cuda", request.name, request.raw_handle, request.device_id, request.byte_size
        )
        return pb.CudaSharedMemoryRegisterResponse()

    @rpc
    async def CudaSharedMemoryUnregister(self, request: Any, context: Context) -> Any:
        await self._service.change_shared_memory("unregister_cuda", request.name)
        return pb.CudaSharedMemoryUnregisterResponse()

    # Trace and log settings. Both methods reply with the current settings.

    @rpc
    async def TraceSetting(self, request: Any, context: Context) -> Any:
        changes = {name: list(setting.value) for name, setting in request.settings.items()}
        reply = pb.TraceSettingResponse()
        for name, value in (await self._service.trace_settings(request.model_name, changes)).items():
            reply.settings[name].value.extend([value] if isinstance(value, str) else value)
        return reply

    @rpc
    async def LogSettings(self, request: Any, context: Context) -> Any:
        changes = {name: _read_log_setting(name, value) for name, value in request.settings.items()}
        reply = pb.LogSettingsResponse()
        for name, value in (await self._service.log_settings(changes)).items():
            if isinstance(value, bool):
                reply.settings[name].bool_param = value
            elif isinstance(value, int):
                reply.settings[name].uint32_param = value
            else:
                reply.settings[name].string_param = value
        return reply

    # Inference. ModelInfer is registered as a callback handler.

    @rpc
    async def ModelStreamInfer(self, messages: AsyncIterator[bytes], context: Context) -> None:
        stream = InferStream(self._service, context, self._limits)
        self.calls.on_stop(stream.drain)
        try:
            error = await stream.run(messages)
        finally:
            self.calls.remove_on_stop(stream.drain)
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame


def _read_unload_dependents(message: Any) -> bool:
    unload_dependents = False
    for key, parameter in message.parameters.items():
        if key != "unload_dependents":
            raise InvalidArgument(f"unrecognized unload parameter '{key}', expected 'unload_dependents'")
        unload_dependents = _typed(key, parameter, "bool_param")
    return unload_dependents


def _read_string(key: str, parameter: Any) -> str:
    return _typed(key, parameter, "string_param")  # type: ignore[no-any-return]


def _read_bytes(key: str, parameter: Any) -> bytes:
    return _typed(key, parameter, "bytes_param")  # type: ignore[no-any-return]


def _typed(key: str, parameter: Any, expected: str) -> Any:
    if parameter.WhichOneof("parameter_choice") != expected:
        raise InvalidArgument(f"invalid value type for '{key}' parameter, expected {expected}.")
    return getattr(parameter, expected)


def _read_log_setting(name: str, value: Any) -> Any:
    choice = value.WhichOneof("parameter_choice")
    expected, type_name = _LOG_TYPES.get(name, (choice, ""))
    if choice != expected:
        raise InvalidArgument(f"expect {type_name} for '{name}'")
    return getattr(value, choice) if choice else None
