"""The methods of inference.GRPCInferenceService."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from grpc.aio import ServicerContext as Context
from tritonclient.grpc import service_pb2, service_pb2_grpc

from neso.frontends.header_forwarding import HeaderForwarding
from neso.frontends.kserve_grpc.calls import Calls, rpc
from neso.frontends.kserve_grpc.model_infer import ModelInfer
from neso.frontends.kserve_grpc.repository import (
    read_load_parameters,
    read_unload_dependents,
    refuse_repository_name,
)
from neso.frontends.kserve_grpc.settings import SettingMethods
from neso.frontends.kserve_grpc.shared_memory import SharedMemoryMethods
from neso.frontends.kserve_grpc.stream import InferStream
from neso.frontends.transport.grpc import CallbackHandler, GrpcServer
from neso.server.core import Core


def add_to_server(servicer: Servicer, server: GrpcServer) -> None:
    """Register every method, those that infer without protobuf's (de)serializers: they take and give bytes."""
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    server.add_registered_method_handlers(
        "inference.GRPCInferenceService",
        {
            "ModelInfer": CallbackHandler(ModelInfer(servicer.core, servicer.calls, servicer.forwarding)),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(servicer.ModelStreamInfer),
        },
    )


class Servicer(SharedMemoryMethods, SettingMethods, service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Reads a request message, asks the core, writes the reply."""

    def __init__(self, core: Core, forwarding: HeaderForwarding | None = None) -> None:
        self.core = core
        self.forwarding = forwarding
        self.calls = Calls()

    @rpc
    async def ServerLive(self, request: Any, context: Context) -> Any:
        return service_pb2.ServerLiveResponse(live=self.core.live())

    @rpc
    async def ServerReady(self, request: Any, context: Context) -> Any:
        return service_pb2.ServerReadyResponse(ready=self.core.ready())

    @rpc
    async def ModelReady(self, request: Any, context: Context) -> Any:
        # Unknown, or not loaded: a plain no, as in Triton.
        ready = await self.core.check_model_ready(request.name, request.version)
        return service_pb2.ModelReadyResponse(ready=ready)

    @rpc
    async def ServerMetadata(self, request: Any, context: Context) -> Any:
        metadata = self.core.metadata()
        return service_pb2.ServerMetadataResponse(
            name=metadata.name, version=metadata.version, extensions=metadata.extensions
        )

    @rpc
    async def ModelMetadata(self, request: Any, context: Context) -> Any:
        metadata = self.core.model(request.name, request.version).metadata()
        reply = service_pb2.ModelMetadataResponse(
            name=metadata.name, versions=metadata.versions, platform=metadata.platform
        )
        for target, tensors in ((reply.inputs, metadata.inputs), (reply.outputs, metadata.outputs)):
            for tensor in tensors:
                target.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        return reply

    @rpc
    async def ModelConfig(self, request: Any, context: Context) -> Any:
        return service_pb2.ModelConfigResponse(config=self.core.model(request.name, request.version).config)

    @rpc
    async def ModelStatistics(self, request: Any, context: Context) -> Any:
        core = self.core
        models = [core.model(request.name, request.version)] if request.name else core.models()
        reply = service_pb2.ModelStatisticsResponse()
        for model in models:
            # The snapshot has the names of the extension, which are those of the message's fields.
            reply.model_stats.add(**model.statistics.snapshot())
        return reply

    @rpc
    async def RepositoryIndex(self, request: Any, context: Context) -> Any:
        refuse_repository_name(request)
        reply = service_pb2.RepositoryIndexResponse()
        for entry in self.core.repository_index(ready_only=request.ready):
            state = entry.state.value if entry.state is not None else ""
            reply.models.add(name=entry.name, version=entry.version, state=state, reason=entry.reason)
        return reply

    @rpc
    async def RepositoryModelLoad(self, request: Any, context: Context) -> Any:
        refuse_repository_name(request)
        config, files = read_load_parameters(request)
        await self.core.load_model(request.model_name, config, files or None)
        return service_pb2.RepositoryModelLoadResponse()

    @rpc
    async def RepositoryModelUnload(self, request: Any, context: Context) -> Any:
        refuse_repository_name(request)
        await self.core.unload_model(request.model_name, read_unload_dependents(request))
        return service_pb2.RepositoryModelUnloadResponse()

    @rpc
    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], context: Context) -> None:
        stream = InferStream(self.core, context, self.forwarding)
        self.calls.on_stop(stream.drain)
        try:
            await stream.run(requests)
        finally:
            self.calls.forget(stream.drain)
